"""Tests of llm-d as a rival: capacity, demand and the picker's scores, worked out by hand."""

import pytest

from libs.lab.rivals.llm_d import Balance, DecodeRate, Recent, ReplicaSaturation, RequestShape, llm_d, wanted_change
from libs.lab.rivals.port import RivalMover
from libs.policy.roles import Role
from tests.rival_rig import MS, SECOND, cluster, mixed, prefill, request, seen

SHAPE = RequestShape(1000, 200)
"""A request holds 1,000 + 100 tokens on average."""


def mover() -> RivalMover:
    built = llm_d().mover(cluster())
    assert built is not None
    return built


def test_a_role_needs_replicas_above_85_percent_and_can_spare_them_below_70() -> None:
    # 8,500 / 0.85 = 10,000 of 8 x 1,000: two more; one that starts counts.
    assert Balance(1000, 8, 0, 8500).missing == 2
    assert Balance(1000, 8, 1, 8500).missing == 1
    # 3,500 / 0.70 = 5,000: three of 8 are spare; of 6,000 / 0.70 = 8,571 none.
    assert Balance(1000, 8, 0, 3500).spare == 3
    assert Balance(1000, 8, 0, 6000).spare == 0
    # Between both nothing is wanted: 6,500 / 0.85 = 7,647 and 6,500 / 0.70 = 9,286.
    assert wanted_change([Balance(1000, 8, 0, 6500)]) == 0


def test_one_analysis_suffices_to_add_a_replica_and_all_are_needed_to_remove_one() -> None:
    short, idle, busy = Balance(1000, 8, 0, 8500), Balance(1000, 8, 0, 3500), Balance(1000, 8, 0, 5000)
    assert wanted_change([idle, short]) == 2
    # 5,000 / 0.70 = 7,143: no whole replica.
    assert wanted_change([idle, busy]) == 0
    assert wanted_change([idle, idle]) == -3


def test_capacity_is_80_percent_of_the_cache_or_the_content_of_full_steps() -> None:
    # Full steps: min(8,000 x 200 / 1,200, 64) = 64 sequences of 1,100 tokens, 70,400, below 80 % of 100,000.
    assert ReplicaSaturation().balance([mixed(0, kv_tokens=500)], 0, SHAPE) == Balance(70_400, 1, 0, 500)
    # With outputs of 2,000: 64 x 2,000 = 128,000, so the cache bounds it.
    assert ReplicaSaturation().balance([mixed(0)], 0, RequestShape(1000, 2000)).per_replica == 80_000


def test_the_content_of_a_replica_when_it_began_to_queue_bounds_it_from_then_on() -> None:
    role = ReplicaSaturation()
    # Five wait: 30,000 tokens are all it can, and 5 x 1,000 more are asked for.
    assert role.balance([mixed(0, kv_tokens=30_000, queued_decodes=5)], 0, SHAPE) == Balance(30_000, 1, 0, 35_000)
    assert role.balance([mixed(0, kv_tokens=40_000, queued_decodes=5)], 0, SHAPE).per_replica == 40_000
    # Later, without a queue: the mean of both.
    assert role.balance([mixed(0)], 0, SHAPE).per_replica == 35_000


def test_the_decode_rate_is_80_percent_of_the_cache_over_its_itl() -> None:
    rate = DecodeRate()
    # One replica at use 0.4 with 26 ms: A = (26 - 6) / 0.4 = 50 ms, so ITL(0.8) = 46 ms. 80,000 / 1,100 = 72.7
    # requests: 1,581 tokens a second. 4 requests a second with 200 tokens ask for 800.
    pool = [mixed(0, decodes=20, kv_tokens=40_000, decode_step_ns=26 * MS)]
    found = rate.balance(pool, 0, SHAPE, 4.0, 0)
    assert found is not None
    assert found.per_replica == pytest.approx(80_000 / 1100 / 0.046)
    assert found.demand == 800


def test_an_itl_line_is_fitted_once_there_are_enough_samples_over_a_wide_range() -> None:
    rate = DecodeRate()
    # Ten points on 20 ms + 40 ms x use, from 0.2 to 0.65: at 0.8 it is 52 ms.
    found = None
    for index in range(10):
        use = 0.2 + 0.05 * index
        step_ns = 20 * MS + 40 * MS * use
        pool = [mixed(0, decodes=1, kv_tokens=round(use * 100_000), decode_step_ns=step_ns)]
        found = rate.balance(pool, 0, SHAPE, 1.0, index * SECOND)
    assert found is not None
    assert found.per_replica == pytest.approx(80_000 / 1100 / 0.052)


def test_there_is_no_decode_rate_before_anything_decodes() -> None:
    assert DecodeRate().balance([mixed(0)], 0, SHAPE, 1.0, 0) is None


def test_a_replica_moves_to_the_role_that_needs_it_if_the_other_can_spare_it() -> None:
    # Prefill: capacity min(80,000, 70,400); 80,000 + 9 x 1,000 held and queued on each of 2: it queues, so 80,000 is
    # what it can; 178,000 / 0.85 = 209,412 of 160,000: one more. Decode: idle, all 4 spare; the rate has no model.
    full = {"prompts": 10, "kv_tokens": 80_000}
    workers = [prefill(0, **full), prefill(1, **full), mixed(2), mixed(3), mixed(4), mixed(5)]
    moves = mover().moves(seen(workers, mean_input_tokens=1000.0, mean_output_tokens=200.0))
    assert [(move.index, move.role) for move in moves] == [(5, Role.PREFILL)]


def test_nothing_moves_when_both_roles_are_full_or_both_idle() -> None:
    full = {"prompts": 10, "kv_tokens": 80_000}
    lengths = {"mean_input_tokens": 1000.0, "mean_output_tokens": 200.0}
    loaded = mixed(2, decodes=40, queued_decodes=9, kv_tokens=80_000)
    assert not mover().moves(seen([prefill(0, **full), prefill(1, **full), loaded], **lengths))
    assert not mover().moves(seen([prefill(0), prefill(1), mixed(2), mixed(3)], **lengths))


def test_the_picker_weighs_cached_prefix_queue_and_free_kv() -> None:
    router = llm_d().router(cluster(4))
    # Worker 0: 0 x 3 + queue 1 x 2 + (1 - 0) x 2 = 4. Worker 1: 3 x 0.8 + 0 + (1 - 0.1) x 2 = 4.2: its queue of 3 is
    # the longest. With half cached: 1.5 + 1.8 = 3.3.
    workers = [prefill(0), prefill(1, prompts=4, kv_tokens=10_000)]
    assert router.prompt(request(1000, cached={1: 800}), workers, 0) == 1
    assert router.prompt(request(1000, cached={1: 500}), workers, 0) == 0
    # Equal queues: 2 + 2 x 0.5 = 3 against 2 + 2 x 0.6 = 3.2.
    decoders = [mixed(2, decodes=5, kv_tokens=50_000), mixed(3, decodes=9, kv_tokens=40_000)]
    assert router.decode(request(1000), 0, decoders, 0) == 3


def test_a_move_restarts_the_pod() -> None:
    assert llm_d(start_s=120).move_cost.start_ns == 120 * SECOND
    assert llm_d().move_cost.restarts


def test_decode_rates_count_only_if_a_deployment_enables_them() -> None:
    # One sequence at use 0.01 with 16 ms beside a base of 6 ms: ITL(0.8) = 6 + 800 ms, so 80,000 / 1,100 / 0.806 = 90
    # tokens a second, of which 4 x 200 a second are asked: decode misses what it does not miss by saturation.
    decoders = [mixed(2, decodes=1, kv_tokens=1000, decode_step_ns=16 * MS), mixed(3)]
    look = seen([prefill(0), prefill(1), *decoders], arrived=60, mean_input_tokens=1000.0, mean_output_tokens=200.0)
    shipped, requested = llm_d().mover(cluster()), llm_d(throughput=True).mover(cluster())
    assert shipped is not None and requested is not None
    assert not shipped.moves(look)
    assert [(move.index, move.role) for move in requested.moves(look)] == [(1, Role.MIXED)]


def test_lengths_are_averaged_over_five_minutes_and_arrivals_over_one() -> None:
    recent = Recent()
    for place in range(21):
        recent.look(seen([], arrived=place, mean_input_tokens=100.0 * place, ended=1, mean_output_tokens=10.0 * place))
    # The first of 21 looks is out: Σ 100·n² / Σ n for n = 1..20 is 100 · 41 / 3, the mean of 10..200 is 105.
    assert recent.shape() == RequestShape(pytest.approx(4100 / 3), pytest.approx(105.0))
    assert recent.rate_rps(15 * SECOND) == pytest.approx((17 + 18 + 19 + 20) / 60)


def test_a_replicas_content_is_its_maximum_within_a_minute_until_the_pod_is_replaced() -> None:
    recent = Recent()
    for kv_tokens in (9000, 7000, 5000, 3000):
        recent.look(seen([mixed(0, kv_tokens=kv_tokens)]))
    assert recent.at_peak([mixed(0, kv_tokens=3000)])[0].kv_tokens == 9000
    recent.look(seen([mixed(0, kv_tokens=1000)]))
    assert recent.at_peak([mixed(0, kv_tokens=1000)])[0].kv_tokens == 7000
    recent.look(seen([mixed(0, kv_tokens=0, ready=False)]))
    recent.look(seen([mixed(0, kv_tokens=2000)]))
    assert recent.at_peak([mixed(0, kv_tokens=2000)])[0].kv_tokens == 2000
