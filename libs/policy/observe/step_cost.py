"""The cost of an engine's steps, learned from wall time in which it computed throughout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.observe.intervals import Work

Array = NDArray[np.float64]

# Beyond this many decoding sequences a further one may cost more, as other limits bind.
KNEE_SEQUENCES: Final = 64.0
# The least step times with a prompt to try. Without CUDA graphs, launching kernels takes longer than running them.
FLOORS_S: Final = (0.0, *(float(each) for each in np.geomspace(0.005, 0.08, 13)))
RIDES: Final = (0.0, 0.5, 1.0)
"""The parts of a step's base to try that a prompt saves by riding in a step that decodes anyway."""
# Computing this many prompt tokens takes as long as reading the weights once (150 to 400 on current accelerators).
RIDGE_TOKENS: Final = 250.0
# This many decoding sequences double the time of a step on current accelerators.
DOUBLING_SEQUENCES: Final = 128.0
# Beside a sample's 1, this weight decides only what samples of a single kind of load leave open.
PRIOR_WEIGHT: Final = 0.02
ROUNDS: Final = 6
LEAST_RESIDUAL: Final = 0.02
"""The relative residual below which rows have equal weight."""
WORST_RESIDUAL: Final = 0.3
# A more complicated form must lower the residual below this share of the best so far.
BETTER: Final = 0.99


@dataclass(frozen=True, slots=True)
class Sample:
    """An amount of work and the time that it took."""

    work: Work
    took_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step in seconds: base + prompt tokens + decoding sequences, with a further rate beyond the knee."""

    base_s: float
    prompt_token_s: float
    sequence_s: float
    further_sequence_s: float
    floor_s: float
    """The least time of a step with a prompt."""
    ride: float
    residual: float
    """Mean relative error over the fitted samples, 0 to 1."""

    def decode_s(self, decoding: float) -> float:
        """Return the time of a step in which this many sequences decode and nothing else happens."""
        return self.base_s + self.sequence_s * decoding + self.further_sequence_s * max(0.0, decoding - KNEE_SEQUENCES)

    def prefill_s(self, chunk_tokens: float) -> float:
        """Return the time of a step of prompt tokens alone, without the floor."""
        return self.base_s + self.prompt_token_s * chunk_tokens

    def mixed_s(self, chunk_tokens: float, decoding: float) -> float:
        """Return the time of a step with both phases, at least the floor."""
        together = self.decode_s(decoding) + self.prompt_token_s * chunk_tokens
        return max(self.floor_s, together - self.ride * self.base_s * min(1.0, decoding))

    def prefill_share(self, chunk_tokens: float, decoding: float) -> float:
        """Return prefill's share of a mixed step, in proportion to the times of both phases alone."""
        prefill_s = self.prefill_s(chunk_tokens)
        mixed = min(1.0, decoding)  # below one sequence a step, some steps have prompts alone
        whole_s = prefill_s + self.decode_s(decoding)
        return 1.0 - mixed + mixed * prefill_s / whole_s if whole_s else 1.0

    def prefill_and_decode_s(self, work: Work) -> tuple[float, float]:
        """Return the seconds that the work took in each phase."""
        steps = max(work.steps, 1.0) if work.steps or work.prompt_tokens else 0.0
        prefill_steps = min(work.prefill_steps, steps)
        if not steps:
            return 0.0, 0.0
        decoding, chunk_tokens = work.decode_tokens / steps, work.chunk_tokens
        mixed_s = prefill_steps * self.mixed_s(chunk_tokens, decoding) if prefill_steps else 0.0
        prefill_s = mixed_s * self.prefill_share(chunk_tokens, decoding)
        return prefill_s, mixed_s - prefill_s + (steps - prefill_steps) * self.decode_s(decoding)


def _columns(steps: Array, prompt_tokens: Array, decode_tokens: Array) -> Array:
    """Return the factors of the coefficients, shape (rows, 4)."""
    decoding = decode_tokens / np.maximum(steps, 1e-9)
    further = decode_tokens * np.maximum(0.0, 1.0 - KNEE_SEQUENCES / np.maximum(decoding, 1e-9))
    return np.stack([steps, prompt_tokens, decode_tokens, further], axis=1)


def _prior(step_s: float) -> Array:
    """Return the prior's term of the normal equations, shape (4, 4), for steps of about this length."""
    ridge = np.array([-1.0, RIDGE_TOKENS, 0.0, 0.0])
    doubling = np.array([-1.0, 0.0, DOUBLING_SEQUENCES, 0.0])
    prior: Array = PRIOR_WEIGHT / step_s**2 * (np.outer(ridge, ridge) + np.outer(doubling, doubling))
    return prior


def _non_negative(rows: Array, took: Array, weights: Array, prior: Array) -> Array:
    """Solve least squares with non-negative coefficients, dropping the most negative one in turn."""
    weighted = rows * weights[:, None]
    gram, moments = weighted.T @ rows + prior, weighted.T @ took
    left = list(range(rows.shape[1]))
    found = np.zeros(rows.shape[1])
    while left:
        part = gram[np.ix_(left, left)]
        # A ridge far below any real coefficient: rows of one kind leave a coefficient free.
        solved = np.linalg.solve(part + np.eye(len(left)) * max(1e-10 * float(part.trace()), 1e-300), moments[left])
        if (solved >= 0).all():
            found[left] = solved
            return found
        left.pop(int(solved.argmin()))
    return found


class _Rows:
    """Samples as arrays, with the means of their steps."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        works = [sample.work for sample in samples]
        steps = np.array([work.steps for work in works])
        prompt_tokens = np.array([work.prompt_tokens for work in works])
        decode_tokens = np.array([work.decode_tokens for work in works])
        self.took = np.array([sample.took_s for sample in samples])
        self.trust = np.array([sample.weight for sample in samples])
        self.prefill_steps = np.array([work.prefill_steps for work in works])
        self.rows = _columns(steps, prompt_tokens, decode_tokens)
        self.prior = _prior(float((self.took / np.maximum(steps, 1.0)).min()))
        ones = np.ones(len(works))
        self.decoding = np.minimum(1.0, np.array([work.decoding for work in works]))
        chunks = np.array([work.chunk_tokens for work in works])
        self.mean_step = _columns(ones, chunks, np.array([work.decoding for work in works]))

    def fit(self, floor_s: float, ride: float, start: Array) -> tuple[float, Array]:
        """Return (mean relative error, coefficients) under a floor and a ride, robust against outliers."""
        weights = self.trust / np.maximum(self.took, 0.02) ** 2
        found = start
        for _ in range(ROUNDS):
            extra = self._extra(found, floor_s, ride)
            off = np.abs(self.took - extra - self.rows @ found) / self.took
            robust = weights / np.maximum(off, LEAST_RESIDUAL)
            # Half a step: what the floor adds depends on the coefficients that it is added to.
            found = 0.5 * (found + _non_negative(self.rows, np.maximum(self.took - extra, 0.0), robust, self.prior))
        off = np.abs(self.took - self._extra(found, floor_s, ride) - self.rows @ found) / self.took
        return float(np.average(np.minimum(off, WORST_RESIDUAL), weights=self.trust)), found

    def start(self) -> Array:
        return _non_negative(self.rows, self.took, self.trust / np.maximum(self.took, 0.02) ** 2, self.prior)

    def _extra(self, found: Array, floor_s: float, ride: float) -> Array:
        """Return how much the floor adds to, and the ride takes from, each row's sum of coefficients."""
        saved = ride * found[0] * self.decoding
        extra: Array = self.prefill_steps * np.maximum(floor_s - self.mean_step @ found, -saved)
        return extra


def _near(values: Sequence[float], value: float) -> Sequence[float]:
    at = min(range(len(values)), key=lambda each: abs(values[each] - value))
    return values[max(0, at - 1) : at + 2]


def fit_step_cost(samples: Sequence[Sample], before: StepCost | None = None) -> StepCost | None:
    """Return the cost that explains the samples best; None without any.

    With a cost found `before`, only forms next to its floor and ride are tried, which is a tenth of the work.
    """
    if not samples:
        return None
    rows = _Rows(samples)
    start = rows.start()
    best: tuple[float, Array, float, float] | None = None
    for ride in RIDES if before is None else _near(RIDES, before.ride):
        for floor_s in FLOORS_S if before is None else _near(FLOORS_S, before.floor_s):
            residual, found = rows.fit(floor_s, ride, start)
            if best is None or residual < BETTER * best[0]:
                best = residual, found, floor_s, ride
    assert best is not None
    residual, found, floor_s, ride = best
    base_s, prompt_token_s, sequence_s, further_s = (float(each) for each in found)
    return StepCost(base_s, prompt_token_s, sequence_s, further_s, floor_s, ride, residual)
