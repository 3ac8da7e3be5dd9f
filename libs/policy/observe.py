"""Busy and prefill shares of one engine, estimated from its counters and the cost of its steps."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log2, sqrt
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libs.policy.newest import put_newest
from libs.policy.observed_work import CHUNK_TOKENS, CountedWork, CounterChange

Array = NDArray[np.float64]

# Beyond this many decoding sequences a further one may cost more, because other limits apply.
KNEE_SEQUENCES: Final = 64.0
# The candidate minimum times of a step with a prompt. Without CUDA graphs, launching kernels takes longer than running
# them.
FLOORS_S: Final = (0.0, *(float(each) for each in np.geomspace(0.005, 0.08, 13)))
RIDES: Final = (0.0, 0.5, 1.0)
"""The candidate shares of a step's base that a prompt saves if the step decodes anyway."""
# Computing this many prompt tokens takes as long as reading the weights once (150 to 400 on current accelerators).
RIDGE_TOKENS: Final = 250.0
# This many decoding sequences double the time of a step on current accelerators.
DOUBLING_SEQUENCES: Final = 128.0
# The weight of the prior, where a sample's is 1. It decides only what samples of a single kind of load leave open.
PRIOR_WEIGHT: Final = 0.02
ROUNDS: Final = 6
LEAST_RESIDUAL: Final = 0.02
"""The relative residual below which rows have equal weight."""
WORST_RESIDUAL: Final = 0.3
# A more complicated form must reduce the residual below this share of the best so far.
BETTER: Final = 0.99


@dataclass(frozen=True, slots=True)
class Sample:
    """An amount of work and the time that it took."""

    work: CountedWork
    took_s: float
    weight: float

    @property
    def row(self) -> tuple[float, ...]:
        """The `ROW` numbers that a fit needs."""
        work = self.work
        return self.took_s, self.weight, work.steps, work.prefill_steps, work.prompt_tokens, work.decode_tokens


ROW: Final = 6


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step in seconds: base + prompt tokens + decoding sequences, with an additional rate beyond the
    knee.
    """

    base_s: float
    prompt_token_s: float
    sequence_s: float
    further_sequence_s: float
    floor_s: float
    """The minimum time of a step with a prompt."""
    ride: float
    residual: float
    """Mean relative error over the fitted samples, 0 to 1."""

    def decode_s(self, decoding: float) -> float:
        """Return the time of a step that only decodes this many sequences."""
        return self.base_s + self.sequence_s * decoding + self.further_sequence_s * max(0.0, decoding - KNEE_SEQUENCES)

    def prefill_s(self, chunk_tokens: float) -> float:
        """Return the time of a step with only prompt tokens, without the floor."""
        return self.base_s + self.prompt_token_s * chunk_tokens

    def mixed_s(self, chunk_tokens: float, decoding: float) -> float:
        """Return the time of a step with both phases, at least the floor."""
        near = self.base_s + self.sequence_s * decoding + self.prompt_token_s * chunk_tokens
        near = max(self.floor_s, near - self.ride * self.base_s * min(1.0, decoding))
        return near + self.further_sequence_s * max(0.0, decoding - KNEE_SEQUENCES)

    def prefill_share(self, chunk_tokens: float, decoding: float) -> float:
        """Return prefill's share of a step with prompts, in proportion to the times of both phases alone."""
        prefill_s = self.prefill_s(chunk_tokens)
        whole_s = prefill_s + self.decode_s(decoding)
        return prefill_s / whole_s if decoding and whole_s else 1.0

    def prefill_and_decode_s(self, work: CountedWork) -> tuple[float, float]:
        """Return the seconds that the work took in each phase."""
        prefill_s, decode_s = self._phases_s(work, 1.0)
        if prefill_s and 0.0 < prefill_s + decode_s < work.wall_s:
            # A prompt that finds the engine idle runs alone. Random arrivals find it busy as often as it is.
            return self._phases_s(work, (prefill_s + decode_s) / work.wall_s)
        return prefill_s, decode_s

    def _phases_s(self, work: CountedWork, beside: float) -> tuple[float, float]:
        """Return the seconds in each phase if at most the part `beside` of prefill steps also decodes."""
        steps = max(work.steps, 1.0) if work.steps or work.prompt_tokens else 0.0
        if not steps:
            return 0.0, 0.0
        prefill_steps, chunk_tokens = min(work.prefill_steps, steps), work.chunk_tokens
        beside = min(beside, work.decode_tokens / steps)  # below one sequence per step, some steps contain only prompts
        decode_steps = steps - (1.0 - beside) * prefill_steps
        decoding = work.decode_tokens / decode_steps if decode_steps else 0.0
        alone_s = (1.0 - beside) * prefill_steps * self.mixed_s(chunk_tokens, 0.0)
        mixed_s = beside * prefill_steps * self.mixed_s(chunk_tokens, decoding)
        prefill_s = mixed_s * self.prefill_share(chunk_tokens, decoding)
        return alone_s + prefill_s, mixed_s - prefill_s + (steps - prefill_steps) * self.decode_s(decoding)


def _columns(steps: Array, prompt_tokens: Array, decode_tokens: Array) -> Array:
    """Return the regressors, of shape (rows, 4)."""
    decoding = decode_tokens / np.maximum(steps, 1e-9)
    further = decode_tokens * np.maximum(0.0, 1.0 - KNEE_SEQUENCES / np.maximum(decoding, 1e-9))
    return np.stack([steps, prompt_tokens, decode_tokens, further], axis=1)


def _prior(step_s: float) -> Array:
    """Return the prior's term of the normal equations, shape (4, 4), for steps of about this length."""
    ridge = np.array([-1.0, RIDGE_TOKENS, 0.0, 0.0])
    doubling = np.array([-1.0, 0.0, DOUBLING_SEQUENCES, 0.0])
    further = np.array([0.0, 0.0, 0.0, DOUBLING_SEQUENCES])  # a load barely beyond the knee says nothing about it
    rows = np.stack([ridge, doubling, further])
    prior: Array = PRIOR_WEIGHT / step_s**2 * (rows.T @ rows)
    return prior


def _non_negative(gram: Array, moments: Array) -> Array:
    """Solve least squares [forms, 4, 4] with non-negative coefficients [forms, 4].

    The most negative coefficient of each form is dropped in turn.
    """
    kept = np.ones(moments.shape, np.bool_)
    found = np.zeros(moments.shape)
    diagonal = np.arange(gram.shape[1])
    left = np.arange(len(gram))
    while len(left):
        own = kept[left]
        part = gram[left] * (own[:, :, None] & own[:, None, :])
        # A ridge far below any real coefficient, since rows of one kind leave a coefficient undetermined.
        ridge = np.maximum(1e-10 * part[:, diagonal, diagonal].sum(axis=1), 1e-300)
        part[:, diagonal, diagonal] += np.where(own, ridge[:, None], 1.0)
        solved = np.linalg.solve(part, (moments[left] * own)[:, :, None])[:, :, 0]
        solved[~own] = 0.0
        worst = solved.argmin(axis=1)
        negative = solved[np.arange(len(left)), worst] < 0
        found[left[~negative]] = solved[~negative]
        left, worst = left[negative], worst[negative]
        kept[left, worst] = False
    return found


class _Rows:
    """Samples as arrays, with the means of their steps."""

    def __init__(self, table: Array) -> None:
        """Create arrays from a table with a row of `Sample.row` for each sample, shape (samples, `ROW`)."""
        self.took, self.trust, steps, self.prefill_steps, prompt_tokens, decode_tokens = table.T
        self.rows = _columns(steps, prompt_tokens, decode_tokens)
        self.products = (self.rows[:, :, None] * self.rows[:, None, :]).reshape(len(table), -1)
        self.prior = _prior(float((self.took / np.maximum(steps, 1.0)).min()))
        decoding = decode_tokens / np.maximum(steps, 1.0)
        self.decoding = np.minimum(1.0, decoding)
        chunks = prompt_tokens / np.maximum(self.prefill_steps, 1.0)
        self.mean_step = _columns(np.ones(len(table)), chunks, decoding)
        # sequences beyond the knee cost time of the host, which a step at the floor also takes
        self.mean_step[:, 3] = 0.0

    def fit(self, floors_s: Array, rides: Array, start: Array) -> tuple[Array, Array]:
        """Return (mean relative errors [forms], coefficients [forms, 4]), robust against outliers."""
        # All forms are fitted at once, since one takes nearly as long as forty.
        weights = self.trust / np.maximum(self.took, 0.02) ** 2
        found = np.repeat(start[None], len(floors_s), axis=0)
        for _ in range(ROUNDS):
            extra = self._extra(found, floors_s, rides)
            off = np.abs(self.took - extra - found @ self.rows.T) / self.took
            robust = weights / np.maximum(off, LEAST_RESIDUAL)
            # Half a step, since the floor's addition depends on the coefficients that it is added to.
            found = 0.5 * (found + self._solve(robust, np.maximum(self.took - extra, 0.0)))
        off = np.abs(self.took - self._extra(found, floors_s, rides) - found @ self.rows.T) / self.took
        return np.minimum(off, WORST_RESIDUAL) @ self.trust / self.trust.sum(), found

    def start(self) -> Array:
        first: Array = self._solve((self.trust / np.maximum(self.took, 0.02) ** 2)[None], self.took[None])[0]
        return first

    def _solve(self, weights: Array, took: Array) -> Array:
        """Return coefficients [forms, 4] for weights and times [forms, rows]."""
        size = self.rows.shape[1]
        gram = (weights @ self.products).reshape(-1, size, size) + self.prior
        return _non_negative(gram, (weights * took) @ self.rows)

    def _extra(self, found: Array, floors_s: Array, rides: Array) -> Array:
        """Return the change of each row's sum of coefficients [forms, rows] by the floor and the ride."""
        saved = rides[:, None] * found[:, :1] * self.decoding
        extra: Array = self.prefill_steps * np.maximum(floors_s[:, None] - found @ self.mean_step.T, -saved)
        return extra


def _near(values: Sequence[float], value: float) -> Sequence[float]:
    at = min(range(len(values)), key=lambda each: abs(values[each] - value))
    return values[max(0, at - 1) : at + 2]


def fit_step_cost(samples: Sequence[Sample], before: StepCost | None = None) -> StepCost | None:
    """Return the cost that explains the samples best; None without samples.

    With a cost found `before`, only forms next to its floor and ride are tried, which is a tenth of the work.
    """
    return _fit(np.array([each.row for each in samples]), before) if samples else None


def _fit(table: Array, before: StepCost | None) -> StepCost:
    rows = _Rows(table)
    rides = RIDES if before is None else _near(RIDES, before.ride)
    floors_s = FLOORS_S if before is None else _near(FLOORS_S, before.floor_s)
    forms = np.array([(ride, floor_s) for ride in rides for floor_s in floors_s])
    residuals, coefficients = rows.fit(forms[:, 1], forms[:, 0], rows.start())
    best = 0
    for form in range(1, len(forms)):
        if residuals[form] < BETTER * residuals[best]:
            best = form
    (ride, floor_s), residual, found = forms[best].tolist(), float(residuals[best]), coefficients[best]
    base_s, prompt_token_s, sequence_s, further_s = (float(each) for each in found)
    return StepCost(base_s, prompt_token_s, sequence_s, further_s, floor_s, ride, residual)


Kind = Literal["throughout", "gaps", "lone"]
# A lone request's prefill time includes waits of the host, so it counts least.
WEIGHTS: Final[dict[Kind, float]] = {"throughout": 1.0, "gaps": 0.3, "lone": 0.03}
SAMPLES_A_LOAD: Final = 6
"""Samples kept of each kind of load (decoding sequences and prompt tokens a step, by powers of two)."""
MOST_LOADS: Final = 64
SAMPLE_S: Final = 2.0
SAMPLE_STEPS: Final = 300
LEAST_SAMPLE_STEPS: Final = 8
LEAST_SAMPLE_S: Final = 1.5
OVERLAP_KEPT: Final = 0.9
"""The weight that an interval keeps with each further one: at two a second, half of it after three seconds."""
FIRST_FITS_EVERY_S: Final = 2.0
FITS_EVERY_S: Final = 10.0
LEARNING_S: Final = 60.0
"""The time after the first reading during which constants are fitted more often."""
# The split of a mixed step is a convention, so the interval of prefill's share has at least this half width.
LEAST_MARGIN: Final = 0.04
LEARNING_MARGIN: Final = 0.08  # during the first minute


@dataclass(frozen=True, slots=True)
class PhaseEstimate:
    """Estimated busy and prefill times of one interval, with bounds on prefill."""

    busy_s: float
    prefill_s: float
    prefill_low_s: float
    prefill_high_s: float


@dataclass(slots=True)
class _Overlap:
    """The busy time of an engine that only computes prompts, estimated from their overlap.

    A prompt takes its own step, plus the rest of the step that runs when it is scheduled. The engine schedules a step
    ahead: the rest is nothing on an idle engine and a whole step on a busy one. With `busy` as the chance that a step
    runs, a prompt takes 1 + busy steps, and steps take `busy` of the wall time.
    """

    work: CountedWork = field(default_factory=CountedWork)
    prefills: float = 0.0
    prefills_s: float = 0.0

    def take(self, interval: CounterChange) -> None:
        """Add an interval and decay earlier ones; an interval with other work resets them."""
        work = interval.work
        if not interval.prefills and (work.steps or work.prompt_tokens):
            self.work, self.prefills, self.prefills_s = CountedWork(), 0.0, 0.0
            return
        self.work.fade(OVERLAP_KEPT)
        self.work.add(work)
        self.prefills = OVERLAP_KEPT * self.prefills + interval.prefills
        self.prefills_s = OVERLAP_KEPT * self.prefills_s + interval.prefills_s

    def correction(self, cost: StepCost) -> float:
        """Return the measured over the predicted duration of steps; 1 if too little is known.

        Prompts that take several steps carry too little information, since only the last step of each is counted.
        """
        work = self.work
        if work.steps < LEAST_SAMPLE_STEPS or work.prompt_tokens > CHUNK_TOKENS * self.prefills:
            return 1.0
        at_once = work.steps * self.prefills_s / (self.prefills * work.wall_s)
        busy = min((sqrt(1.0 + 4.0 * at_once) - 1.0) / 2.0, 1.0)
        predicted_s = sum(cost.prefill_and_decode_s(work))
        return busy * work.wall_s / predicted_s if predicted_s else 1.0


class PhaseEstimator:
    """An online estimator that learns the cost of an engine's steps and splits its time accordingly."""

    def __init__(self, may_fit: Callable[[bool], bool] = lambda first: True) -> None:
        """Create an estimator. `may_fit` returns whether a fit may run now, given whether it is the engine's first; a
        fit takes some ms.
        """
        self.cost: StepCost | None = None
        self._may_fit = may_fit
        self._variants: Sequence[StepCost] = ()
        self._samples: OrderedDict[tuple[Kind, int, int], array[float]] = OrderedDict()
        """Rows of samples in sequence, by kind of load. As objects they would take three times the memory."""
        self._kind: Kind | None = None
        self._work = CountedWork()
        self._overlap = _Overlap()
        self._owed_s = 0.0
        """The time of steps that were counted in the last interval but did not fit into it."""
        self._began_s: float | None = None
        self._fitted_s = 0.0
        self._fresh = False
        self._new_load = False

    def observe(self, interval: CounterChange) -> PhaseEstimate | None:
        """Learn from an interval and return its shares; None while nothing is known of the engine's steps."""
        if self._began_s is None:
            self._began_s = interval.t_s
        self._collect(interval)
        since_s = interval.t_s - self._fitted_s
        learning = self.cost is None or interval.t_s - self._began_s < LEARNING_S
        soon = learning or self._new_load
        due = self._fresh and since_s >= (FIRST_FITS_EVERY_S if soon else FITS_EVERY_S)
        if due and self._may_fit(self.cost is None):
            kept = np.concatenate([np.frombuffer(rows) for rows in self._samples.values()]).reshape(-1, ROW)
            # A kind of load not seen before may show another form of cost; known kinds only change the constants.
            self.cost = _fit(kept, None if self._new_load else self.cost)
            self._fitted_s, self._fresh, self._new_load = interval.t_s, False, False
        work = interval.work
        if not work.steps and not work.prompt_tokens:
            return PhaseEstimate(0.0, 0.0, 0.0, 0.0)
        return self._estimate(self.cost, interval, LEARNING_MARGIN if learning else LEAST_MARGIN) if self.cost else None

    def _estimate(self, cost: StepCost, interval: CounterChange, least_margin: float) -> PhaseEstimate:
        work = interval.work
        cost, half, *others = self._variants_of(cost)
        parts = [each.prefill_and_decode_s(work) for each in (cost, half)]
        wall_s, mid_s = (prefill_s + decode_s for prefill_s, decode_s in parts)
        if not wall_s:
            return PhaseEstimate(0.0, 0.0, 0.0, 0.0)
        if interval.prefills:
            correction = self._overlap.correction(cost)
            # A step counts where it ends, and may have begun in the previous interval.
            step_s = correction * wall_s / max(work.steps, 1.0)
            wall_s = mid_s = correction * wall_s + self._owed_s
            self._owed_s = min(max(wall_s - work.wall_s, 0.0), 2.0 * step_s)
        else:
            self._owed_s = 0.0
        total_s = work.wall_s if interval.busy_throughout else min(work.wall_s, wall_s)
        busy_s = total_s * mid_s / wall_s
        share = _prefill_share(parts[1])
        low = high = share
        if work.decode_tokens and work.prompt_tokens:  # one phase alone leaves nothing to split
            shares = list(map(_prefill_share, (*parts, *(each.prefill_and_decode_s(work) for each in others))))
            margin = max(least_margin, cost.residual * share)
            low = max(0.0, min(*shares, share - margin))
            high = min(1.0, max(*shares, share + margin))
        return PhaseEstimate(busy_s, busy_s * share, busy_s * low, busy_s * high)

    def _variants_of(self, cost: StepCost) -> Sequence[StepCost]:
        """Return the cost, a variant with half of the additional rate, and others within the error."""
        if not self._variants or self._variants[0] is not cost:
            # Beyond the knee a step may wait for the host, which wall time includes, so half of that time counts.
            half = replace(cost, further_sequence_s=cost.further_sequence_s / 2)
            none = replace(cost, further_sequence_s=0.0)
            self._variants = (cost, half, none, *self._neighbours(half))
        return self._variants

    def _neighbours(self, cost: StepCost) -> tuple[StepCost, StepCost]:
        """Return costs whose prompt tokens are as much cheaper or dearer as the residual allows."""
        off = 1.0 + cost.residual
        return (
            replace(cost, prompt_token_s=cost.prompt_token_s / off),
            replace(cost, prompt_token_s=cost.prompt_token_s * off),
        )

    def _collect(self, interval: CounterChange) -> None:
        work = interval.work
        self._overlap.take(interval)
        kind: Kind | None = None
        if interval.busy_throughout:
            kind = "throughout"
        elif work.steps and work.token_gaps and not work.prompt_tokens:
            kind = "gaps"
        elif interval.lone_prefill_s:
            # A step that ran when the prompt was scheduled had to end first, so that two bases have passed. If only
            # prompts run, the second base represents the host's part of that time, which is otherwise unknown. No
            # prefill step is named, since the host's part must not be taken for a floor.
            steps = 1.0 if interval.from_idle else 2.0
            lone = CountedWork(steps=steps, prompt_tokens=work.prompt_tokens / max(work.prefill_steps, 1.0))
            self._keep("lone", Sample(lone, interval.lone_prefill_s, WEIGHTS["lone"]))
            if interval.from_idle and work.steps > 1:
                # Only the request itself has decoded, after its prompt.
                kind = "gaps"
                work = replace(work, steps=work.steps - 1.0, prompt_tokens=0.0, prefill_steps=0.0)
        if self._kind is not None and kind != self._kind:
            self._flush()
        if kind is None:
            return
        self._kind = kind
        self._work.add(work)
        enough = LEAST_SAMPLE_STEPS if interval.from_idle else SAMPLE_STEPS
        if self._work.wall_s >= SAMPLE_S or self._work.steps >= enough:
            self._flush()

    def _flush(self) -> None:
        kind, work = self._kind, self._work
        self._kind, self._work = None, CountedWork()
        if kind is None or (work.steps < LEAST_SAMPLE_STEPS and work.wall_s < LEAST_SAMPLE_S):
            return
        took_s = work.wall_s
        if kind == "gaps":
            took_s = work.steps * work.token_gaps_s / work.token_gaps
        if took_s > 0:
            self._keep(kind, Sample(work, took_s, WEIGHTS[kind]))

    def _keep(self, kind: Kind, sample: Sample) -> None:
        steps = max(sample.work.steps, 1.0)
        load = (kind, int(log2(1 + sample.work.decoding)), int(log2(1 + sample.work.prompt_tokens / steps)))
        # The most recently seen load comes last, so the one unseen for longest is dropped when there are too many.
        kept = self._samples.pop(load, None)
        self._new_load |= kept is None
        kept = kept if kept is not None else array("d")
        del kept[: max(len(kept) + ROW - SAMPLES_A_LOAD * ROW, 0)]
        kept.extend(sample.row)
        put_newest(self._samples, load, kept, MOST_LOADS)
        self._fresh = True


def _prefill_share(seconds: tuple[float, float]) -> float:
    prefill_s, decode_s = seconds
    return prefill_s / (prefill_s + decode_s) if prefill_s + decode_s else 0.0
