"""Busy and prefill shares of one engine, from intervals between readings of its counters."""

from collections import deque
from dataclasses import dataclass, replace
from math import log2
from typing import Final, Literal

from libs.policy.observe.intervals import Interval, Work
from libs.policy.observe.step_cost import Sample, StepCost, fit_step_cost

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
FIRST_FITS_EVERY_S: Final = 2.0
FITS_EVERY_S: Final = 10.0
LEARNING_S: Final = 60.0
"""The time after the first reading in which constants are fitted more often."""
# The split of a mixed step is a convention, so the interval of prefill's share has at least this half width.
LEAST_MARGIN: Final = 0.04
LEARNING_MARGIN: Final = 0.08
"""The least half width during the first minute."""


@dataclass(frozen=True, slots=True)
class PhaseEstimate:
    """Estimated busy and prefill times of one interval, with bounds on prefill."""

    busy_s: float
    prefill_s: float
    prefill_low_s: float
    prefill_high_s: float


class PhaseEstimator:
    """An online estimator that learns the cost of an engine's steps and splits its time by it."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None
        self._samples: dict[tuple[Kind, int, int], deque[Sample]] = {}
        self._kind: Kind | None = None
        self._work = Work()
        self._began_s: float | None = None
        self._fitted_s = 0.0
        self._fresh = False
        self._new_load = False

    def observe(self, interval: Interval) -> PhaseEstimate | None:
        """Learn from an interval and return its shares; None while nothing is known of the engine's steps."""
        if self._began_s is None:
            self._began_s = interval.t_s
        self._collect(interval)
        since_s = interval.t_s - self._fitted_s
        learning = self.cost is None or interval.t_s - self._began_s < LEARNING_S
        if self._fresh and since_s >= (FIRST_FITS_EVERY_S if learning else FITS_EVERY_S):
            kept = [sample for samples in self._samples.values() for sample in samples]
            # A kind of load not seen before may show another form of cost; known kinds move the constants alone.
            self.cost = fit_step_cost(kept, None if self._new_load else self.cost)
            self._fitted_s, self._fresh, self._new_load = interval.t_s, False, False
        work = interval.work
        if not work.steps and not work.prompt_tokens:
            return PhaseEstimate(0.0, 0.0, 0.0, 0.0)
        return self._estimate(self.cost, interval, LEARNING_MARGIN if learning else LEAST_MARGIN) if self.cost else None

    def _estimate(self, cost: StepCost, interval: Interval, least_margin: float) -> PhaseEstimate:
        work = interval.work
        # Beyond the knee a step may wait for the host, which wall time includes, so half of that time is taken.
        half = replace(cost, further_sequence_s=cost.further_sequence_s / 2)
        none = replace(cost, further_sequence_s=0.0)
        wall_s, mid_s = (sum(each.prefill_and_decode_s(work)) for each in (cost, half))
        if not wall_s:
            return PhaseEstimate(0.0, 0.0, 0.0, 0.0)
        total_s = work.wall_s if interval.busy_throughout else min(work.wall_s, wall_s)
        busy_s = total_s * mid_s / wall_s
        shares = [_prefill_share(each, work) for each in (cost, half, none, *self._neighbours(half))]
        share = shares[1]
        margin = max(least_margin, cost.residual * share)
        low = max(0.0, min(*shares, share - margin))
        high = min(1.0, max(*shares, share + margin))
        if work.decode_tokens == 0 or work.prompt_tokens == 0:
            low = high = share  # one phase alone: nothing to split
        return PhaseEstimate(busy_s, busy_s * share, busy_s * low, busy_s * high)

    def _neighbours(self, cost: StepCost) -> tuple[StepCost, StepCost]:
        """Return costs whose prompt tokens are as much cheaper and dearer as the residual allows."""
        off = 1.0 + cost.residual
        return (
            replace(cost, prompt_token_s=cost.prompt_token_s / off),
            replace(cost, prompt_token_s=cost.prompt_token_s * off),
        )

    def _collect(self, interval: Interval) -> None:
        work = interval.work
        kind: Kind | None = None
        if interval.busy_throughout:
            kind = "throughout"
        elif work.steps and work.token_gaps and not work.prompt_tokens:
            kind = "gaps"
        elif interval.lone_prefill_s:
            # The step that ran when the prompt was scheduled had to end first, so that two bases have passed. No
            # prefill step is named, since the host's part in that time must not pass for a floor.
            lone = Work(steps=2.0, prompt_tokens=work.prompt_tokens)
            self._keep("lone", Sample(lone, interval.lone_prefill_s, WEIGHTS["lone"]))
        if self._kind is not None and kind != self._kind:
            self._flush()
        if kind is None:
            return
        self._kind = kind
        self._work.add(work)
        if self._work.wall_s >= SAMPLE_S or self._work.steps >= SAMPLE_STEPS:
            self._flush()

    def _flush(self) -> None:
        kind, work = self._kind, self._work
        self._kind, self._work = None, Work()
        if kind is None or (work.steps < LEAST_SAMPLE_STEPS and work.wall_s < LEAST_SAMPLE_S):
            return
        if kind == "throughout":
            self._keep(kind, Sample(work, work.wall_s, WEIGHTS[kind]))
        else:
            took_s = work.steps * work.token_gaps_s / work.token_gaps
            if took_s > 0:
                self._keep(kind, Sample(work, took_s, WEIGHTS[kind]))

    def _keep(self, kind: Kind, sample: Sample) -> None:
        steps = max(sample.work.steps, 1.0)
        load = (kind, int(log2(1 + sample.work.decoding)), int(log2(1 + sample.work.prompt_tokens / steps)))
        # The load seen last goes last, so the one unseen for longest is dropped when there are too many.
        kept = self._samples.pop(load, None)
        self._new_load |= kept is None
        kept = kept or deque(maxlen=SAMPLES_A_LOAD)
        kept.append(sample)
        self._samples[load] = kept
        if len(self._samples) > MOST_LOADS:
            del self._samples[next(iter(self._samples))]
        self._fresh = True


def _prefill_share(cost: StepCost, work: Work) -> float:
    prefill_s, decode_s = cost.prefill_and_decode_s(work)
    return prefill_s / (prefill_s + decode_s) if prefill_s + decode_s else 0.0
