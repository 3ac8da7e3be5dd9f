"""Tests of llm-d's predicted-latency routing: regression, filters and scores, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.rivals.llm_d_latency import (
    TRAIN_EVERY_NS,
    LatencyRouter,
    OnlineRegression,
    Prediction,
    near_cache,
    scored,
)
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from tests.rival_rig import MS, SECOND, mixed, request


def predicted(index: int, ttft_ms: float, ttft_room_ms: float, tpot_room_ms: float, **fields: int) -> Prediction:
    worker = mixed(index, budget_tokens=512, **fields)
    return Prediction(worker, ttft_ms * MS, ttft_room_ms * MS, tpot_room_ms * MS)


def test_the_regression_finds_a_linear_law_and_adds_the_spread_up_to_the_90th_percentile() -> None:
    exact, spread = OnlineRegression(), OnlineRegression()
    for number in range(200):
        row = np.array([number % 17, number % 5], np.float64)
        law = 10.0 * row[0] + 3.0 * row[1] + 7.0
        exact.add(row, law)
        spread.add(row, law + (5.0 if number % 2 else -5.0))
    exact.fit()
    spread.fit()
    rows = np.array([[4.0, 2.0]])
    assert exact.predict_ns(rows)[0] == pytest.approx(53.0, rel=0.01)
    assert spread.predict_ns(rows)[0] == pytest.approx(53.0 + 1.28 * 5.0, rel=0.02)


def test_nothing_is_predicted_from_a_few_samples() -> None:
    model = OnlineRegression()
    for number in range(9):
        model.add(np.array([float(number)]), float(number))
    model.fit()
    assert not model.ready


def test_the_worker_with_the_least_headroom_scores_highest_among_those_that_meet_the_slo() -> None:
    near, far, missing = predicted(0, 900, 100, 10), predicted(1, 200, 800, 30), predicted(2, 1100, -100, 20)
    scores = {worker.index: score for worker, score in scored([near, far, missing])}
    assert scores == {0: 101.0, 1: 2.0}
    assert {worker.index: score for worker, score in scored([near, far], most=True)} == {0: 2.0, 1: 101.0}


def test_if_none_meets_the_slo_idle_workers_come_first_then_those_that_miss_only_tpot() -> None:
    busy = predicted(0, 900, 100, -1, decodes=3)
    late = predicted(1, 1500, -500, 10, decodes=3)
    idle = predicted(2, 1200, -200, -5)
    assert [worker.index for worker, _ in scored([busy, late, idle])] == [2]
    assert [worker.index for worker, _ in scored([busy, late])] == [0]
    assert [worker.index for worker, _ in scored([late])] == [1]


def test_a_cached_prefix_attracts_its_requests_unless_that_costs_five_seconds() -> None:
    asks = request(1000, cached={1: 800})
    there, other = predicted(1, 4900, 0, 0), predicted(0, 100, 0, 0)
    assert near_cache(asks, [other, there], 0.8) == [there]
    assert near_cache(asks, [other, there], 0.99) == [other, there]
    slow = predicted(1, 5200, 0, 0)
    assert near_cache(asks, [other, slow], 0.8) == [other, slow]


def test_the_router_learns_which_worker_is_fast() -> None:
    router = LatencyRouter(most=True)
    workers = [
        mixed(0, budget_tokens=512, prompts=9, prompt_tokens=40_000),
        mixed(1, budget_tokens=512, prompts=1, prompt_tokens=400),
    ]
    for number in range(40):
        asks = request(1000 + number)
        asks = replace(asks, number=number)
        at = router.prompt(asks, workers, 0)
        router.first_token(number, 3 * SECOND if at == 0 else SECOND // 10)
        router.ended(number, 20.0 * MS)
    chosen = [router.prompt(request(1000 + number), workers, TRAIN_EVERY_NS + 1) for number in range(20)]
    assert chosen.count(1) == 20  # the other one is predicted to miss the SLO


@pytest.mark.usefixtures("quiet_lab")
def test_in_the_lab_the_router_learns_and_runs_are_repeatable() -> None:
    trace = generate("poisson:rate=10,seconds=30,isl=2000,osl=100", seed=1)
    base = Experiment(trace, resolve("llama-3.1-8b", "h100"), 4, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    first, again = (run(base, policy_named("llm-d-latency", 4))[0] for _ in range(2))
    assert first.score == again.score
    assert first.score.slo_attainment > 0.9
