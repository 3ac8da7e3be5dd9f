"""The highest rate that keeps an SLO, by requests, by work and by both."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.search import STEP, highest_rate, passes
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate

pytestmark = pytest.mark.usefixtures("quiet_lab")


@pytest.fixture(scope="module")
def any_report() -> LabReport:
    experiment = Experiment(
        generate("poisson:rate=1,seconds=5", seed=1),
        resolve("llama-3.1-8b", "h100"),
        2,
        parse_slo("ttft=max(2s,3x),tpot=50ms"),
    )
    return run(experiment, policy_named("fulcrum:1:1", 2))[0]


def test_requests_and_work_have_edges_of_their_own_and_both_the_lower_one(any_report: LabReport) -> None:
    def at_rate(rate: float) -> Sequence[LabReport]:
        good = replace(
            any_report.score,
            slo_attainment=1.0 if rate <= STEP**7.5 else 0.5,
            work_attainment=1.0 if rate <= STEP**2.5 else 0.5,
            by_class={},
        )
        return [replace(any_report, score=good)]

    found = {each: highest_rate(at_rate, measure=each).rate_scale for each in ("both", "requests", "work")}
    assert found == {"both": STEP**2, "requests": STEP**7, "work": STEP**2}


def test_a_class_that_is_starved_fails_a_rate_by_any_measure(any_report: LabReport) -> None:
    starved = replace(any_report, score=replace(any_report.score, by_class={"chat": 1.0, "long-prompt": 0.4}))
    assert passes([starved], "requests") == passes([starved], "work") == 0.0
