"""Tests of submits that request a vector, and of the vectors' way back."""

from dataclasses import replace

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import ApiFinishReason
from libs.dispatch.ports import SequenceFinished, read_update
from libs.engine.port import Capabilities, EnginePhase, Pooling
from libs.engine.reports import FinishReason, SequenceOutput
from libs.engine.sequence import Sequence, check_request
from libs.worker.gateways import MAX_FRAME_POOLED_BYTES, Outbox
from libs.worker.wire import engine_request, sequence_event

ROOT = b"root"
POOLS = Capabilities(
    block_size_tokens=16, kv_blocks=8, kv_block_bytes=1, max_context_tokens=64, max_sequences=2, kv_layout="k",
    pools=frozenset(Pooling),
)  # fmt: skip


def submit(pooling: int, phase: pb.Phase = pb.PHASE_PREFILL) -> pb.Submit:
    ids = pack_u32([1, 2, 3])
    return pb.Submit(phase=phase, token_ids=ids, prompt_tokens=3, max_output_tokens=1, pooling=pooling)  # type: ignore[arg-type]


def test_a_submit_names_its_pooling_and_mean_pooling_reuses_no_prefix() -> None:
    for pooling, found, root in (
        (pb.POOLING_UNSPECIFIED, None, ROOT),
        (pb.POOLING_LAST, Pooling.LAST, ROOT),
        (pb.POOLING_MEAN, Pooling.MEAN, b""),
        (pb.POOLING_CLS, Pooling.CLS, b""),
        (pb.POOLING_SCORE, Pooling.SCORE, b""),
    ):
        request = engine_request(submit(pooling), 1, ROOT)
        assert (request.pooling, request.chain_root) == (found, root)
    with pytest.raises(InvalidRequest, match="pooling is 9"):
        engine_request(submit(9), 1, ROOT)


def test_an_engine_without_pooling_refuses_by_name() -> None:
    request = engine_request(submit(pb.POOLING_LAST), 1, ROOT)
    sequence = Sequence(request, block_size_tokens=16, max_context_tokens=64)
    check_request(sequence, POOLS)
    with pytest.raises(InvalidRequest, match="no embeddings"):
        check_request(sequence, replace(POOLS, pools=frozenset()))
    with pytest.raises(InvalidRequest, match="last"):
        check_request(sequence, replace(POOLS, pools=frozenset({Pooling.MEAN})))
    decodes = replace(request, phase=EnginePhase.DECODE)
    with pytest.raises(InvalidRequest, match="vector"):
        check_request(Sequence(decodes, block_size_tokens=16, max_context_tokens=64), POOLS)


def test_an_encoder_refuses_to_generate_and_a_second_text_beyond_the_prompt() -> None:
    capabilities = replace(POOLS, generates=False)
    plain = engine_request(submit(pb.POOLING_UNSPECIFIED), 1, b"")
    with pytest.raises(InvalidRequest, match="only gives vectors"):
        check_request(Sequence(plain, block_size_tokens=16, max_context_tokens=64), capabilities)
    message = submit(pb.POOLING_SCORE)
    for place in (2, 3):
        message.second_from = place
        request = engine_request(message, 1, b"")
        assert request.second_from == place
        pair = Sequence(request, block_size_tokens=16, max_context_tokens=64)
        assert pair.chunk(3).second_from == place
        if place < 3:
            check_request(pair, capabilities)
        else:
            with pytest.raises(InvalidRequest, match="second_from is 3"):
                check_request(pair, capabilities)


def test_a_vector_arrives_unchanged() -> None:
    vector = np.array([0.5, -2.0], "<f4").tobytes()
    event = sequence_event(SequenceOutput(7, finish=FinishReason.STOP, pooled=vector, cached_tokens=16))
    assert event is not None
    (read,) = read_update(pb.WorkerFrame(events=[event]), "k", kv_once=False).events
    assert read == SequenceFinished(7, ApiFinishReason.STOP, 16, vector)


def test_many_vectors_leave_in_frames_of_bounded_size() -> None:
    outbox, count, size = Outbox(), 10, MAX_FRAME_POOLED_BYTES // 4
    for number in range(count):
        event = sequence_event(SequenceOutput(number, finish=FinishReason.STOP, pooled=bytes(size)))
        assert event is not None
        outbox.add_event(event)
    sizes, order = [], []
    while outbox:
        outbox.take(frame := pb.WorkerFrame())
        sizes.append(sum(len(each.finished.pooled) for each in frame.events))
        order += [each.sequence for each in frame.events]
    assert order == list(range(count)) and max(sizes) <= MAX_FRAME_POOLED_BYTES and len(sizes) == 3
