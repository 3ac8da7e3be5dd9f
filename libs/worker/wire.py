"""The conversion between the engine port's types and protobuf. Pure."""

import math

import numpy as np
from numpy.typing import NDArray

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import ImageSpan
from libs.contracts.packing import pack_f32, pack_u32, unpack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EnginePhase, EngineRequest, Pooling, PromptImage, SamplingParams
from libs.engine.reports import EngineLoad, FinishReason, Logprob, SequenceOutput
from libs.perfmodel.wire import compute_message

# A sequence id has the gateway's number in its low bits and the id of the gateway's link above them.
SEQUENCE_BITS = 32
_PHASES = {pb.PHASE_PREFILL: EnginePhase.PREFILL, pb.PHASE_DECODE: EnginePhase.DECODE, pb.PHASE_BOTH: EnginePhase.BOTH}
_POOLINGS = {
    pb.POOLING_UNSPECIFIED: None,
    pb.POOLING_LAST: Pooling.LAST,
    pb.POOLING_MEAN: Pooling.MEAN,
    pb.POOLING_CLS: Pooling.CLS,
    pb.POOLING_SCORE: Pooling.SCORE,
}
_FIRST_TOKEN = {"prefill": common.FIRST_TOKEN_FROM_PREFILL, "decode": common.FIRST_TOKEN_FROM_DECODE}
_FINISHED = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}
_FAILED = {FinishReason.KV_LOST: pb.FAILURE_CODE_KV_LOST, FinishReason.FAILED: pb.FAILURE_CODE_ENGINE}


def capabilities_message(capabilities: Capabilities) -> common.Capabilities:
    return common.Capabilities(
        block_size_tokens=capabilities.block_size_tokens,
        kv_blocks=capabilities.kv_blocks,
        kv_block_bytes=capabilities.kv_block_bytes,
        max_context_tokens=capabilities.max_context_tokens,
        max_sequences=capabilities.max_sequences,
        moves_running_kv=capabilities.hands_over_running_kv,
        streams_kv=capabilities.streams_kv,
        named_kv=capabilities.named_kv,
        kv_once=capabilities.kv_once,
        first_token=_FIRST_TOKEN[capabilities.first_token_from],
        kv_layout=capabilities.kv_layout,
        chunk_tokens=capabilities.chunk_tokens,
        images=capabilities.images,
        compute=compute_message(capabilities.compute) if capabilities.compute else None,
    )


def load_message(load: EngineLoad) -> common.Load:
    return common.Load(
        running=load.running,
        waiting=load.waiting,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        awaiting_kv=load.awaiting_kv,
        free_kv_blocks=load.free_kv_blocks,
        preemptions=load.preemptions,
        recomputed_tokens=load.recomputed_tokens,
        pool_faults=load.pool_faults,
        waiting_prefill_squares=load.waiting_prefill_squares,
        awaiting_ready_kv=load.awaiting_ready_kv,
        ready_kv_since_unix_ns=load.ready_kv_since_unix_ns,
        images_used=load.images_used,
        images_encoded=load.images_encoded,
        image_cache_bytes=load.image_cache_bytes,
        image_encode_ns=load.image_encode_ns,
        waiting_encode_ns=load.waiting_encode_ns,
    )


def kv_source(handle: KvHandle) -> pb.KvSource:
    return pb.KvSource(
        worker_id=handle.worker_id,
        incarnation=handle.incarnation,
        address=handle.address,
        handle=handle.opaque,
        tokens=handle.tokens,
        blocks=handle.blocks,
        kv_layout=handle.kv_layout,
        streamed=handle.streamed,
        named=handle.named,
    )


def kv_handle(source: pb.KvSource) -> KvHandle:
    return KvHandle(
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        address=source.address,
        opaque=source.handle,
        tokens=source.tokens,
        blocks=source.blocks,
        kv_layout=source.kv_layout,
        streamed=source.streamed or source.named,
        named=source.named,
    )


def sequence_id_of(link_id: int, sequence: int) -> int:
    """Return a worker-wide id for a gateway's sequence number, unique while the sequence is on the gateway's link."""
    return link_id << SEQUENCE_BITS | sequence


def sequence_of(sequence_id: int) -> int:
    """Return the number that the gateway gave a sequence."""
    return sequence_id & (1 << SEQUENCE_BITS) - 1


def engine_request(submit: pb.Submit, sequence_id: int, chain_root: bytes) -> EngineRequest:
    """Return the engine's request for `submit`, whose phase is known. Raise InvalidRequest with the reason."""
    phase = _PHASES[submit.phase]
    token_ids = _token_ids(submit.token_ids)
    generated = len(token_ids) - submit.prompt_tokens
    if submit.prompt_tokens < 1 or generated < 0:
        raise InvalidRequest(f"prompt_tokens is {submit.prompt_tokens} of {len(token_ids)} tokens")
    if submit.max_output_tokens <= generated:
        raise InvalidRequest(f"max_output_tokens is {submit.max_output_tokens}, and {generated} are there already")
    if phase is EnginePhase.DECODE and not (submit.HasField("kv") and submit.kv.address and submit.kv.handle):
        raise InvalidRequest("phase decode needs kv with an address and a handle")
    if submit.pooling not in _POOLINGS:
        raise InvalidRequest(f"pooling is {submit.pooling}, which this release does not know")
    pooling = _POOLINGS[submit.pooling]
    computes_all = submit.sampling.prompt_logprobs or pooling not in (None, Pooling.LAST)
    return EngineRequest(
        sequence_id=sequence_id,
        request_id=submit.request_id,
        phase=phase,
        token_ids=token_ids,
        prompt_tokens=submit.prompt_tokens,
        max_output_tokens=submit.max_output_tokens,
        sampling=_sampling(submit.sampling),
        # A cached prefix is not computed, so it is neither scored nor part of a mean. Encoders cache no prefix.
        chain_root=b"" if computes_all else chain_root,
        kv=kv_handle(submit.kv) if phase is EnginePhase.DECODE else None,
        kv_name=submit.kv_name if phase is EnginePhase.PREFILL else b"",
        tpot_target_ns=submit.context.tpot_target_us * 1000,
        first_token_due_ns=submit.context.ttft_deadline_unix_ns,
        adapter=submit.adapter,
        adapter_source=submit.adapter_source,
        yields=submit.context.service_class == BATCH_CLASS,
        pooling=pooling,
        second_from=submit.second_from,
        images=tuple(PromptImage(ImageSpan(each.first, each.tokens, each.digest), each.data) for each in submit.images),
        kind=f"{submit.context.tenant}/{submit.context.service_class}",
    )


def sequence_event(output: SequenceOutput) -> pb.SequenceEvent | None:
    """Return the event of an output for its gateway; None if the output has only tokens."""
    sequence, finish = sequence_of(output.sequence_id), output.finish
    if output.streamed_handle is not None:
        return pb.SequenceEvent(sequence=sequence, kv_opened=pb.KvOpened(kv=kv_source(output.streamed_handle)))
    if finish is None:
        return pb.SequenceEvent(sequence=sequence, kv_pulling=pb.KvPulling()) if output.pulling else None
    if finish in _FAILED:
        return pb.SequenceEvent(sequence=sequence, failed=pb.Failed(code=_FAILED[finish], detail=output.detail))
    if finish is FinishReason.HANDED_OVER:
        handed_over = pb.Moved(
            kv=kv_source(output.handle) if output.handle else None,
            cached_tokens=output.cached_tokens,
            computed_prompt_tokens=output.computed_prompt_tokens,
        )
        return pb.SequenceEvent(sequence=sequence, moved=handed_over)
    if finish is FinishReason.PREFILLED:
        prefilled = pb.Prefilled(
            kv=kv_source(output.handle) if output.handle else None,
            cached_tokens=output.cached_tokens,
            computed_tokens=output.computed_prompt_tokens,
        )
        return pb.SequenceEvent(sequence=sequence, prefilled=prefilled)
    return pb.SequenceEvent(
        sequence=sequence,
        finished=pb.Finished(
            reason=_FINISHED[finish],
            cached_tokens=output.cached_tokens,
            computed_prompt_tokens=output.computed_prompt_tokens,
            kv_bytes_received=output.kv_bytes_received,
            pooled=output.pooled,
        ),
    )


def numbers(packed: bytes, field: str) -> list[int]:
    """Unpack a frame's integers. Raise InvalidRequest that names the field if they are malformed."""
    try:
        return unpack_u32(packed)
    except ValueError:
        raise InvalidRequest(f"{field} is not a whole number of uint32") from None


def logprobs_message(index: int, logprob: Logprob) -> pb.TokenLogprobs:
    """Return the logprobs of the frame's token at `index`."""
    message = pb.TokenLogprobs(
        index=index,
        logprob=logprob.logprob,
        top_ids=pack_u32([token_id for token_id, _ in logprob.top]),
        top_logprobs=pack_f32(value for _, value in logprob.top),
    )
    if logprob.prompt:
        message.prompt = pack_f32(each.logprob for each in logprob.prompt)
        message.prompt_top_ids = pack_u32([token_id for each in logprob.prompt for token_id, _ in each.top])
        message.prompt_top = pack_f32(value for each in logprob.prompt for _, value in each.top)
    return message


def _token_ids(packed: bytes) -> NDArray[np.int32]:
    if len(packed) % 4:
        raise InvalidRequest(f"token_ids is {len(packed)} bytes, not a whole number of uint32")
    if max(packed[3::4], default=0) >= 0x80:
        raise InvalidRequest("token_ids holds a value of 2**31 or more")
    return np.frombuffer(packed, dtype="<i4")


def _sampling(sampling: pb.Sampling) -> SamplingParams:
    # proto3 cannot distinguish 0 from absent. Where 0 has no meaning of its own, it disables the parameter.
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        guide=sampling.guide,
        min_tokens=sampling.min_tokens,
        prompt_logprobs=sampling.prompt_logprobs,
        prompt_top_logprobs=sampling.prompt_top_logprobs,
    )
    penalties = (params.presence_penalty, params.frequency_penalty, *params.logit_bias.values())
    fits = (
        0 <= params.temperature < math.inf
        and 0 < params.top_p <= 1
        and 0 <= params.min_p <= 1
        and 0 < params.repetition_penalty < math.inf
        and all(map(math.isfinite, penalties))
    )
    if not fits:
        raise InvalidRequest("sampling has a value out of range")
    return params
