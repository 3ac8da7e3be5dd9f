"""A worker's prefill chunk and decode batch as messages for administrators. Pure."""

from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.learner import FittedModel
from libs.perfmodel.wire import point_message
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import largest_batch
from libs.policy.worker.saturation import TRIAL_PROMPT_TOKENS, PrefillCurve, ttft_under_load_ns

# Context of each sequence in the decode batch that is shown beside a curve.
DECODE_CONTEXT_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Tuned:
    """The chosen chunk size and its alternatives."""

    chunk_tokens: int
    before_tokens: int
    """The chunk size that was in effect before."""
    default_tokens: int
    """The engine's chunk size without a measurement."""
    model: StepTimeModel
    """The model that predicts prompts; fitted to the curve if there is one."""
    curve: PrefillCurve | None

    @property
    def truncated(self) -> bool:
        """Whether the curve ends before its plateau."""
        return self.curve is not None and not self.curve.saturation.is_whole


def tuned_message(tuned: Tuned, tpot_target_us: int, max_sequences: int) -> pb.TunePrefillResponse:
    """Return the chunk sizes with the curve, if known, and the largest decode batch within a target."""
    sizes = (tuned.chunk_tokens, tuned.before_tokens, tuned.default_tokens)
    prompt, before, default = (round(ttft_under_load_ns(tuned.model, TRIAL_PROMPT_TOKENS, tokens)) for tokens in sizes)
    answer = pb.TunePrefillResponse(
        chunk_tokens=tuned.chunk_tokens,
        chunk_tokens_before=tuned.before_tokens,
        chunk_tokens_default=tuned.default_tokens,
        prompt_ns=prompt,
        prompt_ns_before=before,
        prompt_ns_default=default,
        decode_batch=largest_batch(tuned.model, tpot_target_us * 1000, DECODE_CONTEXT_TOKENS, max_sequences),
    )
    if tuned.curve is not None:
        answer.plateau_tokens_per_s = tuned.curve.saturation.plateau_tokens_per_s
        answer.curve.extend(map(point_message, tuned.curve.saturation.curve))
        answer.measured_unix_ns = tuned.curve.unix_ns
        answer.truncated = tuned.truncated
    return answer


def decode_message(fitted: FittedModel, request: pb.TuneDecodeRequest, max_sequences: int) -> pb.TuneDecodeResponse:
    """Return the largest decode batch within a target by learned step times, and how far these can be trusted."""
    context_tokens = request.context_tokens or DECODE_CONTEXT_TOKENS
    batch = largest_batch(fitted.model, request.tpot_target_us * 1000, context_tokens, max_sequences)

    def step_ns(sequences: int) -> int:
        work = StepWork(decode_sequences=sequences, decode_kv_tokens=sequences * context_tokens)
        return round(fitted.model.decode_ns(work))

    return pb.TuneDecodeResponse(
        batch=batch,
        step_ns=step_ns(max(batch, 1)),
        next_step_ns=step_ns(batch + 1),
        max_sequences=max_sequences,
        steps=fitted.decode.steps,
        error_p50=fitted.decode.error_p50,
    )
