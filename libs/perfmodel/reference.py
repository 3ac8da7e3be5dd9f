"""The usual step-time model of many workers of a kind, which a single slow worker does not change. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.perfmodel.fit import predict
from libs.perfmodel.learner import FittedModel, StepKind, combine
from libs.perfmodel.samples import Rows
from libs.policy.step_time import StepTimeModel

TYPICAL_BATCH: Final = 16
# Work at which decode models are compared, in sequences and in tokens of a sequence.
TYPICAL_CONTEXT: Final = 1_000
# Least duration of any step. Models that predict less are invalid.
LEAST_NS: Final = 1.0


def usual_model(reported: Sequence[FittedModel], chunk_tokens: int) -> StepTimeModel | None:
    """Combine each part from the median worker among those that have run such steps. None without a valid model."""
    if not reported:
        return None

    def middle(kind: StepKind, cost: Callable[[StepTimeModel], float]) -> FittedModel | None:
        ran = sorted((each for each in reported if each.of(kind).steps), key=lambda each: cost(each.model))
        return ran[(len(ran) - 1) // 2] if ran else None

    found = {
        StepKind.PREFILL: middle(StepKind.PREFILL, lambda each: each.chunks_ns(chunk_tokens, chunk_tokens**2)),
        StepKind.DECODE: middle(StepKind.DECODE, _decode_ns),
        StepKind.MIXED: middle(StepKind.MIXED, lambda each: each.interference),
    }
    model = combine(reported[0].model, {kind: each for kind, each in found.items() if each is not None})
    sane = min(model.chunks_ns(1, 1), model.decode_fixed_ns + model.decode_sequence_ns) >= LEAST_NS
    return model if sane else None


def expected_ns(model: StepTimeModel, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [steps] ns: the durations that a model predicts for finished steps. counts: [`StepCounts`, steps]."""
    tokens, prompts, context, batch, kv_tokens, given_squared = counts
    alike = np.maximum(tokens * (2 * context - tokens) / np.maximum(prompts, 1), 0)  # as `StepWork.squared`
    squared = np.where(given_squared > 0, given_squared, alike) * (tokens > 0)
    nothing = np.zeros_like(tokens)
    return predict(model, Rows(tokens, squared, batch, kv_tokens, nothing, nothing))


def _decode_ns(model: StepTimeModel) -> float:
    batch = TYPICAL_BATCH
    return (
        model.reading_ns(batch) + batch * model.decode_sequence_ns + batch * TYPICAL_CONTEXT * model.decode_kv_token_ns
    )
