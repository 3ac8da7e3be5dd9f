"""A step-time model that learns from every step, with the errors of its recent predictions. Pure."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.perfmodel.fit import Rows, StepSamples, fit_steps, predict, remembered_steps
from libs.policy.step_time import StepTimeModel, StepWork

# The number of recent predictions of each kind of step from which errors are computed.
KEPT_ERRORS: Final = 256
# With fewer steps since the last fit, there is no refit.
MIN_NEW_STEPS: Final = 8
# The mean relative change of predictions up to which a model is not published again.
PUBLISHED_CHANGE: Final = 0.02


class StepKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @classmethod
    def of(cls, work: StepWork) -> "StepKind":
        """Return the kind of a step, which must have some work."""
        if not work.decode_sequences:
            return cls.PREFILL
        return cls.MIXED if work.prefill_tokens else cls.DECODE


@dataclass(frozen=True, slots=True)
class KindFit:
    """The accuracy for one kind of step: relative errors of predictions made before the step was measured."""

    steps: int = 0
    """The number of steps seen so far. At 0 the model is a guess for this kind."""
    error_p50: float = 0.0
    error_p90: float = 0.0


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model with the errors of its predictions by kind of step."""

    model: StepTimeModel
    prefill: KindFit = KindFit()
    decode: KindFit = KindFit()
    mixed: KindFit = KindFit()

    def of(self, kind: StepKind) -> KindFit:
        return {StepKind.PREFILL: self.prefill, StepKind.DECODE: self.decode, StepKind.MIXED: self.mixed}[kind]


def combine(base: StepTimeModel, fits: Mapping[StepKind, FittedModel]) -> StepTimeModel:
    """Return `base` with the parts of prefill, decode and interference replaced by those of the fits.

    A kind of step without a fit leaves its part unchanged.
    """
    if StepKind.PREFILL in fits:
        model = fits[StepKind.PREFILL].model
        base = replace(
            base,
            prefill_floor_ns=model.prefill_floor_ns,
            prefill_fixed_ns=model.prefill_fixed_ns,
            prefill_token_ns=model.prefill_token_ns,
            prefill_token_squared_ns=model.prefill_token_squared_ns,
        )
    if StepKind.DECODE in fits:
        model = fits[StepKind.DECODE].model
        base = replace(
            base,
            decode_fixed_ns=model.decode_fixed_ns,
            decode_matrix_ns=model.decode_matrix_ns,
            decode_sequence_ns=model.decode_sequence_ns,
            decode_kv_token_ns=model.decode_kv_token_ns,
        )
        # A fit from before 0.2 has neither batch, and no fit adds one, so `base` keeps its own.
        if model.saturating_sequences:
            base = replace(
                base,
                saturating_sequences=model.saturating_sequences,
                decode_wide_ns=model.decode_wide_ns,
                graph_sequences=model.graph_sequences,
                graph_exit_ns=model.graph_exit_ns,
            )
    if StepKind.MIXED in fits:
        base = replace(base, interference=fits[StepKind.MIXED].model.interference)
    return base


@dataclass(slots=True)
class _Errors:
    steps: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_ERRORS))

    def fit(self) -> KindFit:
        if not self.recent:
            return KindFit()
        p50, p90 = np.quantile(np.array(self.recent), [0.5, 0.9])
        return KindFit(self.steps, float(p50), float(p90))


class StepTimeLearner:
    """A learner that turns measured steps into a model. Without enough steps, the model is the prior."""

    def __init__(self, prior: StepTimeModel, known: Collection[StepKind] = ()) -> None:
        """Create a learner. `known` contains the kinds of steps that the prior has learned on this device.

        For all other kinds the prior is a guess.
        """
        self._prior = prior
        self._remembered = remembered_steps(prior, prefill=StepKind.PREFILL in known, decode=StepKind.DECODE in known)
        self._samples = StepSamples()
        self._errors = {kind: _Errors() for kind in StepKind}
        self._new_steps = 0
        self.model = prior

    def add(self, work: StepWork, duration_ns: int) -> None:
        """Record a finished step, and the error of its prediction."""
        if not self._samples.add(work, duration_ns):
            return
        errors = self._errors[StepKind.of(work)]
        errors.steps += 1
        errors.recent.append(abs(self.model.step_ns(work) / duration_ns - 1))
        self._new_steps += 1

    def refit(self) -> bool:
        """Refit if there are enough new steps. Return whether the model changed enough to publish it."""
        rows = self.news()
        return rows is not None and self.take(self.fit(rows), rows)

    def news(self) -> Rows | None:
        """Return the steps to fit; None if too few of them are new."""
        if self._new_steps < MIN_NEW_STEPS:
            return None
        self._new_steps = 0
        return self._samples.rows()

    def fit(self, rows: Rows) -> StepTimeModel:
        """Return the model of these steps. This is slow and changes no state, so that any thread may call it."""
        return fit_steps(self._prior, rows, self._remembered)

    def take(self, model: StepTimeModel, rows: Rows) -> bool:
        """Use a model for predictions from now on. Return whether it differs enough to be published."""
        before, self.model = self.model, model
        old, new = predict(before, rows), predict(model, rows)
        return bool(np.mean(np.abs(new - old) / np.maximum(old, 1.0)) > PUBLISHED_CHANGE)

    def fitted(self) -> FittedModel:
        fits: Sequence[KindFit] = [self._errors[kind].fit() for kind in StepKind]
        return FittedModel(self.model, *fits)


TYPICAL_BATCH: Final = 16
# The work at which decode models are compared, in sequences and in tokens of each sequence.
TYPICAL_CONTEXT: Final = 1_000
# The minimum duration of any step. A model that predicts less is invalid.
LEAST_NS: Final = 1.0


# The number of steps beyond which a worker's weight does not grow, so that one busy slow worker does not become the
# median.
ENOUGH_STEPS: Final = 64


def usual_model(reported: Sequence[FittedModel], chunk_tokens: int) -> StepTimeModel | None:
    """Return a model whose parts each come from the median worker, weighted by its steps of that kind.

    Return None if the result is invalid or no worker has reported.
    """
    if not reported:
        return None

    def middle(kind: StepKind, cost: Callable[[StepTimeModel], float]) -> FittedModel | None:
        ran = sorted((each for each in reported if each.of(kind).steps), key=lambda each: cost(each.model))
        weights = list(accumulate(min(each.of(kind).steps, ENOUGH_STEPS) for each in ran))
        return ran[bisect_left(weights, weights[-1] / 2)] if ran else None

    found = {
        StepKind.PREFILL: middle(StepKind.PREFILL, lambda each: each.chunks_ns(chunk_tokens, chunk_tokens**2)),
        StepKind.DECODE: middle(StepKind.DECODE, _decode_ns),
        StepKind.MIXED: middle(StepKind.MIXED, lambda each: each.interference),
    }
    model = combine(reported[0].model, {kind: each for kind, each in found.items() if each is not None})
    sane = min(model.chunks_ns(1, 1), model.decode_fixed_ns + model.decode_sequence_ns) >= LEAST_NS
    return model if sane else None


def expected_ns(model: StepTimeModel, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [steps] ns: the durations that a model predicts for finished steps. `counts` is [`StepCounts`, steps]."""
    tokens, prompts, context, batch, kv_tokens, given_squared = counts
    alike = np.maximum(tokens * (2 * context - tokens) / np.maximum(prompts, 1), 0)  # as in `StepWork.squared`
    squared = np.where(given_squared > 0, given_squared, alike) * (tokens > 0)
    nothing = np.zeros_like(tokens)
    return predict(model, Rows(tokens, squared, batch, kv_tokens, nothing, nothing))


def _decode_ns(model: StepTimeModel) -> float:
    batch = TYPICAL_BATCH
    return model.reading_ns(batch) + model.sequences_ns(batch) + batch * TYPICAL_CONTEXT * model.decode_kv_token_ns
