"""The bench that weighs planners by GPU-hours: what its minutes count, on demand that is made up."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from load.forecast.bench_forecast_worth import clairvoyant, forecast, outcome, reactive
from load.forecast.worth import MOST_WORKERS, START_MIN, DynamoPlanner, MinuteRule, World

ALL = slice(0, None)


def world_of(work: Any, ahead: Any = None) -> World:
    """Both phases alike; a worker takes one worker's work."""
    values = np.asarray(work, np.float64)
    known = values if ahead is None else np.asarray(ahead, np.float64)
    most = np.arange(1.0, MOST_WORKERS + 1)
    return World(
        {"prefill": values, "decode": values},
        values,
        {"prefill": values, "decode": values},
        {"prefill": 1.0, "decode": 1.0},
        {"prefill": most, "decode": most},
        {"prefill": np.repeat(known[:, None], 7, axis=1), "decode": np.repeat(known[:, None], 7, axis=1)},
    )


STEP = np.repeat([2.0, 6.0, 2.0], 60)


def test_a_clairvoyant_serves_a_step_that_a_reactive_planner_is_late_for() -> None:
    world = world_of(STEP)
    seeing = outcome(world, clairvoyant(world, 1.0, 1), (), ALL)
    late = outcome(world, reactive(world, 1.0, 1), (), ALL)
    assert seeing.in_time == 1.0
    assert late.in_time < 1.0
    # Two pools: 2, 6 and 2 workers for an hour each, and four more each from their order to their start.
    assert seeing.gpu_hours == pytest.approx(2 * (10 + 4 * START_MIN / 60))


def test_a_forecast_that_comes_true_is_as_good_as_knowing() -> None:
    ahead = np.concatenate([STEP[START_MIN:], np.full(START_MIN, 2.0)])
    world = world_of(STEP, np.maximum(STEP, ahead))
    seeing = outcome(world, clairvoyant(world, 1.0, 1), (), ALL)
    planned = outcome(world, forecast(world, 0.0, 1, 3, 1.0), (), ALL)
    assert planned.in_time == 1.0
    assert planned.gpu_hours == pytest.approx(seeing.gpu_hours)


def test_workers_that_start_cost_and_serve_nothing() -> None:
    world = world_of(np.full(60, 4.0))
    wanted = {phase: np.where(np.arange(60) < 30, 2, 4) for phase in ("prefill", "decode")}
    found = outcome(world, wanted, (), ALL)  # type: ignore[arg-type]
    assert found.gpu_hours == pytest.approx(2 * 3.0)
    assert found.in_time == pytest.approx((35 * 0.5 + 25) / 60)


def test_dynamo_moves_eight_replicas_an_interval_at_most() -> None:
    world = world_of(np.repeat([1.0, 40.0], 30))
    wanted = DynamoPlanner(world, "constant")(world, 1.0)
    moves = np.abs(np.diff(wanted["prefill"]))
    assert moves.max() == 8
    assert wanted["prefill"][-1] == 40


def test_a_rule_of_minutes_knows_nothing_of_what_comes_and_pays_more_where_lateness_costs_more() -> None:
    rng = np.random.default_rng(1)
    work = np.exp(np.cumsum(rng.normal(0, 0.05, 1200)) * 0.3 + rng.normal(0, 0.15, 1200)) * 5
    world = world_of(work, np.full(1200, np.nan))
    found = [outcome(world, MinuteRule(world, 600)(world, price), (), slice(600, 1200)) for price in (30, 300)]
    assert found[0].gpu_hours < found[1].gpu_hours and found[0].in_time < found[1].in_time
    later = work.copy()
    later[900:] *= 3
    # Prices are by the mean rate of all minutes: it is kept the same.
    other = replace(world_of(later, np.full(1200, np.nan)), requests=world.requests)
    first, second = (MinuteRule(each, 600)(each, 100)["decode"] for each in (world, other))
    assert np.array_equal(first[:900], second[:900]) and second[950] > first[950]


def test_who_knows_the_bins_needs_fewer_than_who_does_not() -> None:
    rng = np.random.default_rng(2)
    work = np.repeat(np.exp(rng.normal(1.5, 0.4, 100)), 10) * np.exp(rng.normal(0, 0.1, 1000))
    world = world_of(work, np.full(1000, np.nan))
    span = slice(500, 1000)
    found = []
    for known in (True, False):
        rule = MinuteRule(world, 500, bins_known=known)
        found.append([outcome(world, rule(world, price), (), span) for price in (50, 400)])
    # At each price it is cheaper and later less often.
    assert all(seeing.gpu_hours < blind.gpu_hours for seeing, blind in zip(*found, strict=True))
    assert all(seeing.in_time > blind.in_time for seeing, blind in zip(*found, strict=True))
