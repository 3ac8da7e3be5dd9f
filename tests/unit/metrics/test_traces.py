"""Tests of traces: a request's spans, and the matching of requests and their KV transfers."""

import asyncio

import pytest

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_FAILED,
    OUTCOME_OK,
    KvTransfer,
    RequestEvent,
    StepBatch,
)
from libs.contracts.topics import REQUESTS, STEPS
from libs.testing.wait import ManualClock, until
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at
from services.metrics import traces as traces_module
from services.metrics.traces import SETTLE_NS, HandOff, TraceBuffer, TraceExporter, export_request, spans, trace_context

TRACE, PARENT = "ab" * 16, "cd" * 8
SETTLED_NS = ORIGIN_NS + SETTLE_NS


def request(request_id="r-1", *, traceparent="", **fields):
    reported = {
        "gateway_id": "gateway-0", "model": "sim", "arrival_unix_ns": at(0), "queue_ns": 10 * MS, "ttft_ns": 50 * MS,
        "decode_ns": 100 * MS, "prompt_tokens": 40, "output_tokens": 11, "prefill_worker": "prefill-0",
        "decode_worker": "decode-0", "outcome": OUTCOME_OK, "finish_reason": "stop",
    }  # fmt: skip
    return RequestEvent(request_id=request_id, traceparent=traceparent, **{**reported, **fields})


def transfer(request_id="r-1", start_ms=48, *, worker="decode-0"):
    transfer = KvTransfer(
        request_id=request_id, from_worker_id="prefill-0", blocks=3, bytes=9000, shared_memory=True,
        start_unix_ns=at(start_ms), end_unix_ns=at(start_ms + 4),
    )  # fmt: skip
    return StepBatch(worker_id=worker, kv_transfers=[transfer])


def enter(book, *values):
    for value in values:
        topic = REQUESTS if isinstance(value, RequestEvent) else STEPS
        book.enter(Record(topic, "key", value, 0, 0), ORIGIN_NS)


def taken(book, now_ns=SETTLED_NS):
    return book.take(now_ns, 100)


def test_a_request_is_one_span_over_its_parts():
    found = spans(request(), [HandOff("decode-0", transfer().kv_transfers[0])])
    assert [(s.name, s.instance, s.start_unix_ns, s.end_unix_ns) for s in found] == [
        ("generate sim", "gateway-0", at(0), at(150)),
        ("queue", "gateway-0", at(0), at(10)),
        ("prefill", "prefill-0", at(10), at(50)),
        ("kv hand-off", "decode-0", at(48), at(52)),
        ("decode", "decode-0", at(50), at(150)),
    ]
    whole, *parts = found
    assert {s.trace_id for s in found} == {whole.trace_id}
    assert {s.parent_id for s in parts} == {whole.span_id}
    assert len({s.span_id for s in found}) == len(found)
    assert whole.parent_id == b""
    assert whole.attributes["gen_ai.usage.input_tokens"] == 40


def test_the_same_event_makes_the_same_spans():
    assert spans(request(), []) == spans(request(), [])


def test_a_span_is_a_child_of_the_clients():
    found = spans(request(traceparent=f"00-{TRACE}-{PARENT}-01"), [])
    assert {s.trace_id.hex() for s in found} == {TRACE}
    assert found[0].parent_id.hex() == PARENT


def test_a_failed_request_has_its_reason():
    event = request(outcome=OUTCOME_FAILED, error_code="worker_lost", finish_reason="", decode_ns=0, ttft_ns=0)
    whole, *parts = spans(event, [])
    assert (whole.error, whole.attributes["error.type"]) == ("worker_lost", "worker_lost")
    assert [s.name for s in parts] == ["queue"]
    assert "fulcrum.finish_reason" not in whole.attributes


@pytest.mark.parametrize("transfer_first", [True, False])
def test_transfers_join_their_request_in_any_order(transfer_first):
    book = TraceBuffer(1.0)
    enter(book, *((transfer(), request()) if transfer_first else (request(), transfer())))
    assert taken(book, SETTLED_NS - 1) == []
    assert [s.name for s in taken(book)] == ["generate sim", "queue", "prefill", "kv hand-off", "decode"]
    assert taken(book) == []


def test_a_transfer_reported_late_is_a_span_of_the_same_trace():
    prompt, late = TraceBuffer(1.0), TraceBuffer(1.0)
    enter(prompt, transfer(), request())
    enter(late, request())
    first = taken(late)
    assert [s.name for s in first] == ["generate sim", "queue", "prefill", "decode"]
    enter(late, transfer())
    second = taken(late)
    assert [s.name for s in second] == ["kv hand-off"]
    assert {s.span_id: s for s in first + second} == {s.span_id: s for s in taken(prompt)}


def test_late_transfers_of_choices_are_matched_to_their_own():
    book = TraceBuffer(1.0)
    enter(book, request(decode_ns=90 * MS), request(decode_ns=99 * MS, decode_worker="decode-1"))
    wholes = {s.span_id: s for s in taken(book) if s.name == "generate sim"}
    enter(book, transfer(start_ms=49, worker="decode-1"), transfer(start_ms=48))
    found = taken(book)
    assert [wholes[s.parent_id].end_unix_ns for s in found] == [at(149), at(140)]


def test_a_request_that_did_not_move_awaits_no_transfer(monkeypatch):
    monkeypatch.setattr(traces_module, "MAX_LACKING", 1)
    book = TraceBuffer(1.0)
    enter(book, request("lacks"), request("whole", decode_worker="prefill-0"), request("bare", decode_worker=""))
    taken(book)
    enter(book, transfer("lacks"))
    assert [s.name for s in taken(book)] == ["kv hand-off"]


def test_choices_of_a_request_share_its_transfers_evenly():
    book = TraceBuffer(1.0)
    enter(book, transfer(start_ms=48), transfer(start_ms=49), request(decode_ns=90 * MS), request(decode_ns=99 * MS))
    found = taken(book)
    assert [s.start_unix_ns for s in found if s.name == "kv hand-off"] == [at(48), at(49)]
    assert len({s.span_id for s in found}) == len(found)


def test_a_request_that_moved_has_all_its_transfers():
    book = TraceBuffer(1.0)
    enter(book, transfer(start_ms=48), transfer(start_ms=90, worker="decode-1"), request(moves=1))
    assert [s.instance for s in taken(book) if s.name == "kv hand-off"] == ["decode-0", "decode-1"]


@pytest.mark.parametrize(("flags", "kept"), [("01", True), ("00", False)])
def test_the_client_decides_whether_its_own_trace_is_sampled(flags, kept):
    book = TraceBuffer(0.0 if kept else 1.0)
    enter(book, request(traceparent=f"00-{TRACE}-{PARENT}-{flags}"))
    assert bool(taken(book)) is kept


def test_a_share_of_other_requests_is_traced():
    book = TraceBuffer(0.25)
    enter(book, *(request(f"r-{number}") for number in range(2000)))
    kept = [s for s in book.take(SETTLED_NS, 2000) if s.name == "generate sim"]
    assert 400 < len(kept) < 600


def test_waiting_spans_are_bounded_and_dropped_ones_counted(monkeypatch):
    monkeypatch.setattr(traces_module, "MAX_REQUESTS", 10)
    monkeypatch.setattr(traces_module, "MAX_TRANSFERS", 10)
    book = TraceBuffer(1.0)
    for number in range(25):
        enter(book, transfer(f"r-{number}"), request(f"r-{number}"))
    found = taken(book)
    assert sum(s.name == "generate sim" for s in found) == sum(s.name == "kv hand-off" for s in found) == 10
    assert book.dropped_requests == 15


def test_garbage_is_not_a_trace_context():
    for bad in ("", "00-xyz", f"00-{TRACE}-{PARENT}", f"00-{TRACE.upper()}-{PARENT}-01"):
        assert trace_context(request(traceparent=bad)).sampled is None


async def test_an_unreachable_collector_loses_spans_and_nothing_else(monkeypatch):
    monkeypatch.setattr(traces_module, "RETRY_S", 0.001)
    clock, book = ManualClock(SETTLED_NS), TraceBuffer(1.0)
    book.enter(Record(REQUESTS, "r-1", request(), 0, 0), ORIGIN_NS)
    exporter = TraceExporter(book, "http://collector:4o18/v1/traces", clock)
    exporting = asyncio.ensure_future(exporter.run())
    await until(lambda: [sample.value for family in exporter.collect() for sample in family.samples][1])
    assert not exporting.done()
    exporting.cancel()


def test_spans_are_grouped_by_the_process_that_they_describe():
    message = export_request(spans(request(), [HandOff("decode-0", transfer().kv_transfers[0])]))
    reported = {
        resource.resource.attributes[1].value.string_value: [s.name for s in resource.scope_spans[0].spans]
        for resource in message.resource_spans
    }
    assert reported == {
        "gateway-0": ["generate sim", "queue"], "prefill-0": ["prefill"], "decode-0": ["kv hand-off", "decode"],
    }  # fmt: skip
