"""A step-time model that learns from every step, with the errors of its recent predictions. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import numpy as np

from libs.perfmodel.fit import fit_steps, predict
from libs.perfmodel.samples import Rows, StepSamples
from libs.policy.step_time import StepTimeModel, StepWork

KEPT_ERRORS: Final = 256
"""Recent predictions of each kind of step that the published errors come from."""
MIN_NEW_STEPS: Final = 8
"""Fewer since the last fit, and there is nothing to fit anew."""
PUBLISHED_CHANGE: Final = 0.02
"""A model whose predictions differ by less on average (relative) is not published again."""


class StepKind(Enum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @classmethod
    def of(cls, work: StepWork) -> "StepKind":
        """The kind of a step that does something."""
        if not work.decode_sequences:
            return cls.PREFILL
        return cls.MIXED if work.prefill_tokens else cls.DECODE


@dataclass(frozen=True, slots=True)
class KindFit:
    """How well steps of one kind were predicted: relative errors of predictions made before the step was known."""

    steps: int = 0
    """Seen so far; 0: the model is a guess there."""
    error_p50: float = 0.0
    error_p90: float = 0.0


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model with what is known of its errors."""

    model: StepTimeModel
    prefill: KindFit = KindFit()
    decode: KindFit = KindFit()
    mixed: KindFit = KindFit()

    def of(self, kind: StepKind) -> KindFit:
        """What is learned of one kind of step."""
        return {StepKind.PREFILL: self.prefill, StepKind.DECODE: self.decode, StepKind.MIXED: self.mixed}[kind]


def combine(base: StepTimeModel, fits: Mapping[StepKind, FittedModel]) -> StepTimeModel:
    """`base` with prefill, decode and interference each from the fit for that kind of step, where there is one."""
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
    """Steps go in, a model comes out; until it has enough of them that is the prior."""

    def __init__(self, prior: StepTimeModel) -> None:
        self._prior = prior
        self._samples = StepSamples()
        self._errors = {kind: _Errors() for kind in StepKind}
        self._new_steps = 0
        self.model = prior

    def add(self, work: StepWork, duration_ns: int) -> None:
        """Take a finished step in."""
        if not self._samples.add(work, duration_ns):
            return
        errors = self._errors[StepKind.of(work)]
        errors.steps += 1
        errors.recent.append(abs(self.model.step_ns(work) / duration_ns - 1))
        self._new_steps += 1

    def refit(self) -> bool:
        """Fit anew where there is something new; whether those who use the model should hear of it."""
        rows = self.news()
        return rows is not None and self.take(self.fit(rows), rows)

    def news(self) -> Rows | None:
        """What to fit anew; None where there is too little new in it."""
        if self._new_steps < MIN_NEW_STEPS:
            return None
        self._new_steps = 0
        return self._samples.rows()

    def fit(self, rows: Rows) -> StepTimeModel:
        """The model of these steps. It takes long, and changes nothing: any thread may ask for it."""
        return fit_steps(self._prior, rows)

    def take(self, model: StepTimeModel, rows: Rows) -> bool:
        """Predict by a model from now on; whether those who use it should hear of it."""
        before, self.model = self.model, model
        old, new = predict(before, rows), predict(model, rows)
        return bool(np.mean(np.abs(new - old) / np.maximum(old, 1.0)) > PUBLISHED_CHANGE)

    def fitted(self) -> FittedModel:
        """The model now, with the errors of its recent predictions."""
        fits: Sequence[KindFit] = [self._errors[kind].fit() for kind in StepKind]
        return FittedModel(self.model, *fits)
