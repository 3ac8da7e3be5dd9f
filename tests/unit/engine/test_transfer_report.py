"""Tests of the time that a receiver reports for a KV transfer."""

import numpy as np
import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_blocks import ReceivedTotals
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.port import EnginePhase, EngineRequest, SamplingParams
from libs.engine.sequence import Sequence
from libs.worker import kv_client, kv_wire


def receiver(*, streamed: bool, named: bool = False) -> Sequence:
    handle = KvHandle("source", 1, "", b"", tokens=1_200, blocks=75, streamed=streamed, named=named)
    tokens = np.zeros(1_200, np.int32)
    request = EngineRequest(1, "r", EnginePhase.DECODE, tokens, 1_200, 8, SamplingParams(), kv=handle)
    return Sequence(request, block_size_tokens=16, max_context_tokens=4_096)


def test_the_time_of_prompt_computation_is_not_charged_to_the_link() -> None:
    sequence = receiver(streamed=True)
    for ready, now_ns in ((False, 1_000), (True, 1_500), (False, 1_530), (True, 2_000)):
        sequence.kv_ready = ready
        sequence.note_kv_ready(now_ns)
    assert sequence.transfer_report(ReceivedTotals(75, 9_600), 1_000, 2_040).ready_ns == 30 + 40


def test_kv_that_was_ready_before_the_pull_is_in_transfer_for_the_whole_time() -> None:
    sequence = receiver(streamed=False)
    sequence.note_kv_ready(500)
    assert sequence.transfer_report(ReceivedTotals(75, 9_600), 1_000, 2_040).ready_ns == 1_040


def test_the_wait_for_a_named_prompt_to_begin_is_no_part_of_its_transfer() -> None:
    received = ReceivedTotals(75, 9_600, first_waited_ns=700, waited_ns=700)
    report = receiver(streamed=True, named=True).transfer_report(received, 1_000, 2_040)
    assert (report.start_unix_ns, report.end_unix_ns, report.ready_ns) == (1_700, 2_040, 340)
    assert report.link_ns(chunk_tokens=4_096) == 340


def test_a_named_prompt_that_comes_in_parts_says_nothing_about_the_link_if_it_was_awaited_between_them() -> None:
    received = ReceivedTotals(75, 9_600, first_waited_ns=700, waited_ns=900)
    report = receiver(streamed=True, named=True).transfer_report(received, 1_000, 2_040)
    assert (report.start_unix_ns, report.ready_ns) == (1_700, 140)
    assert report.link_ns(chunk_tokens=4_096) == 0


@pytest.mark.parametrize("now_ns", [1_000, 1_500])
def test_a_sender_that_says_it_waited_for_too_long_shortens_no_transfer_below_zero(now_ns: int) -> None:
    received = ReceivedTotals(75, 9_600, first_waited_ns=1 << 63, waited_ns=1 << 63)
    report = receiver(streamed=True, named=True).transfer_report(received, 1_000, now_ns)
    assert report.start_unix_ns == report.end_unix_ns == now_ns
    assert report.ready_ns == 0


def test_the_time_that_a_sender_waited_reaches_its_receiver() -> None:
    chunk = KvChunk(0, 1, waited_ns=70)
    message = kv_wire.chunk_message(1, chunk, last=True, in_place=False)
    frame, data = kv_wire.decode(kv_wire.encode(pb.KvFrame(chunks=[message]), []))
    assert [kv_client.received_chunk(each, part, None).waited_ns for each, part in kv_wire.parts(frame, data)] == [70]
