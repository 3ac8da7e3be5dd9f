"""Properties of capacity plans over sample paths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.alerts.rules import PoolAhead, capacity_conditions
from libs.policy.capacity import (
    MOST_WORKERS,
    PHASES,
    CapacityPlan,
    PoolTable,
    first_shortages,
    make_plan,
    make_table,
    most_supported,
    quantile_at,
    runs_short,
    sample_paths,
    wished_workers,
)
from libs.policy.verdict.state import Grade

TABLE = make_table([(1, 0.5), (2, 1.3), (4, 3.0)])
rates = st.floats(0, 1e6)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 64)), min_size=1, max_size=6), st.floats(0, 1e4))
def test_the_fewest_workers_suffice_and_one_less_does_not(measured: list[tuple[int, float]], work: float) -> None:
    table = make_table(list(dict(measured).items()))
    found = table.workers_for(work)
    if found < MOST_WORKERS:
        assert table.most_work(found) >= work
        assert found == 0 or table.most_work(found - 1) < work


def test_a_table_interpolates_measured_sizes_and_continues_at_the_last_rate() -> None:
    assert [TABLE.most_work(n) for n in (1, 2, 3, 4, 8)] == [0.5, 1.3, 2.15, 3.0, 6.0]
    assert PoolTable((1,), (0.0,)).workers_for(0.1) == MOST_WORKERS


@given(st.lists(rates, min_size=7, max_size=7), st.lists(st.floats(-6, 6), min_size=1, max_size=20))
def test_drawn_rates_rise_with_the_deviate_and_the_median_is_the_median(quantiles: list[float], z: list[float]) -> None:
    levels = np.sort(np.array(quantiles))
    found = quantile_at(levels, np.sort(np.array(z)))
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (np.diff(found) >= -1e-9 * (1 + found[:-1])).all()
    assert np.isclose(quantile_at(levels, np.zeros(1))[0], levels[3], atol=1e-6 * (1 + levels[-1]))


@given(st.floats(0, 0.98), st.floats(0, 1), st.integers(0, 2**31))
def test_paths_have_the_quantiles_of_the_forecast_at_every_horizon(hang: float, together: float, seed: int) -> None:
    levels = np.array([50.0, 60, 80, 100, 125, 170, 200])
    quantiles = np.broadcast_to(levels, (2, 5, 7))
    paths = sample_paths(quantiles, np.random.default_rng(seed).standard_normal((4000, 3, 5)), hang, together)
    shares = [(paths <= level).mean(axis=0) for level in levels]
    for share, wanted in zip(shares, (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95), strict=True):
        assert np.abs(share - wanted).max() < 0.06


work = st.lists(st.lists(st.floats(0, 50), min_size=3, max_size=3), min_size=1, max_size=30)


@given(work, st.floats(0.5, 0.99), st.integers(0, 3))
def test_more_confidence_more_work_and_more_spare_workers_never_need_fewer_workers(
    found: list[list[float]], confidence: float, spare: int
) -> None:
    paths = np.array(found)

    def most(factor: float, sure: float, more: int) -> list[int]:
        works = dict.fromkeys(PHASES, paths * factor)
        plan = make_plan(works, dict.fromkeys(PHASES, TABLE), starts_s=(0, 1, 2), step_s=1, confidence=sure, spare=more)
        return [each.planned for each in plan.pools["decode"]]

    low = most(1.0, confidence, spare)
    assert all(a <= b for a, b in zip(low, most(1.3, confidence, spare), strict=True))
    assert all(a <= b for a, b in zip(low, most(1.0, min(confidence + 0.1, 0.999), spare), strict=True))
    assert [each + 2 for each in low] == most(1.0, confidence, spare + 2)


stretches = st.lists(st.one_of(st.floats(0, 1e6), st.just(float("nan"))), max_size=80)


@given(stretches, st.integers(0, 40), st.floats(1, 10))
def test_history_supports_its_busiest_stretch_times_the_allowance_and_no_more(
    values: list[float], later: int, growth: float
) -> None:
    past = np.array(values)
    most = most_supported(past, len(past) + later, 60, step_s=3600.0, growth=growth)
    busiest = np.nanmax(past, initial=0.0)
    assert most.shape == (60,)
    assert (np.isinf(most) if busiest == 0 else (most > 0) & (most <= growth * busiest)).all()
    assert np.array_equal(most[:36], most[24:])


# Denormal numbers lose bits when they are halved.
normal = st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e6), st.just(float("nan"))), max_size=80)


@given(normal, st.integers(-20, 20), st.floats(1, 10))
def test_what_history_supports_scales_with_it(values: list[float], doublings: int, growth: float) -> None:
    past, factor = np.array(values), 2.0**doublings
    once, scaled = (most_supported(each, 7, 40, step_s=3600.0, growth=growth) for each in (past, factor * past))
    assert np.array_equal(scaled, factor * once)


def test_nights_are_not_supported_by_noon() -> None:
    past = np.tile(np.where(np.arange(24) // 6 == 2, 100.0, 10.0), 2)  # busy from noon to six
    most = most_supported(past, 48, 24, step_s=3600.0, growth=2.0)
    assert most[:9].tolist() == [20.0] * 9
    assert most[9:21].tolist() == [200.0] * 12
    assert most[21:].tolist() == [20.0] * 3


def test_all_stretches_count_in_under_a_day_and_at_times_without_demand() -> None:
    assert most_supported(np.array([1.0, 5.0]), 2, 3, step_s=3600.0, growth=2.0).tolist() == [10.0] * 3
    past = np.zeros(48)
    past[12] = 5.0
    assert most_supported(past, 48, 24, step_s=3600.0, growth=2.0).tolist() == [10.0] * 24


def day_plan(there: int) -> CapacityPlan:
    hours = np.array([1.0, 1, 1, 8, 8, 1])
    paths = np.repeat(hours[None], 10, axis=0)
    paths[0] = 1.0  # one path of ten has no peak
    works = dict.fromkeys(PHASES, paths)
    return make_plan(
        works, dict.fromkeys(PHASES, TABLE), starts_s=[3600.0 * h for h in range(6)], step_s=3600, confidence=0.9,
        there=dict.fromkeys(PHASES, there),
    )  # fmt: skip


def test_a_shortage_is_reported_for_the_first_hour_in_which_four_of_five_paths_agree() -> None:
    plan = day_plan(9)
    shortages = first_shortages(plan)
    assert [(each.phase, each.at_s, each.workers, each.sure) for each in shortages] == [
        ("prefill", 10_800.0, 2, 0.9),
        ("decode", 10_800.0, 2, 0.9),
    ]
    assert runs_short(plan, "decode", "p50") == 10_800.0
    assert first_shortages(day_plan(11)) == []


def test_workers_are_requested_one_start_time_ahead_and_none_is_released_that_is_needed_again_soon() -> None:
    plan = day_plan(2)
    assert wished_workers(plan, 0.0, 600.0)["decode"] == 2
    assert wished_workers(plan, 7500.0, 600.0)["decode"] == 11
    assert wished_workers(plan, 18_000.0, 600.0)["decode"] == 2
    assert wished_workers(plan, 90_000.0, 600.0) == {}


def test_an_alert_names_phase_gpus_time_and_certainty_and_stays_while_half_of_the_paths_are_short() -> None:
    short = PoolAhead("m", "decode", 3, 0.0, 0.8, 0.8, 240.0)
    fires, holds, clears = capacity_conditions(
        [short, PoolAhead("m", "decode", 0, 0.0, 0.0, 0.6, 0.0), PoolAhead("m", "decode", 0, 0.0, 0.0, 0.1, 0.0)],
        ["14:00 on Tue", "", ""],
    )
    assert (fires.grade, holds.grade, clears.grade) == (Grade.FIRE, Grade.HOLD, Grade.CLEAR)
    assert fires.reason == "decode short by 3 GPUs at 14:00 on Tue, 80% sure; workers need 4 min to start"
