"""Tests of the offline schedule: at least as good as its start, and honest about refused requests."""

from dataclasses import replace

import pytest

from libs.lab.cluster.books import LabOutcome
from libs.lab.cluster.run import PlannedMove
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.offline import Schedule, best_offline
from libs.lab.policies import policy_named
from libs.lab.search import WANTED, merit, passes
from libs.lab.slo import parse_slo
from libs.lab.study import run_named
from libs.lab.traces.generate import generate
from libs.policy.roles import Role

pytestmark = pytest.mark.usefixtures("quiet_lab")

SLO = parse_slo("ttft=max(1s,3x),tpot=30ms")
HARDWARE = resolve("llama-3.1-8b", "h100")
EASY = Experiment(generate("poisson:rate=4,seconds=20", seed=3), HARDWARE, 3, SLO)
HARD = Experiment(generate("flipflop:rate=60,seconds=2,isl=3000,osl=200", seed=3), HARDWARE, 3, SLO)


def test_the_search_is_never_worse_than_the_planner_or_a_constant_split() -> None:
    found = merit(best_offline(HARD, runs=9).report)
    for name in ("fulcrum-auto", "fulcrum-mixed", "fulcrum-mixed:1:2"):
        assert found >= merit(run_named(HARD, name)), name


def test_more_tries_find_nothing_worse_and_a_seed_repeats_its_result() -> None:
    few, many, again = (best_offline(HARD, runs=runs) for runs in (4, 10, 10))
    assert merit(many.report) >= merit(few.report)
    assert many.schedule == again.schedule
    assert replace(many.report, wall_s=0.0) == replace(again.report, wall_s=0.0)


def test_a_rate_that_is_met_at_once_takes_one_run_and_refuses_no_request() -> None:
    found = best_offline(EASY)
    assert found.schedule == Schedule(())
    assert passes([found.report]) >= WANTED
    assert found.report.score.rejected == 0


def test_refused_requests_count_as_rejected_and_not_as_good() -> None:
    refused = frozenset(range(0, len(EASY.trace.requests), 4))
    report, result = run(replace(EASY, refused=refused), policy_named("fulcrum:1:2", 3))
    assert {each.request.number for each in result.answers if each.outcome is LabOutcome.REJECTED} == refused
    assert report.score.rejected == len(refused)
    assert report.score.good <= len(EASY.trace.requests) - len(refused)
    assert report.score.completed == len(EASY.trace.requests) - len(refused)


def test_roles_move_when_the_schedule_says_so() -> None:
    moves = [PlannedMove(5.0, 1, Role.PREFILL, 0), PlannedMove(10.0, 1, Role.MIXED, 0)]
    report, result = run(replace(EASY, moves=moves), policy_named("fulcrum:1:2", 3))
    assert report.role_moves == 2
    assert result.workers[1].assignment.role is Role.MIXED
    assert report.score.completed == len(EASY.trace.requests)
