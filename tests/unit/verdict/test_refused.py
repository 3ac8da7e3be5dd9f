"""Tests of refused requests: their rate, their reasons, and when they are the cause of a verdict."""

import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, RefusedRequests
from libs.policy.verdict.causes import CauseCode
from libs.policy.verdict.refused import refused_causes
from libs.policy.verdict.state import Grade
from libs.policy.verdict.watch import VerdictWatch
from libs.telemetry.gateways import SILENT_NS
from libs.telemetry.refusals import MAX_REASONS, WINDOW_NS, RefusalLog
from tests.unit.verdict.test_verdicts import LIMITS, MS, S, state

DENIED, ABSENT, FULL = (403, "permission_denied"), (404, "model_not_found"), (429, "queue_full")


def queues_message(at_ns, posts, refused=(), gateway="g", *, incarnation=1, last=False):
    rows = [RefusedRequests(status=status, code=code, count=count) for (status, code), count in dict(refused).items()]
    message = {"incarnation": incarnation, "told_unix_ns": at_ns, "posts": posts, "refused": rows, "last": last}
    return GatewayQueues(gateway_id=gateway, **message)


def judged(requests, refused, *, lasting=True):
    return next(refused_causes(requests, refused, 10.0, lasting=lasting), None)


def test_the_rate_of_refusals_is_right_within_two_seconds_and_gone_within_two():
    log = RefusalLog()
    for half in range(40):  # idle for ten seconds, then ten refusals a second for five, then none
        count = 5 * min(max(half - 20, 0), 10)
        now_ns = S + half * S // 2
        log.take(queues_message(now_ns, count, {DENIED: count}), now_ns)
        recent = log.recent(now_ns)
        per_s = recent.per_s(recent.refused.get(DENIED, 0))
        if half <= 20 or half >= 34:
            assert per_s == 0
        elif 24 <= half <= 30:
            assert per_s == pytest.approx(10)
    assert log.recent(now_ns, WINDOW_NS).refused[DENIED] == 50


def test_gateways_are_summed_until_they_leave_fall_silent_or_restart():
    log = RefusalLog()
    for second in range(5):
        log.take(queues_message(second * S, 4 * second, {DENIED: 3 * second}, "a"), second * S)
        log.take(queues_message(second * S, 6 * second, {ABSENT: 2 * second}, "b"), second * S)
    found = log.recent(4 * S)
    assert (found.requests, dict(found.refused)) == (20, {DENIED: 6, ABSENT: 4})
    log.take(queues_message(5 * S, 30, {ABSENT: 10}, "b", last=True), 5 * S)
    log.take(queues_message(5 * S, 2, {DENIED: 2}, "a", incarnation=2), 5 * S)
    log.take(queues_message(6 * S, 4, {DENIED: 3}, "a", incarnation=2), 6 * S)
    assert dict(log.recent(6 * S).refused) == {DENIED: 1}
    assert dict(log.recent(6 * S + SILENT_NS).refused) == {}


def test_samples_and_reasons_of_a_gateway_are_bounded():
    log = RefusalLog()
    many = {(400, f"code_{number}"): 1 for number in range(MAX_REASONS + 20)}
    for number in range(2_000):
        log.take(queues_message(S + number * 50 * MS, number, many), S + number * 50 * MS)
    (gateway,) = log._gateways.values()
    assert len(gateway.samples) < 60
    assert len(gateway.samples[-1].refused) == MAX_REASONS


def test_a_flood_of_refusals_is_named_with_its_reasons_and_a_check():
    cause = judged(98, {DENIED: 98})
    assert (cause.code, cause.grade, cause.model) == (CauseCode.REFUSED, Grade.FIRE, "")
    assert cause.sentence.startswith(
        "Nothing gets in: 98 of 98 requests in the last 10 s were refused: 403 permission_denied. Check what the "
        "clients' keys may do"
    )
    mixed = judged(100, {DENIED: 20, ABSENT: 40}).sentence
    assert mixed.startswith("Requests are refused: 60 of 100 requests in the last 10 s were refused: 40 with 404 ")
    assert "GET /v1/models" in mixed


@pytest.mark.parametrize("status", [0, 400, 401, 403, 404, 405, 413, 422, 501])
def test_every_reason_has_a_check(status):
    assert "Check " in judged(50, {(status, "brand_new"): 50}).sentence


def test_refusals_for_lack_of_room_rare_ones_and_past_ones_are_no_cause():
    assert judged(100, {FULL: 100}) is None
    assert judged(100, {(503, "no_workers"): 100}) is None
    assert judged(100, {DENIED: 30}) is None
    assert judged(100, {DENIED: 100}, lasting=False) is None
    assert judged(100, {DENIED: 45}).grade is Grade.HOLD
    assert judged(4, {DENIED: 4}).grade is Grade.HOLD, "less than one a second"


def test_refusals_exclude_idle_and_balanced_and_do_not_outrank_a_shortage():
    watch, refused = VerdictWatch(LIMITS), [judged(98, {DENIED: 98})]
    assert watch.look([], S, refused).code is CauseCode.IDLE, "it has not lasted"
    assert watch.look([], S + LIMITS.for_ns, refused).code is CauseCode.REFUSED
    calm, short = state(prompts=1.0, decodes=20), state(prompts=5.0, decodes=20)
    assert watch.look([calm], 3 * S, refused).code is CauseCode.REFUSED
    for at_ms in range(4_000, 6_000, 200):
        found = watch.look([short], at_ms * MS, refused)
    assert [each.code for each in found.causes] == [CauseCode.PREFILL_BOUND, CauseCode.REFUSED]
    assert watch.look([calm], 20 * S).code is CauseCode.PREFILL_BOUND
    assert watch.look([calm], 20 * S + LIMITS.clear_ns).code is CauseCode.BALANCED
