"""Tests of alerts about requests that miss their targets."""

import pytest

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    RequestEvent,
)
from libs.contracts.topics import REQUESTS
from libs.policy.alerts.burn import WINDOWS_S, burn_conditions, duration
from libs.policy.alerts.rules import Burn, RequestCount, make_rules
from libs.policy.alerts.store import AlertStateMachine
from libs.policy.verdict.state import Grade
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at
from services.metrics.requests import RequestLog
from tests.unit.metrics.alerts.alerts_rig import SETTINGS, Cluster


def finished(number, *, ttft_ms=10, tpot_ms=1, **more):
    fields = {
        "request_id": str(number), "model": "m", "arrival_unix_ns": ORIGIN_NS, "output_tokens": 11,
        "ttft_ns": ttft_ms * MS, "decode_ns": 10 * tpot_ms * MS, "outcome": OUTCOME_OK,
        "ttft_deadline_unix_ns": ORIGIN_NS + 100 * MS, "tpot_target_us": 2_000,
    }  # fmt: skip
    return RequestEvent(**{**fields, **more})


@pytest.mark.parametrize(
    ("event", "kept"),
    [
        (finished(0), {"ttft": False, "tpot": False}),
        (finished(0, ttft_ms=101), {"ttft": True, "tpot": False}),
        (finished(0, tpot_ms=3), {"ttft": False, "tpot": True}),
        (finished(0, outcome=OUTCOME_FAILED, ttft_ms=0, output_tokens=0), {"ttft": True}),
        (finished(0, outcome=OUTCOME_REJECTED, error_code="queue_full", ttft_ms=0, output_tokens=0), {"ttft": True}),
        (finished(0, outcome=OUTCOME_REJECTED, error_code="invalid_request", ttft_ms=0, output_tokens=0), {}),
        (finished(0, outcome=OUTCOME_CLIENT_GONE, ttft_ms=0, output_tokens=0), {}),
        (finished(0, ttft_deadline_unix_ns=0, tpot_target_us=0), {}),
    ],
)
def test_a_request_is_judged_by_its_own_targets(event, kept):
    judged = RequestLog().add(event, ORIGIN_NS)
    missed = {"ttft": judged.ttft_missed, "tpot": judged.tpot_missed}
    assert {level: bad for level, bad in missed.items() if bad is not None} == kept


def test_a_budget_that_burns_fast_over_both_windows_fires_until_the_burn_stops():
    cluster = Cluster()

    def requests(count, **more):
        for number in range(count):
            cluster.state.take(
                Record(REQUESTS, "k", finished(f"{cluster.now_ms}-{number}", **more), 0, 0), at(cluster.now_ms)
            )

    labels = {"model": "m", "slo": "ttft", "severity": "critical"}
    requests(1)
    cluster.now_ms += 3_600_000
    requests(15, ttft_ms=500)
    assert cluster.run(1) == []
    requests(15, ttft_ms=500)
    assert cluster.run(1) == [("FulcrumSloBurn", "firing", labels)]
    assert cluster.reasons["FulcrumSloBurn"] == (
        "30 of 30 requests in 1 h missed TTFT: 100.0x what 99.00% allows, 100.0x in 5 min"
    )
    assert cluster.published[-1].severity == "critical"
    cluster.now_ms += 10_000_000
    cluster.run(1)
    requests(5000)
    assert ("FulcrumSloBurn", "resolved", labels) in cluster.run(3)
    assert cluster.reasons == {}


def burn_of(age_s, bad_shares):
    """Return the burn of 100 requests in each window with that many bad ones."""
    return Burn("m", "ttft", {window: RequestCount(100, bad_shares[duration(window)]) for window in WINDOWS_S}, age_s)


def test_a_firing_warning_hides_nothing_critical_and_continues_afterwards():
    machine, limits = AlertStateMachine(make_rules(SETTINGS.alert_limits())), SETTINGS.alert_limits()
    slow = {"3 d": 2, "6 h": 2, "30 min": 2, "1 h": 2, "5 min": 2}
    fast = {**slow, "1 h": 30, "5 min": 60}

    def fires(second, shares, firing):
        for change in machine.step(second * 10**9, burn_conditions([burn_of(10**6, shares)], limits)):
            (firing.discard if change.ended_ns else firing.add)(change.severity)
        return firing

    firing = set()
    assert fires(1, slow, firing) == {"warning"}
    assert fires(2, fast, firing) == {"warning", "critical"}
    assert fires(3, slow, firing) == {"warning", "critical"}
    assert fires(6, slow, firing) == {"warning"}


@pytest.mark.parametrize(
    ("age_s", "severities"), [(60, []), (400, []), (600, ["critical"]), (4 * 86_400, ["critical"])]
)
def test_a_new_service_is_not_judged_by_windows_that_it_has_not_seen(age_s, severities):
    all_bad = burn_of(age_s, {duration(window): 100 for window in WINDOWS_S})
    fired = [each.severity for each in burn_conditions([all_bad], SETTINGS.alert_limits()) if each.grade is Grade.FIRE]
    assert fired == severities


def test_one_miss_among_the_first_requests_after_a_restart_is_no_burn():
    cluster = Cluster()
    for number in range(20):
        event = finished(number, ttft_ms=500 if number == 7 else 10)
        cluster.state.take(Record(REQUESTS, "k", event, 0, 0), at(cluster.now_ms))
    assert cluster.run(5) == []
