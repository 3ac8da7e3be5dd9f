"""Tests of the time that a receiver reports for a KV transfer."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_blocks import ReceivedTotals
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.port import Capabilities, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineEvent
from libs.engine.sequence import Sequence
from libs.worker import kv_client, kv_wire
from libs.worker.gateways import WorkerSpeed


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


def test_a_named_transfer_whose_sender_did_not_measure_its_wait_says_nothing_about_the_link() -> None:
    """Older senders leave the field out."""
    sequence = receiver(streamed=True, named=True)
    sequence.kv_ready = True
    sequence.note_kv_ready(2_000)
    report = sequence.transfer_report(ReceivedTotals(75, 9_600), 1_000, 2_040)
    assert (report.start_unix_ns, report.ready_ns) == (1_000, 0)
    assert report.link_ns(chunk_tokens=4_096) == report.link_ns(chunk_tokens=512) == 0


def test_a_transfer_with_an_unmeasured_wait_leaves_the_speed_of_a_worker_as_it_was() -> None:
    can = Capabilities(
        block_size_tokens=16,
        kv_blocks=100,
        kv_block_bytes=128,
        max_context_tokens=4_096,
        max_sequences=8,
        kv_layout="l",
    )
    engine = SimpleNamespace(name="sim", device="cpu", capabilities=can)
    speed = WorkerSpeed(cast(Any, engine), 1)
    received = ReceivedTotals(75, 9_600)
    report = receiver(streamed=True, named=True).transfer_report(received, 1_000, 2_040)
    before = speed.speed.kv_token_ns
    speed.on_event(EngineEvent(kv_transfers=(report,)))
    assert speed.speed.kv_token_ns == before
    received.first_waited_ns = received.waited_ns = 700
    report = receiver(streamed=True, named=True).transfer_report(received, 1_000, 2_040)
    speed.on_event(EngineEvent(kv_transfers=(report,)))
    assert speed.speed.kv_token_ns == 340 / 1_200


def test_a_named_transfer_that_did_not_wait_is_in_transit_for_the_whole_time() -> None:
    received = ReceivedTotals(75, 9_600, first_waited_ns=1, waited_ns=1)
    report = receiver(streamed=True, named=True).transfer_report(received, 1_000, 2_040)
    assert report.link_ns(chunk_tokens=4_096) == 1_039


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
