"""Tests of a lab cluster with injected errors: predictions get worse, and every request is served."""

from dataclasses import replace

import pytest

from libs.cli.lab.runs import parse_wrong
from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.host.shape import InjectedErrors
from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate

pytestmark = pytest.mark.usefixtures("quiet_lab")

TRACE = generate("poisson:rate=6,seconds=40,isl=3000,osl=60", seed=3)
TURNING = generate("flipflop:rate=12,seconds=40,period=20,isl=3000,osl=200", seed=3)
BASE = Experiment(TRACE, resolve("llama-3.1-8b", "h100"), 4, parse_slo("ttft=max(2s,3x),tpot=50ms"))


def served(wrong: InjectedErrors) -> LabReport:
    report, _ = run(replace(BASE, wrong=wrong), policy_named("fulcrum-auto", 4))
    assert report.score.completed == len(TRACE.requests)
    return report


def near(wrong: InjectedErrors) -> float:
    return served(wrong).score.ttft_prediction["within"]


def test_zero_errors_change_nothing() -> None:
    right = served(InjectedErrors()).score
    assert right == served(InjectedErrors(slow={1: 1.0})).score == run(BASE, policy_named("fulcrum-auto", 4))[0].score


@pytest.mark.parametrize(
    "wrong", [InjectedErrors(step_times=0.4), InjectedErrors(slow={0: 3.0, 1: 3.0}), InjectedErrors(hints=0.6)]
)
def test_predictions_get_worse_and_every_request_is_served(wrong: InjectedErrors) -> None:
    assert near(wrong) < near(InjectedErrors())


def test_old_telemetry_leaves_every_request_served() -> None:
    served(InjectedErrors(telemetry_ms=500))


def test_old_telemetry_repeats_no_order_to_a_worker() -> None:
    """The planner remembers its orders until telemetry shows the change."""

    def changes(telemetry_ms: float) -> int:
        looks: list[int] = []
        policy = policy_named("fulcrum-auto", 4)
        policy = replace(policy, on_look=lambda _, __, plan: looks.append(len(plan.changes)))
        run(replace(BASE, trace=TURNING, wrong=InjectedErrors(telemetry_ms=telemetry_ms)), policy)
        return sum(looks)

    right = changes(0.0)
    assert right
    assert changes(500.0) <= right + 2


def test_the_requested_number_of_false_hints_is_spread_over_all_workers() -> None:
    workers = [f"w{number}" for number in range(4)]
    named = [InjectedErrors(hints=0.25).hint(number, workers) for number in range(4000)]
    assert sum(map(bool, named)) == pytest.approx(1000, rel=0.1)
    assert all(named.count(worker) == pytest.approx(250, rel=0.2) for worker in workers)


def test_first_come_first_served_ignores_deadlines() -> None:
    assert not policy_named("fulcrum-fcfs:2:2", 4).late_last
    assert policy_named("fulcrum:2:2", 4).late_last


def test_injected_errors_are_requested_by_name() -> None:
    assert parse_wrong(["telemetry=500", "slow=3:2", "slow=5:0.5", "steps=0.2", "hints=0.05"]) == InjectedErrors(
        telemetry_ms=500, step_times=0.2, slow={3: 2.0, 5: 0.5}, hints=0.05
    )


@pytest.mark.parametrize("text", ["", "steps", "steps=2", "slow=3", "slow=x:2", "hints=-1", "hints=nan", "colour=1"])
def test_invalid_injected_errors_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not an error to inject"):
        parse_wrong([text])
