"""Tests of rules for which idle models stay loaded, and of their cost on a log."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.lab.models.generate import generate_usage
from libs.lab.models.usage import UsageLog
from libs.policy.reserve.arrivals import ArrivalLaws
from libs.policy.reserve.following import ModelPool, choose, worth_of
from libs.testing.models import keeping
from libs.testing.models.keeping import KeepWindow, hybrid_histogram, keep_for, replay_rule, replay_worth


def log_of(rows):
    t_s, model, exec_s = (np.array(each, dtype=float) for each in zip(*sorted(rows), strict=True))
    count = int(model.max()) + 1
    return UsageLog(
        "test", t_s, model.astype(np.int64), exec_s, [f"m{place}" for place in range(count)], np.ones(count)
    )


AHEAD_S = np.geomspace(1.0, 3000.0, 200)


@pytest.mark.parametrize(("rate", "cost", "pays"), [(0.02, 60.0, True), (0.01, 60.0, False), (0.01, 120.0, True)])
def test_a_poisson_model_is_worth_keeping_if_its_rate_times_the_cold_start_exceeds_its_gpus(rate, cost, pays):
    """With a constant hazard every time of unloading is worth the same: rate · cost ÷ GPUs."""
    hazard = rate * AHEAD_S[:, None]
    assert worth_of(hazard, AHEAD_S, np.ones(1), cost, 0.0)[0] == pytest.approx(rate * cost, rel=0.02)
    assert (worth_of(hazard, AHEAD_S, np.ones(1), cost, 0.0)[0] > 1) == pays


@given(st.floats(1e-5, 1.0), st.floats(0.0, 100.0), st.floats(0.5, 8.0))
def test_a_load_before_use_and_more_gpus_never_raise_the_worth_of_a_model(rate, load_s, gpus):
    hazard = rate * AHEAD_S[:, None]
    plain = worth_of(hazard, AHEAD_S, np.ones(1), 60.0, 0.0)[0]
    assert worth_of(hazard, AHEAD_S, np.ones(1), 60.0, load_s)[0] <= plain + 1e-12
    assert worth_of(hazard, AHEAD_S, np.full(1, gpus + 0.5), 60.0, 0.0)[0] <= plain * 2 + 1e-12


MODELS = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.booleans(), st.booleans(), st.booleans(), st.floats(0.0, 5.0)),
    min_size=1,
    max_size=12,
)


@given(MODELS, st.floats(0.0, 30.0))
def test_busy_models_stay_and_the_room_is_never_exceeded(models, room):
    gpus, loaded, busy, floor, worth = (np.array(each) for each in zip(*models, strict=True))
    kept = choose(ModelPool(gpus, loaded, busy, floor, worth), room)
    assert np.all(kept[busy])
    assert gpus[kept].sum() <= max(room, gpus[busy].sum()) + 1e-9
    idle = kept & ~busy
    assert np.all((worth > 1)[idle] | floor[idle])


@given(MODELS)
def test_with_enough_room_models_that_pay_and_those_with_a_minimum_stay_loaded(models):
    gpus, loaded, busy, floor, worth = (np.array(each) for each in zip(*models, strict=True))
    kept = choose(ModelPool(gpus, loaded, busy, floor, worth), 1e9)
    assert np.array_equal(kept, busy | floor | (worth > 1))


def test_a_keep_alive_pays_for_each_gap_until_it_expires():
    log = log_of([(0.0, 0, 10.0), (50.0, 0, 10.0), (200.0, 0, 10.0), (230.0, 0, 5.0)])
    found = replay_rule(log, "", keep_for(60.0), from_s=0.0, load_s=5.0)
    assert (found.cold_starts, found.loads) == (2, 2)
    assert found.idle_gpu_s == pytest.approx(40 + 60 + 20 + 2 * 5)
    late = replay_rule(log, "", keep_for(60.0), from_s=100.0, load_s=5.0)
    assert (late.cold_starts, late.idle_gpu_s) == (1, pytest.approx(20 + 20 + 5))


def test_both_replays_agree(monkeypatch):
    """A keep-alive, decided by ticks, costs what it does in continuous time, but for what a tick leaves open."""
    log = generate_usage("gamma:models=20,cv=4,rate=0.004,seconds=21600", seed=3)
    rule = replay_rule(log, "", keep_for(300.0), from_s=7200.0, load_s=5.0)
    monkeypatch.setattr(keeping, "worth_of", _worth_of_a_keep_alive)
    monkeypatch.setattr(keeping, "ArrivalLaws", _Watched)
    by_ticks = replay_worth(log, 300.0, tick_s=5.0, from_s=7200.0, load_s=5.0)
    assert by_ticks.cold_starts == pytest.approx(rule.cold_starts, rel=0.04)
    assert by_ticks.idle_gpu_s == pytest.approx(rule.idle_gpu_s, rel=0.06)


class _Watched(ArrivalLaws):
    """Arrival laws that remember the time since each model's last request."""

    since_s = np.zeros(0)

    def hazards(self, now_s, ahead_s):
        _Watched.since_s = now_s - self.last_s
        return np.full((6, len(ahead_s), len(self)), 1e-9)


def _worth_of_a_keep_alive(*_):
    return np.where(_Watched.since_s < 300.0 + 12.0, 2.0, 0.0)


def test_the_histogram_reloads_a_model_shortly_before_its_regular_request():
    window = hybrid_histogram([1800.0] * 50)
    assert window.load_after_s == pytest.approx(1800 * 0.9)
    assert 1860 <= window.until_s <= 1860 * 1.2
    assert hybrid_histogram([]) == KeepWindow(0.0, 600.0)
    assert hybrid_histogram([60.0 * each for each in range(240)]) == KeepWindow(0.0, 600.0), "not representative"


def test_by_worth_idle_gpu_time_is_traded_for_cold_starts_at_their_price():
    log = generate_usage("gamma:models=12,cv=4,rate=0.008,seconds=10800", seed=2)
    found = [replay_worth(log, cost, tick_s=10.0, from_s=3600.0, load_s=5.0) for cost in (30.0, 300.0, 3000.0)]
    assert found[0].idle_gpu_s < found[1].idle_gpu_s < found[2].idle_gpu_s
    assert found[0].cold_starts > found[1].cold_starts > found[2].cold_starts


def test_a_bounded_room_costs_more_cold_starts_and_less_idle_gpu_time():
    log = generate_usage("poisson:models=16,rate=0.01,seconds=5400", seed=2)
    free = replay_worth(log, 3000.0, tick_s=10.0, from_s=1800.0, load_s=5.0)
    bound = replay_worth(log, 3000.0, tick_s=10.0, from_s=1800.0, load_s=5.0, room_gpus=6.0)
    assert bound.cold_starts > free.cold_starts
    assert bound.idle_gpu_s < free.idle_gpu_s
