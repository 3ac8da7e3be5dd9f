"""Tests of the prediction of each model's next request from its past use."""

import numpy as np
import pytest

from libs.policy.reserve.following import UNKNOWN, ModelCount, UseFollower

BEGIN_S = 1_700_000_000.0
LOADS = {"often": 4.0, "seldom": 4.0}


def follow(seconds: float, gaps_s: dict[str, float], *, runs_s: float = 1.0) -> UseFollower:
    """Follow models requested at even gaps, each request running for `runs_s`, looked at every quarter second."""
    follower = UseFollower(window_s=60.0)
    for step in range(int(seconds * 4)):
        at_s = step / 4
        counts = {}
        for name, gap_s in gaps_s.items():
            arrivals = int(at_s // gap_s)
            last_s = arrivals * gap_s
            counts[name] = ModelCount(arrivals, int(arrivals > 0 and at_s - last_s < runs_s), BEGIN_S + last_s)
        follower.look(BEGIN_S + at_s, counts)
    return follower


def test_before_a_window_has_passed_nothing_is_preloaded_or_unloaded() -> None:
    follower = follow(30, {"often": 5.0})
    chances = follower.chances(BEGIN_S + 30, horizon_s=10, cold_cost_gpu_s=300, load_s=LOADS)
    assert chances == {"often": UNKNOWN, "seldom": UNKNOWN}
    assert UNKNOWN.worth > 1 and UNKNOWN.worth_ahead == 0
    assert follower.requested_within(BEGIN_S + 30, 60) is None and follower.ahead is None


def test_a_model_requested_often_is_more_likely_to_be_requested_soon_and_worth_more() -> None:
    follower = follow(1_200, {"often": 10.0, "seldom": 300.0})
    chances = follower.chances(BEGIN_S + 1_200, horizon_s=30, cold_cost_gpu_s=300, load_s=LOADS)
    often, seldom = chances["often"], chances["seldom"]
    assert often.soon > 0.9 and seldom.soon < 0.3
    assert often.worth > seldom.worth and often.worth_ahead > seldom.worth_ahead
    assert often.next_s is not None and seldom.next_s is not None and often.next_s < 20 < seldom.next_s


def test_the_expected_number_of_requested_models_grows_with_time_up_to_all() -> None:
    follower = follow(1_200, {"often": 10.0, "seldom": 300.0})
    found = [follower.requested_within(BEGIN_S + 1_200, seconds) for seconds in (1.0, 60.0, 7_200.0)]
    means = [each.mean for each in found if each is not None]
    assert means == sorted(means) and means[-1] == pytest.approx(2.0, abs=0.05)


def test_the_forecast_of_models_in_use_at_once_is_close_to_the_actual_number() -> None:
    rng = np.random.default_rng(3)
    follower = UseFollower(window_s=60.0)
    names = [f"m{number}" for number in range(20)]
    ends: dict[str, list[float]] = {name: [] for name in names}
    arrivals, last_s = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    active = []
    for step in range(40 * 60 * 2):
        now_s = BEGIN_S + step / 2
        for name in names:
            ends[name] = [end_s for end_s in ends[name] if end_s > now_s]
            if rng.random() < 0.5 / 60:
                arrivals[name], last_s[name] = arrivals[name] + 1, now_s
                ends[name].append(now_s + rng.exponential(15.0))
        active.append(sum(map(bool, ends.values())))
        follower.look(now_s, {name: ModelCount(arrivals[name], len(ends[name]), last_s[name]) for name in names})
    assert follower.ahead is not None
    assert follower.windows == 39
    assert follower.ahead.expected_models == pytest.approx(np.mean(active), rel=0.25)
    peaks = [max(active[at : at + 120]) for at in range(0, len(active), 120)]
    assert min(peaks) <= follower.ahead.reserve_gpus <= max(peaks) + 3


def test_a_restarted_gateway_does_not_reduce_the_counts() -> None:
    follower = follow(120, {"often": 10.0})
    follower.look(BEGIN_S + 121, {"often": ModelCount(0, 0, 0.0)})
    assert follower.active == 0
