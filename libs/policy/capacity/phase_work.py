"""The GPU time that demand needs: seconds of prefill and decode work, by the step-time model."""

from dataclasses import dataclass
from math import inf

from libs.policy.speed import Speed
from libs.policy.step_time import MATRIX_ROWS
from libs.policy.worker.pace import IN_HAND, largest_batch


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker with the figures that planning needs."""

    speed: Speed
    gpus: int
    max_sequences: int
    kv_tokens: int
    """KV room in tokens; 0 if unknown."""


def prefill_seconds(kind: WorkerKind, prompt_tokens: float, cached_share: float = 0.0) -> float:
    """Return the seconds that one worker takes for a prompt without its cached tokens.

    Steps count as being as full as prompts make them.
    """
    tokens = prompt_tokens * (1 - cached_share)
    squares = prompt_tokens**2 - (prompt_tokens * cached_share) ** 2
    model, chunk = kind.speed.step_time, kind.speed.chunk_tokens
    if tokens <= 0:
        return 0.0
    # Prompts share steps, so the fixed part is divided by tokens.
    fixed_ns = model.prefill_fixed_ns * tokens / chunk
    floor_ns = model.prefill_floor_ns * tokens / chunk
    return max(fixed_ns + model.prefill_token_ns * tokens + model.prefill_token_squared_ns * squares, floor_ns) / 1e9


def decode_seconds(kind: WorkerKind, prompt_tokens: float, output_tokens: float, tpot_s: float) -> float:
    """Return the seconds that one worker takes for an answer in the largest batch that keeps TPOT and fits its KV.

    The result is inf if not even one sequence keeps TPOT.
    """
    model = kind.speed.step_time
    context = max(prompt_tokens + output_tokens / 2, 1.0)
    batch = largest_batch(model, tpot_s * 1e9 * (1 - IN_HAND), round(context), kind.max_sequences)
    if kind.kv_tokens:
        batch = min(batch, int(kind.kv_tokens / (prompt_tokens + output_tokens + 1)))
    if batch < 1:
        return inf
    each_ns = model.reading_ns(max(batch, MATRIX_ROWS)) / batch + model.decode_sequence_ns
    return output_tokens * (each_ns + model.decode_kv_token_ns * context) / 1e9
