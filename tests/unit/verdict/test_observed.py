"""Tests of a verdict's inputs from telemetry: arrivals, traffic, paces and faults of the simulation."""

import json
import random

import numpy as np
import pytest

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandCount, DemandTotals
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, ACTION_ROLE_MOVED, MODE_ADVISORY, Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    GatewayQueues,
    ModelQueue,
    RequestEvent,
    StepBatch,
)
from libs.engine.sim import LOOK_S, SimFaults
from libs.perfmodel.learner import FittedModel, KindFit, expected_ns, usual_model
from libs.policy.pressure import WorkerProfile
from libs.policy.step_time import StepTimeModel, StepWork, chunks_work
from libs.policy.verdict.state import ModelState
from libs.telemetry.gateways import SPAN_NS, ArrivalRates, FleetRefusals, ModelBacklog
from libs.telemetry.steps import FinishedSteps, RanStep, StepCounts
from services.metrics.status.evaluator import StepPace, beside_peers, pace
from services.metrics.status.observe import ObservedStatus, SeenDemand, observe
from services.metrics.status.traffic import SPAN_NS as TRAFFIC_NS
from services.metrics.status.traffic import STATUS_VALID_NS, PlannerNews, TrafficLog

MS = 1_000_000
S = 1_000 * MS
MODEL = StepTimeModel(8e6, 6e4, 0.4, 15e6, 3e5, 25.0, interference=0.3, decode_matrix_ns=2e6)


def queues_message(at_ns, tokens, gateway="g", incarnation=1, last=False):
    queues = [ModelQueue(model="m", arrived_tokens=tokens)]
    message = {"gateway_id": gateway, "incarnation": incarnation, "told_unix_ns": at_ns, "queues": queues, "last": last}
    return GatewayQueues(**message)


def test_the_rate_of_prompts_is_counted_by_gateways_over_the_last_seconds():
    rates = ArrivalRates()
    for tenth in range(60):
        rates.take(queues_message(S + tenth * 100 * MS, 50 * tenth), S + tenth * 100 * MS)
        rates.take(queues_message(S + tenth * 100 * MS, 10 * tenth, "other"), S + tenth * 100 * MS)
    now_ns = S + 5_900 * MS
    assert rates.rate("m", now_ns).tokens_per_s == pytest.approx(600)
    assert rates.rate("another", now_ns).tokens_per_s == 0
    assert rates.rate("m", now_ns + SPAN_NS).tokens_per_s == 0


def test_a_momentary_burst_is_no_rate_and_lasting_arrivals_are():
    rates = ArrivalRates()
    for tenth in range(40):
        tokens = 5_000 if tenth >= 20 else 0
        rates.take(queues_message(S + tenth * 100 * MS, tokens), S + tenth * 100 * MS)
    assert rates.rate("m", S + 3_900 * MS).tokens_per_s == 0
    for tenth in range(40, 60):
        rates.take(queues_message(S + tenth * 100 * MS, 5_000 + 100 * (tenth - 39)), S + tenth * 100 * MS)
    assert rates.rate("m", S + 5_900 * MS).tokens_per_s == pytest.approx(800, rel=0.02)


def test_a_low_rate_is_measured_over_its_stable_period_and_follows_a_change_within_a_span():
    drawn, rates, came, found = random.Random(3), ArrivalRates(), 0, []
    for tenth in range(1, 500):
        per_s = 2 if tenth < 300 else 8
        came += sum(drawn.randrange(150, 350) for _ in range(drawn.random() < per_s / 10))
        rates.take(queues_message(S + tenth * 100 * MS, came), S + tenth * 100 * MS)
        found.append(rates.rate("m", S + tenth * 100 * MS))
    steady = found[100:298]
    off = [abs(each.tokens_per_s - 500) / each.error for each in steady if each.error]
    assert np.mean([each.tokens_per_s for each in steady]) == pytest.approx(500, rel=0.15)
    assert np.std([each.tokens_per_s for each in steady]) < 150  # of 2.5 s alone: 224
    assert np.mean(np.array(off) < 2) > 0.8
    assert found[300 + 26].tokens_per_s > 1_300


def test_a_restarted_gateway_counts_anew_and_one_that_left_no_longer_counts():
    rates = ArrivalRates()
    rates.take(queues_message(S, 1_000), S)
    rates.take(queues_message(2 * S, 2_000), 2 * S)
    rates.take(queues_message(3 * S, 10, incarnation=2), 3 * S)
    assert rates.rate("m", 3 * S).tokens_per_s == 0
    for tenth in range(1, 11):
        now_ns = 3 * S + tenth * 100 * MS
        rates.take(queues_message(now_ns, 10 + 5 * tenth, incarnation=2), now_ns)
        rates.take(queues_message(now_ns + 1, 9_000, incarnation=1), now_ns)
    assert rates.rate("m", 4 * S).tokens_per_s == pytest.approx(50 / 2.5)
    rates.take(queues_message(5 * S, 60, incarnation=2, last=True), 5 * S)
    assert rates.rate("m", 5 * S).tokens_per_s == 0


def test_traffic_separates_errors_from_refusals_for_lack_of_room_and_forgets_after_its_span():
    log = TrafficLog()
    base = {"model": "m", "arrival_unix_ns": 1, "prompt_tokens": 100, "cached_tokens": 25}
    log.take(RequestEvent(outcome=OUTCOME_OK, output_tokens=11, ttft_ns=200 * MS, decode_ns=100 * MS, **base), S)
    log.take(RequestEvent(outcome=OUTCOME_FAILED, **base), S)
    log.take(RequestEvent(outcome=OUTCOME_REJECTED, error_code="queue_full", **base), S)
    log.take(RequestEvent(outcome=OUTCOME_REJECTED, error_code="invalid_request", **base), S)
    found = log.traffic(2 * S)
    assert (found.requests_per_s, found.errors_per_s, found.too_many_per_s, found.rejected_per_s) == (
        0.4,
        0.1,
        0.1,
        0.1,
    )
    assert (found.cache_hit, found.ttft_p50_ms, found.tpot_p95_ms) == (0.25, 200, 10)
    assert log.refused_tokens_per_s("m", 2 * S, 4 * S) == 25
    assert log.traffic(S + TRAFFIC_NS).requests_per_s == 0


def test_requests_without_a_first_token_count_in_ttft_with_their_wait_so_far():
    log = TrafficLog()
    assert log.traffic(S, [(30 * S, 3)]).ttft_p50_ms == 30_000, "nothing has ended and all wait"
    for _ in range(8):
        log.take(RequestEvent(outcome=OUTCOME_OK, model="m", output_tokens=1, ttft_ns=200 * MS), S)
    assert (log.traffic(S).ttft_p95_ms, log.traffic(S).awaited) == (200, 0)
    found = log.traffic(S, [(28 * S, 90), (5 * S, 2)])
    assert (found.ttft_p50_ms, found.ttft_p95_ms, found.awaited) == (28_000, 28_000, 92)
    assert log.traffic(S, [(28 * S, 1), (5 * S, 1)]).ttft_p50_ms == 200


def test_prompts_whose_client_left_before_prefill_are_not_served():
    log = TrafficLog()
    base = {"model": "m", "prompt_tokens": 100, "cached_tokens": 25}
    log.take(RequestEvent(outcome=OUTCOME_OK, output_tokens=1, ttft_ns=200 * MS, **base), S)
    log.take(RequestEvent(outcome=OUTCOME_CLIENT_GONE, output_tokens=1, ttft_ns=200 * MS, **base), S)
    for _ in range(50):
        log.take(RequestEvent(outcome=OUTCOME_CLIENT_GONE, model="m", prompt_tokens=10_000), S)
    found = log.traffic(2 * S)
    assert (found.prompt_tokens_per_s, found.cache_hit) == (20, 0.25)
    assert log.cache_hit("m", 2 * S) == 0.25
    assert found.requests_per_s == 5.2


def test_targets_stay_known_long_after_the_requests_that_named_them():
    log = TrafficLog()
    log.take(RequestEvent(model="m", arrival_unix_ns=S, ttft_deadline_unix_ns=5 * S, tpot_target_us=50_000), S)
    assert log.targets_ns("m") == (4 * S, 50 * MS)
    log.traffic(100 * S)
    assert log.targets_ns("m") == (4 * S, 50 * MS)
    assert log.targets_ns("other") == (0, 0)


def counted(at_ns, refused, gateway="g", *, incarnation=1, last=False, lines=0):
    counts = [
        DemandCount(model="m", service_class="online", tenant="a", refused=refused + 7, queue_full=refused),
        DemandCount(model="m", service_class=BATCH_CLASS, tenant="a", refused=lines, queue_full=lines),
    ]
    message = {"gateway_id": gateway, "incarnation": incarnation, "told_unix_ns": at_ns, "counts": counts, "last": last}
    return DemandTotals(**message)


def test_requests_refused_by_full_queues_are_counted_by_model_over_the_last_seconds():
    refusals = FleetRefusals()
    for second in range(0, 11, 2):
        refusals.take(counted(S + second * S, 20 * second, lines=1_000 * second))
        refusals.take(counted(S + second * S, 5 * second, "other"))
    now_ns = 12 * S
    assert refusals.per_s("m", now_ns) == refusals.total_per_s(now_ns) == pytest.approx(25)
    assert refusals.per_s("another", now_ns) == 0
    refusals.take(counted(13 * S, 200))
    refusals.take(counted(15 * S, 200))
    refusals.take(counted(15 * S, 0, "other", last=True))
    assert refusals.per_s("m", 15 * S) == 0, "none is turned away any more"
    refusals.take(counted(17 * S, 500))
    assert refusals.per_s("m", 17 * S) > 0
    assert refusals.per_s("m", 30 * S) == 0, "nothing is reported"
    refusals.take(counted(31 * S, 3, incarnation=2))
    assert refusals.per_s("m", 31 * S) == 0, "one that began anew counts anew"


def test_lines_of_batch_jobs_do_not_affect_interactive_targets_and_latencies():
    log, people = TrafficLog(), {"model": "m", "arrival_unix_ns": S, "output_tokens": 11}
    log.take(RequestEvent(ttft_deadline_unix_ns=5 * S, ttft_ns=200 * MS, decode_ns=100 * MS, **people), S)
    for _ in range(9):
        day = {"ttft_deadline_unix_ns": 86_400 * S, "tpot_target_us": 1_000_000, "service_class": BATCH_CLASS}
        log.take(RequestEvent(ttft_ns=9 * S, decode_ns=9 * S, **day, **people), S)
    found = log.traffic(2 * S)
    assert log.targets_ns("m") == (4 * S, 0)
    assert (found.ttft_p95_ms, found.tpot_p95_ms) == (200, 10)
    assert (found.requests_per_s, found.batch_lines_per_s) == (1.0, 0.9)


def steps(slow=1.0, count=10, batch=8, kv_tokens=4_000):
    took = round(MODEL.step_ns(StepWork(decode_sequences=batch, decode_kv_tokens=kv_tokens)) * slow)
    starts = np.arange(count, dtype=np.int64) * took
    counts = np.zeros((6, count))
    counts[3], counts[4] = batch, kv_tokens
    return FinishedSteps(starts, starts + took, np.zeros(count), counts), count * took


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_slowness_is_the_ratio_of_step_times_to_those_of_peers(slow):
    finished, end_ns = steps(slow)
    found = pace(finished, MODEL, end_ns)
    assert found.slowness == pytest.approx(slow, rel=1e-6)
    assert found.token_ns / found.tokens == pytest.approx(end_ns / 10)


def test_a_slowdown_of_all_workers_accuses_none_and_two_workers_are_no_peers():
    def slow(by):
        return StepPace(by, 0.0, 0.0)

    found = beside_peers({"a": slow(2.0), "b": slow(2.1), "c": slow(6.0), "d": slow(None)})
    assert found == {"a": pytest.approx(2.0 / 2.1), "b": 1.0, "c": pytest.approx(6.0 / 2.1), "d": None}
    assert beside_peers({"a": slow(1.0), "b": slow(3.0)}) == {"a": None, "b": None}


def test_steps_begun_before_a_workers_return_do_not_make_it_slow():
    finished, _ = steps()
    frozen_ns = 8_000 * MS  # it stood still in the seventh step, and three more followed
    ends_ns = finished.ends_ns + frozen_ns * (np.arange(10) >= 6)
    starts_ns = finished.starts_ns + frozen_ns * (np.arange(10) > 6)
    spanning = finished._replace(starts_ns=starts_ns, ends_ns=ends_ns)
    end_ns, returned_ns = int(ends_ns[-1]), int(ends_ns[6]) - 1
    assert pace(spanning, MODEL, end_ns).slowness > 10
    assert pace(spanning, MODEL, end_ns, returned_ns).slowness in (None, pytest.approx(1.0))
    assert pace(spanning, MODEL, end_ns, returned_ns).tokens == 24


def test_too_few_steps_give_no_slowness():
    finished, end_ns = steps(count=2)
    assert pace(finished, MODEL, end_ns).slowness is None
    assert pace(steps(count=0)[0], MODEL, 0).tokens == 0


def test_expected_step_times_come_from_the_model_of_each_step():
    works = [StepWork(512, 2, 700, 0, 0, 300_000), StepWork(0, 0, 0, 6, 3_000), StepWork(100, 1, 100, 3, 900, 10_000)]
    rows = [
        [w.prefill_tokens, w.prefill_sequences, w.prefill_context_tokens, w.decode_sequences, w.decode_kv_tokens,
         w.prefill_squared_tokens] for w in works
    ]  # fmt: skip
    assert expected_ns(MODEL, np.array(rows, float).T) == pytest.approx([MODEL.step_ns(each) for each in works])


def test_one_slow_worker_does_not_change_the_norm():
    ran = KindFit(steps=100)
    reported_models = [FittedModel(MODEL.scaled(by), ran, ran, ran) for by in (1.0, 1.02, 3.0)]
    assert usual_model(reported_models, 512) == MODEL.scaled(1.02)
    assert usual_model([], 512) is None


def test_few_steps_count_less_for_the_norm_than_many():
    many, few = KindFit(steps=200), KindFit(steps=3)
    reported_models = [FittedModel(MODEL, many, many, many), *[FittedModel(MODEL.scaled(0.25), few, few, few)] * 4]
    assert usual_model(reported_models, 512) == MODEL


def test_the_planners_mode_and_last_move_are_known_until_it_is_silent():
    news = PlannerNews()
    assert (news.status(S).heard, news.status(S).mode) == (False, None)
    news.knows_role("w", "decode")
    moved = Decision(planner_id="p", decided_unix_ns=S, action=ACTION_ROLE_MOVED, worker_id="w", actor="me")
    moved.assignment.role = 1
    news.take(moved, S)
    news.take(Decision(planner_id="p", decided_unix_ns=S, action=ACTION_KEEP, mode=MODE_ADVISORY, reason="keep"), S)
    found = news.status(2 * S)
    assert (found.heard, found.mode, found.acts, found.reason) == (True, "advisory", False, "keep")
    assert (found.last_move.from_role, found.last_move.to_role, found.last_move.age_ms) == ("decode", "prefill", 1_000)
    assert not news.status(S + STATUS_VALID_NS).heard


def test_faults_of_simulated_devices_follow_their_file(tmp_path):
    file, now = tmp_path / "faults.json", [0.0]
    faults = SimFaults(file, "d", clock_s=lambda: now[0])
    assert (faults.slow(), faults.link_gbps(100)) == (1.0, 100)
    for text, slow in ((json.dumps({"d": {"slow": 2.5}, "e": {"slow": 9}}), 2.5), ("no json", 1.0), ("[]", 1.0)):
        file.write_text(text)
        now[0] += 2 * LOOK_S
        assert faults.slow() == slow


def test_two_slow_steps_in_a_row_make_a_worker_slow_and_one_does_not():
    def of(*times, runs_ms=None):
        ends = [1_000 * MS + sum(times[: place + 1]) * MS for place in range(len(times))]
        starts = [end - took * MS for end, took in zip(ends, times, strict=True)]
        counts = np.array([[0], [0], [0], [1], [100], [0]], dtype=float).repeat(len(times), axis=1)
        steps = FinishedSteps(np.array(starts), np.array(ends), np.zeros(len(times)), counts)
        running = (
            None if runs_ms is None else RanStep(ends[-1], ends[-1] + runs_ms * MS, 0, counts_of_one, running=True)
        )
        return pace(steps, usual, ends[-1], running=running).slowness

    counts_of_one = StepCounts(decode_sequences=1, decode_kv_tokens=100)
    one = np.array([[0], [0], [0], [1], [100], [0]], dtype=float)
    usual = StepTimeModel(8e6, 6e4, 0.0, 200e6, 0.0, 0.0, interference=0.0)
    each = float(expected_ns(usual, one)[0]) / MS
    fast, slow = round(each), round(3 * each)
    assert of(fast, fast, fast, fast, slow, slow) == pytest.approx(3, rel=0.05)
    assert of(fast, fast, fast, fast, fast, slow) == pytest.approx(8 / 6, rel=0.05)
    assert of(fast, fast, fast, fast, slow, runs_ms=2 * fast) == pytest.approx(2, rel=0.05), "and it still runs"
    assert of(fast, fast, fast, fast, slow, runs_ms=fast // 2) == pytest.approx(7 / 5, rel=0.05)
    assert of(fast, fast, fast, fast, fast, runs_ms=9 * fast) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("length", [2_048, 8_192, 32_768])
def test_waiting_prompts_count_with_the_work_of_their_chunks(length):
    engine = WorkerProfile(MODEL, 512, 32, 100_000)
    batch = StepBatch(worker_id="w", max_sequences=32, chunk_tokens=512)
    batch.assignment.role = 1
    waiting = ModelBacklog(prefill_requests=3, prefill_tokens=3 * length, hopeful_tokens=3 * length)
    demand = SeenDemand(waiting, 0.0, 0.0, 0.0, ttft_limit_ns=4 * S, tpot_ns=100 * MS)
    found = observe("m", engine, [ObservedStatus(batch, None, 0, 0, 0, 0)], 0, demand)
    assert isinstance(found, ModelState)
    chunks = [chunks_work([(start, start + 512)]) for start in range(0, length, 512)]
    assert found.work.waiting_ns == pytest.approx(3 * sum(MODEL.prefill_ns(each) for each in chunks))


def test_the_prefill_speed_is_measured_on_prefill_workers_by_the_fill_of_their_steps():
    engine = WorkerProfile(MODEL, 512, 32, 100_000)
    waiting = ModelBacklog(prefill_requests=30, prefill_tokens=3_000, hopeful_tokens=3_000)
    demand = SeenDemand(waiting, 0.0, 0.0, 0.0, ttft_limit_ns=4 * S, tpot_ns=100 * MS)
    full = engine.speed_at(100.0) * 2 * S

    def share(*workers):
        seen = []
        for role, tokens, slowness in workers:
            batch = StepBatch(worker_id="w", max_sequences=32, chunk_tokens=512)
            batch.assignment.role = role
            seen.append(ObservedStatus(batch, slowness, 0, 0, 0, 0, prompt_tokens=tokens, prompt_ns=2.0 * S))
        return observe("m", engine, seen, 0, demand).prompt_yield

    assert share((1, 0.9 * full, None), (1, 0.9 * full, 1.0), (2, 0.1 * full, 1.0)) == pytest.approx(0.9)
    assert share((1, 0.9 * full, 1.0), (1, 0.3 * full, 3.0)) == pytest.approx(0.9)


def test_a_pace_counts_only_prompts_of_steps_without_decodes():
    counts = np.array([[400, 300], [2, 1], [0, 0], [0, 4], [0, 400], [0, 0]], dtype=float)
    steps = FinishedSteps(np.array([0, 500 * MS]), np.array([500 * MS, S]), np.array([1.0, 0.5]), counts)
    found = pace(steps, MODEL, S)
    assert (found.prompt_tokens, found.prompt_ns) == (400.0, 500.0 * MS)


def test_a_few_long_prompts_among_short_ones_count_with_their_own_length():
    log = TrafficLog()
    for length in [100] * 9 + [10_000]:
        log.take(RequestEvent(model="m", outcome=OUTCOME_OK, prompt_tokens=length, output_tokens=2, ttft_ns=MS), S)
    assert log.prompt_lengths("m", S)[1] == pytest.approx((9 * 100**2 + 10_000**2) * 10 / (9 * 100 + 10_000) ** 2)
    assert log.prompt_lengths("other", S) == (0, 1)
