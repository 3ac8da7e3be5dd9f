"""Tests of the request log and its summaries."""

import numpy as np
import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    RequestEvent,
)
from libs.telemetry.gateways import AwaitedTokens
from libs.testing.workers.telemetry import MS, at
from services.metrics.requests import MAX_REQUESTS, REPORT_NS, RequestLog, RequestTable, percentiles
from tests.unit.metrics.requests_rig import finished

S = 1_000 * MS


def test_the_request_log_is_bounded_and_reports_when_it_does_not_reach_back():
    log = RequestLog()
    for number in range(MAX_REQUESTS + 1):
        log.add(finished(f"r{number}", end_ms=1000 + number / 100), at(0))
    assert log.report(at(5000), 5000 * MS).total.requests == MAX_REQUESTS
    assert not log.report(at(5000), 5000 * MS).complete
    assert log.report(at(5000), 3999 * MS).complete


def test_a_window_before_the_first_read_is_not_reported_as_complete():
    log = RequestLog()
    log.begin(at(1000))
    assert not log.report(at(5000), 4000 * MS).complete
    assert log.report(at(5000), 3999 * MS).complete


def test_a_summary_is_cached_for_a_while_and_then_made_anew():
    log = RequestLog()
    log.add(finished("first", end_ms=500), at(500))
    assert log.report(at(1000), 1000 * MS).total.requests == 1
    log.add(finished("second", end_ms=600), at(600))
    assert log.report(at(1000) + REPORT_NS - 1, 1000 * MS).as_of_unix_ns == at(1000)
    assert log.report(at(1000) + REPORT_NS, 2000 * MS).total.requests == 2


def test_a_summary_has_targets_and_how_often_they_were_met():
    log = RequestLog()
    for number in range(4):
        event = finished(f"r{number}", ttft_ms=100 * (number + 1), tokens=11, decode_ms=200)
        event.ttft_deadline_unix_ns = event.arrival_unix_ns + 350 * MS
        event.tpot_target_us = 30_000 if number else 0
        log.add(event, at(0))
    log.add(finished("no target", ttft_ms=900), at(0))
    total = log.report(at(1001), 1000 * MS).total
    assert (total.ttft_slo.requests, total.ttft_slo.target_s, total.ttft_slo.met) == (4, 0.35, 0.75)
    assert (total.tpot_slo.requests, total.tpot_slo.target_s, total.tpot_slo.met) == (3, 0.03, 1.0)


def test_requests_without_a_first_token_count_with_their_age_and_as_missed_after_the_deadline():
    log, awaited = RequestLog(), {"sim": AwaitedTokens(((28 * S, 90), (S, 2)), overdue=90)}
    total = log.report(at(1000), 1000 * MS, awaited).total
    assert (total.requests, total.awaited) == (0, 92)
    assert (total.ttft_s.count, total.ttft_s.p50, total.ttft_slo.requests, total.ttft_slo.met) == (92, 28.0, 90, 0.0)
    for number in range(10):
        event = finished(f"r{number}", end_ms=5_000)
        event.ttft_deadline_unix_ns = event.arrival_unix_ns + 350 * MS
        log.add(event, at(0))
    report = log.report(at(6000), 2000 * MS, {"sim": AwaitedTokens(((2 * S, 5),), overdue=5), "other": awaited["sim"]})
    assert [(each.model, each.summary.awaited) for each in report.models] == [("other", 92), ("sim", 5)]
    own = report.models[1].summary
    assert (own.ttft_s.p50, own.ttft_s.p90) == (0.1, 2.0)
    assert (own.ttft_slo.requests, own.ttft_slo.met) == (15, pytest.approx(10 / 15))


def test_prompts_whose_client_left_before_prefill_are_not_counted():
    log = RequestLog()
    log.add(finished("served"), at(0))
    log.add(finished("left later", outcome=OUTCOME_CLIENT_GONE), at(0))
    log.add(finished("left", outcome=OUTCOME_CLIENT_GONE, ttft_ms=0, tokens=0, decode_ms=0), at(0))
    total = log.report(at(1010), 1000 * MS).total
    assert (total.requests, total.prompt_tokens) == (3, 100)


def test_names_of_absent_models_are_forgotten():
    table = RequestTable(2)
    log = RequestLog()
    first, second = (log.add(finished(model=model), at(0)) for model in ("a", "b"))
    for _ in range(3):
        table.put(0, first)
        table.put(1, second)
        assert [name for name, _ in table.by_model(table.within(0, at(2000)))] == ["a", "b"]
        table.drop(0)
        table.drop(1)
    assert table.by_model(table.within(0, at(2000))) == []


def test_requests_older_than_the_history_are_forgotten():
    log = RequestLog()
    log.add(finished("old", end_ms=0), at(0))
    log.add(finished("older still", end_ms=-1), at(700_000))
    assert log.report(at(1), 1000 * MS).total.requests == 0


def test_percentiles_are_latencies_of_actual_requests():
    assert percentiles(np.array([4 * 10**9])).p99 == 4.0
    assert percentiles(np.array([10**9, 3 * 10**9])).p50 == 1.0


def test_a_request_with_impossible_times_is_treated_like_others() -> None:
    log = RequestLog()
    most = (1 << 64) - 1
    assert log.add(RequestEvent(arrival_unix_ns=most, ttft_ns=most, decode_ns=most, output_tokens=2), 0) is not None
    log.add(RequestEvent(request_id="next", arrival_unix_ns=5), 0)
    assert log.report(10, 10).total.requests == 1
