"""Tests of Dynamo as a rival: regressions, predictors, both loops and the router, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.lab.rivals.dynamo import LOAD_NS, Loops, dynamo
from libs.lab.rivals.dynamo_performance import (
    DecodeModel,
    EngineLimits,
    EngineState,
    Pass,
    PrefillModel,
    StepRegression,
    batch_sizes,
)
from libs.lab.rivals.dynamo_planner import DynamoPlanner, ReplicaCounts, ServiceTargets
from libs.lab.rivals.dynamo_predictors import Constant, Kalman, TrafficForecast
from libs.lab.rivals.port import RivalMover, SeenWorker
from libs.policy.roles import Role
from libs.policy.step_time import StepWork
from tests.rival_rig import MS, SECOND, cluster, mixed, prefill, request, seen

LIMITS = EngineLimits(chunk_tokens=8000, max_sequences=64, kv_tokens=100_000)
TARGETS = ServiceTargets(ttft_s=1.0, itl_s=0.05)
NAN = float("nan")


def prefill_pass(tokens: int, sequences: int = 1) -> Pass:
    """10 ms and 0.1 ms a token."""
    return Pass(0.01 + tokens * 1e-4, prefill_sequences=sequences, prefill_tokens=tokens)


def decode_pass(sequences: int, kv_tokens: int) -> Pass:
    """10 ms, 1 ms a sequence and 1 µs a token."""
    return Pass(0.01 + sequences * 1e-3 + kv_tokens * 1e-6, decode_sequences=sequences, decode_kv_tokens=kv_tokens)


PREFILL_PASSES = [prefill_pass(tokens) for tokens in (1000, 1500, 2000, 2500, 3000)]
"""2,000 tokens a prompt."""
DECODE_PASSES = [decode_pass(*step) for step in ((5, 5000), (10, 5000), (10, 20_000), (20, 20_000), (5, 20_000))]
"""Tokens a sequence: 1,000, 500, 2,000, 1,000, 4,000: 1,700 on average."""


def prefill_model() -> PrefillModel:
    model = PrefillModel(LIMITS)
    for step in PREFILL_PASSES:
        model.observe(step)
    return model


def decode_model() -> DecodeModel:
    model = DecodeModel(LIMITS)
    for step in DECODE_PASSES:
        model.observe(step)
    return model


def test_ttft_is_the_time_of_queued_tokens_and_a_mean_prompt_in_chunks() -> None:
    # 9,000 queued + 2,000 = 11,000 tokens: a chunk of 8,000 at 810 ms and one of 3,000 at 310 ms.
    assert prefill_model().ttft_s(EngineState(Pass(), 9000)) == pytest.approx(1.12)
    assert prefill_model().ttft_s(EngineState(Pass(), 9000), 0.0) == pytest.approx(0.21)


def test_steps_without_prompts_lower_the_mean_prompt_but_not_the_fit() -> None:
    model = prefill_model()
    for _ in range(5):
        model.observe(Pass())
    # 2,000 over 5 looks of 10.
    assert model.ttft_s(EngineState(Pass())) == pytest.approx(0.01 + 0.1)


def test_prefill_capacity_is_the_best_batch_within_ttft() -> None:
    # b prompts of 1,000 tokens take 10 + 100·b ms: the rate rises with b, up to the 8 that fit a chunk.
    assert prefill_model().capacity_rps(1000, 1.0) == pytest.approx(8 / 0.81)
    # Within 500 ms there are 4 (410 ms).
    assert prefill_model().capacity_rps(1000, 0.5) == pytest.approx(4 / 0.41)
    # A prompt of 16,000 tokens takes two chunks, 1.62 s: over any target, so the rate is what can be had.
    assert prefill_model().capacity_rps(16_000, 1.0) == pytest.approx(1 / 1.62)


def test_itl_is_the_time_of_a_step_with_one_more_mean_sequence() -> None:
    # 9 + 1 sequences and 8,300 + 1,700 tokens: 10 + 10 + 10 ms.
    engine = EngineState(Pass(), decode_sequences=9, decode_kv_tokens=8300)
    assert decode_model().itl_s(engine) == pytest.approx(0.03)
    # Twice as many: 18 + 1 and 16,600 + 1,700: 10 + 19 + 18.3 ms.
    assert decode_model().itl_s(engine, 2.0) == pytest.approx(0.0473)


def test_decode_capacity_is_the_best_batch_within_itl() -> None:
    # Each sequence holds 900 + 200/2 = 1,000 tokens and so costs 2 ms: 20 of them take 50 ms, the target.
    assert decode_model().capacity_rps(900, 200, 0.0501) == pytest.approx(20 / (200 * 0.05))
    # One takes 12 ms: over a target of 11, so the rate is the best without it, that of all 64 places (138 ms).
    assert decode_model().capacity_rps(900, 200, 0.011) == pytest.approx(64 / (200 * 0.138))
    # Not even one fits into 100,000 tokens of KV.
    assert decode_model().capacity_rps(100_000, 200, 0.05) is None


def test_a_fit_with_a_negative_slope_gives_no_prediction_unless_that_slope_may_be_clamped() -> None:
    falling = StepRegression(1)
    clamped = StepRegression(1, clamped=frozenset({0}))
    for tokens in range(5):
        falling.add((float(tokens),), 1.0 - tokens / 10)
        clamped.add((float(tokens),), 1.0 - tokens / 10)
    assert falling.predict_s(2.0) is None
    # The intercept stays where the line had it, at 1 s; only the slope is gone.
    assert clamped.predict_s(2.0) == pytest.approx(1.0)


def test_fewer_than_five_steps_give_no_prediction() -> None:
    model = PrefillModel(LIMITS)
    for step in PREFILL_PASSES[:4]:
        model.observe(step)
    assert not model.ready
    assert model.ttft_s(EngineState(Pass())) is None


def test_a_rare_operating_point_outlives_many_steps_at_another() -> None:
    steps = StepRegression(1)
    steps.add((0.0,), 0.01)
    for _ in range(500):
        steps.add((1000.0,), 0.11)
    assert steps.predict_s(0.0) == pytest.approx(0.01)
    assert steps.predict_s(500.0) == pytest.approx(0.06)


@given(st.integers(0, 5000))
def test_batches_to_try_are_few_and_range_from_one_to_the_maximum(most: int) -> None:
    sizes = batch_sizes(most)
    assert len(sizes) == min(most, 128)
    assert sizes == sorted(set(sizes))
    if most:
        assert (sizes[0], sizes[-1]) == (1, most)


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=30), st.booleans())
def test_the_filter_is_kalmans_with_a_level_and_a_trend(values: list[float], requested: bool) -> None:
    values[0] += 1.0
    ours = Kalman()
    state, spread = np.zeros((2, 1)), np.eye(2) * 1000
    moves, sees, drift = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]]), np.diag([1.0, 0.1])
    for index, value in enumerate(values):
        ours.add(value)
        if index == 0:
            state[0, 0] = value
        else:
            state, spread = moves @ state, moves @ spread @ moves.T + drift
            gain = spread @ sees.T / (sees @ spread @ sees.T + 10)
            state, spread = state + gain * (value - sees @ state), (np.eye(2) - gain @ sees) @ spread
        if requested:
            ours.next()
    expected = max((moves @ state)[0, 0], 0.0) if len(values) >= 5 else values[-1]
    assert ours.next() == pytest.approx(expected, rel=1e-6, abs=1e-4)
    assert ours.next() == ours.next()


def test_an_idle_interval_repeats_the_lengths_of_the_previous_one() -> None:
    forecast = TrafficForecast("constant")
    forecast.add(100, 2000, 300)
    forecast.add(0, NAN, NAN)
    assert forecast.next() == (0, 2000, 300)
    assert Constant().next() == 0


def planner(predictor: str = "constant") -> DynamoPlanner:
    built = DynamoPlanner(LIMITS, TARGETS, "kalman" if predictor == "kalman" else "constant")
    built.observe(PREFILL_PASSES, DECODE_PASSES)
    return built


def prefill_engine(queued_tokens: int) -> EngineState:
    return EngineState(Pass(), queued_tokens)


def decode_engine(sequences: int, kv_tokens: int) -> EngineState:
    return EngineState(Pass(), decode_sequences=sequences, decode_kv_tokens=kv_tokens)


OVERLOADED_PREFILL = prefill_engine(9000)
"""1.12 s, see above."""
IDLE_DECODE = decode_engine(5, 5000)
"""10 + 6 + 6.7 = 22.7 ms; with 8/7 as much 10 + 7 (6.7 rounded up) + 7.4 = 24.4 ms, below 0.8 x 50 = 40."""


def test_the_load_loop_moves_a_replica_if_one_pool_is_over_its_target_and_the_other_can_spare_one() -> None:
    assert planner().load([OVERLOADED_PREFILL] * 8, [IDLE_DECODE] * 8) == ReplicaCounts(9, 7)


def test_the_load_loop_holds_while_one_engine_is_within_its_target() -> None:
    # 7,000 + 2,000 tokens: 810 + 110 = 920 ms.
    assert planner().load([OVERLOADED_PREFILL] * 7 + [prefill_engine(7000)], [IDLE_DECODE] * 8) == ReplicaCounts(8, 8)


def test_the_load_loop_holds_when_the_other_pool_cannot_spare_a_replica() -> None:
    # 10 + 15 + 15 = 40 ms now with the next one; with 8/7 as much 16 + 1 sequences and 15,200 + 1,700 tokens: 43.9 ms.
    busy = decode_engine(14, 13_300)
    assert planner().load([OVERLOADED_PREFILL] * 8, [busy] * 8) == ReplicaCounts(8, 8)


def test_the_load_loop_holds_when_one_replica_less_leaves_too_little_kv() -> None:
    # 10 + 6 + 9.7 = 25.7 ms now, 10 + 7 + 10.9 = 27.9 ms with 8/7 as much, but that is 9,142 tokens of 9,000.
    decides = DynamoPlanner(EngineLimits(8000, 64, 9000), TARGETS, "constant")
    decides.observe(PREFILL_PASSES, DECODE_PASSES)
    assert decides.load([OVERLOADED_PREFILL] * 8, [decode_engine(5, 8000)] * 8) == ReplicaCounts(8, 8)
    assert decides.load([OVERLOADED_PREFILL] * 8, [decode_engine(5, 7000)] * 8) == ReplicaCounts(9, 7)


def test_the_load_loop_gives_an_idle_prefill_replica_to_an_overloaded_decode_pool() -> None:
    # 10 + 25 + 25.7 = 60.7 ms each. Prefill: nothing queued, so nothing to take over.
    over = decode_engine(24, 24_000)
    assert planner().load([prefill_engine(0)] * 8, [over] * 8) == ReplicaCounts(7, 9)


def test_a_queue_may_use_four_fifths_of_the_ttft_left_by_the_next_prompt() -> None:
    # The next prompt alone takes 210 ms, which leaves 790 x 0.8 = 632 ms. One of 2 engines gets twice the queue:
    # 6,000 + 2,000 tokens are one chunk, 810 ms, 600 more; 6,600 + 2,000 are a chunk and 600 tokens, 880 ms, 670 more.
    over = decode_engine(24, 24_000)
    assert planner().load([prefill_engine(3000)] * 2, [over] * 2) == ReplicaCounts(1, 3)
    assert planner().load([prefill_engine(3300)] * 2, [over] * 2) == ReplicaCounts(2, 2)


def test_the_last_replica_of_a_pool_never_moves() -> None:
    assert planner().load([prefill_engine(0)], [decode_engine(24, 24_000)] * 3) == ReplicaCounts(1, 3)


def test_the_minimum_of_the_throughput_loop_limits_the_load_loop() -> None:
    decides = planner()
    decides.set_floor(ReplicaCounts(6, 8))
    assert decides.load([OVERLOADED_PREFILL] * 8, [IDLE_DECODE] * 8) == ReplicaCounts(8, 8)


def test_the_throughput_loop_sizes_both_pools_by_capacity_at_the_target() -> None:
    # 8,000 requests of 900 tokens and 200 in 100 s are 80 a second. Prefill: 8 prompts of 900 a batch take 730 ms,
    # 10.96 a second: 7.3, so 8 replicas. Decode: 20 sequences of 1,000 tokens in 50 ms are 2 a second: 40 replicas,
    # capped to 8 more than the 8 there are. That is 24 of 16, and prefill gives none.
    targets = ServiceTargets(1.0, 0.0501)
    decides = DynamoPlanner(LIMITS, targets, "constant")
    decides.observe(PREFILL_PASSES, DECODE_PASSES)
    traffic = {"requests": 8000.0, "input_tokens": 900.0, "output_tokens": 200.0, "interval_s": 100.0}
    assert decides.throughput(ReplicaCounts(8, 8), **traffic) == ReplicaCounts(8, 8)
    # From 12 prefill replicas 4 can go to decode.
    assert decides.throughput(ReplicaCounts(12, 4), **traffic) == ReplicaCounts(8, 8)
    # A tenth of the requests: 8 a second need 1 prefill (0.73) and 4 decode replicas; what there is suffices.
    assert decides.throughput(ReplicaCounts(8, 8), **traffic | {"requests": 800.0}) == ReplicaCounts(1, 4)


def test_the_throughput_loop_changes_nothing_while_lengths_are_unknown() -> None:
    unknown = {"requests": 800.0, "input_tokens": NAN, "output_tokens": NAN, "interval_s": 100.0}
    assert planner().throughput(ReplicaCounts(5, 11), **unknown) == ReplicaCounts(5, 11)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 30), st.integers(1, 30))
def test_a_pinned_budget_moves_only_replicas_that_both_pools_agree_on(p: int, d: int, wish_p: int, wish_d: int) -> None:
    current = ReplicaCounts(p, d)
    pinned = current.pinned(ReplicaCounts(wish_p, wish_d))
    assert pinned.prefill + pinned.decode == p + d
    assert min(p, wish_p) <= pinned.prefill <= max(p, wish_p)
    assert min(d, wish_d) <= pinned.decode <= max(d, wish_d)


def mover(loops: Loops = "load") -> RivalMover:
    built = dynamo(loops).mover(cluster(4))
    assert built is not None
    return built


def stepped_prefill(index: int, queued_tokens: int, **fields: bool) -> SeenWorker:
    """A worker whose last step computed 4,000 tokens of one prompt in 400 ms."""
    work = StepWork(prefill_tokens=4000, prefill_sequences=1)
    return prefill(index, prompt_tokens=queued_tokens, prompts=3, steps=[(work, 400 * MS)], **fields)


def test_the_highest_decode_worker_moves_to_an_overloaded_prefill_pool() -> None:
    workers = [stepped_prefill(0, 20_000), stepped_prefill(1, 20_000), mixed(2), mixed(3)]
    moves = mover().moves(seen(workers))
    assert [(move.index, move.role) for move in moves] == [(3, Role.PREFILL)]


def test_nothing_moves_while_a_worker_starts() -> None:
    workers = [stepped_prefill(0, 20_000), mixed(1), mixed(2), mixed(3, ready=False)]
    assert not mover().moves(seen(workers))


def test_the_throughput_loop_decides_every_180_s() -> None:
    decides = mover("throughput")
    # 36 looks of 5 s with 900 requests each: 180 a second of 1,000 tokens and 10. Prefill: 8 a batch of 800 ms, 10 a
    # second; decode: 64 in 10 + 64 + 64.3 ms; within 50 ms 19 (10 + 19 + 19.1), 39 a second. 18 and 5 replicas: more
    # than there are, and no side to give any.
    busy = {"arrived": 900, "mean_input_tokens": 1000.0, "ended": 900, "mean_output_tokens": 10.0}
    workers = [prefill(0), mixed(1), mixed(2), mixed(3)]
    for look in range(35):
        assert not decides.moves(seen(workers, look * LOAD_NS, **busy))
    assert not decides.moves(seen(workers, 35 * LOAD_NS, **busy))
    # 20 requests a second with one token each: 2 prefill replicas, 1 for decode: one moves.
    light = {"arrived": 100, "mean_input_tokens": 1000.0, "ended": 100, "mean_output_tokens": 1.0}
    counts = [len(decides.moves(seen(workers, look * LOAD_NS, **light))) for look in range(36)]
    assert counts == [0] * 35 + [1]


def test_a_move_restarts_the_worker_for_the_time_in_the_rivals_name() -> None:
    assert dynamo("load").move_cost.start_ns == 30 * SECOND
    assert dynamo("load").move_cost.restarts
    assert dynamo("both", 3, 1, 120).move_cost.start_ns == 120 * SECOND


def test_the_router_sends_a_prompt_where_the_fewest_blocks_are_left_to_compute() -> None:
    router = dynamo("load").router(cluster(4))
    # Blocks of 100 tokens; a prompt of 1,000. Worker 0: (2,000 + 1,000) / 100 = 30; worker 1: (2,500 + 1,000) / 100
    # = 35, less 8 in its cache: 27.
    workers = [prefill(0, prompt_tokens=2000), prefill(1, prompt_tokens=2500), mixed(2)]
    assert router.prompt(request(1000), workers, 0) == 0
    assert router.prompt(request(1000, cached={1: 850}), workers, 0) == 1


def test_the_router_sends_a_decode_where_the_fewest_blocks_are_held() -> None:
    router = dynamo("load").router(cluster(4))
    workers = [prefill(0), mixed(1, decodes=2, kv_tokens=9000), mixed(2, decodes=20, kv_tokens=8000)]
    assert router.decode(request(), 0, workers, 0) == 2
