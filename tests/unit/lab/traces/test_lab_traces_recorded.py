"""Tests of traces from request events, and of their description, cuts and scales."""

import pytest

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    RequestEvent,
)
from libs.lab.traces.describe import describe
from libs.lab.traces.recording import recorded_trace
from libs.lab.traces.request import Trace, TraceRequest
from libs.lab.traces.scaling import cut, scale_rate

START_NS = 1_700_000_000_000_000_000


def event(request_id: str, arrival_ns: int, **fields) -> RequestEvent:
    given = {"prompt_tokens": 10, "output_tokens": 3, "outcome": OUTCOME_OK, **fields}
    return RequestEvent(request_id=request_id, arrival_unix_ns=START_NS + arrival_ns, **given)


def test_events_in_any_order_become_requests_in_order_of_arrival():
    found = recorded_trace(
        [
            event("late", 900, prompt_tokens=70, output_tokens=5, max_output_tokens=64),
            event("soon", 100, model="m", tenant="t", service_class="chat"),
        ],
        name="monday",
    )
    assert found.name == "monday"
    assert list(found.requests) == [
        TraceRequest(0, 0, 10, 3, model="m", tenant="t", service_class="chat"),
        TraceRequest(1, 800, 70, 5, max_output_tokens=64),
    ]


def test_a_repeated_event_counts_once_and_choices_of_one_request_separately():
    found = recorded_trace([event("a", 0), event("a", 0), event("a", 0, output_tokens=4)], name="n")
    assert [each.output_tokens for each in found.requests] == [3, 4]


def test_requests_without_a_known_output_are_omitted_and_counted():
    found = recorded_trace(
        [
            event("ok", 50),
            event("bad", 0, outcome=OUTCOME_REJECTED, output_tokens=0),
            event("bad", 0, outcome=OUTCOME_REJECTED, output_tokens=0),
            event("failed", 1, outcome=OUTCOME_FAILED),
            event("gone", 2, outcome=OUTCOME_CLIENT_GONE, output_tokens=0),
            event("left", 60, outcome=OUTCOME_CLIENT_GONE, output_tokens=1),
        ],
        name="n",
    )
    assert [each.arrival_ns for each in found.requests] == [0, 10]
    assert "1 client gone, 1 failed, 1 rejected" in found.notes[1]
    assert "Clients of 1 requests left early" in found.notes[2]


def test_no_events_give_an_empty_trace():
    assert recorded_trace([], name="n").requests == ()


def test_a_description_has_lengths_prefixes_classes_and_models():
    requests = [
        TraceRequest(0, 0, 1000, 10, (1, 2), service_class="chat", model="m", session=1),
        TraceRequest(1, 10**9, 1000, 20, (1, 2), service_class="chat", model="m", session=1, turn=1),
        TraceRequest(2, 4 * 10**9, 1000, 90, (3, 2), service_class="writing", model="m"),
    ]
    found = describe(Trace("t", requests, 512, ("A note.",)))
    assert found["requests"] == 3
    assert found["duration_s"] == 4
    assert found["rate_per_s"] == 0.5
    assert found["output_tokens"] == {"mean": 40, "p50": 20, "p90": 90, "p99": 90}
    assert found["prefix_share"] == pytest.approx(1 / 3), "a block counts behind its whole prefix, at most the prompt"
    assert found["dispersion"] == {"1 s": pytest.approx(0.5), "10 s": None, "60 s": None}
    assert found["sessions"] == 1
    assert found["classes"] == {"chat": 2, "writing": 1}
    assert found["models"] == {"m": 3}
    assert found["notes"] == ["A note."]


def test_an_empty_trace_can_be_described():
    found = describe(Trace("t", ()))
    assert (found["requests"], found["rate_per_s"], found["input_tokens"]) == (0, None, None)


def test_a_conversation_cut_by_a_window_begins_anew_in_it():
    turns = [TraceRequest(n, n * 10**9, 5, 5, session=7, turn=n, think_ns=10**8 * n) for n in range(4)]
    found = cut(Trace("t", turns), 2, 10).requests
    assert [(each.session, each.turn, each.think_ns) for each in found] == [(7, 0, 0), (7, 1, 3 * 10**8)]


def test_invalid_scales_and_cuts_are_refused():
    trace = Trace("t", [TraceRequest(0, 0, 1, 1)])
    for factor, method in ((0, "compress"), (-1, "superpose"), (float("nan"), "superpose"), (2, "stretch")):
        with pytest.raises(InvalidRequest):
            scale_rate(trace, factor, method, 1)
    for start_s, seconds in ((-1, 1), (0, 0), (float("nan"), 1)):
        with pytest.raises(InvalidRequest):
            cut(trace, start_s, seconds)
