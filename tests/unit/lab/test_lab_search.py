"""Tests of the search for the highest rate that meets an SLO, by requests, by work and by both."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.search import STEP, highest_rate, passes
from libs.lab.slo import parse_slo
from libs.lab.study import run_named, scaled, search_measures
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


def test_requests_and_work_have_separate_edges_and_both_together_the_lower_one(any_report: LabReport) -> None:
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


def test_a_starved_class_fails_a_rate_by_any_measure(any_report: LabReport) -> None:
    starved = replace(any_report, score=replace(any_report.score, by_class={"chat": 1.0, "long-prompt": 0.4}))
    assert passes([starved], "requests") == passes([starved], "work") == 0.0


OVERLOADED = Experiment(
    generate("poisson:rate=40,seconds=8,isl=3000,osl=60", seed=1),
    resolve("llama-3.1-8b", "h100"),
    2,
    parse_slo("ttft=max(2s,3x),tpot=50ms"),
)


@pytest.mark.parametrize("name", ["aggregated", "fulcrum:1:1"])
def test_a_run_that_can_no_longer_pass_ends_early_with_the_same_verdict(name: str) -> None:
    policy = policy_named(name, 2)
    whole, early = (run(replace(OVERLOADED, give_up_below=share), policy)[0] for share in (0.0, 0.9))
    assert early.virtual_s < whole.virtual_s
    for measure in ("both", "requests", "work"):
        assert passes([early], measure) < 0.9
        assert passes([whole], measure) < 0.9


@pytest.mark.parametrize("name", ["aggregated", "static"])
def test_a_quick_search_finds_the_same_rate(name: str) -> None:
    base = replace(OVERLOADED, trace=generate("poisson:rate=12,seconds=3,isl=3000,osl=30", seed=1), workers=3)
    found = search_measures(base, name, "superpose", 1, measures=("both",), start=2.0, quick=True)["both"]
    whole = highest_rate(lambda rate: [run_named(scaled(base, rate, "superpose"), name)], 2.0)
    assert found.rate_scale == whole.rate_scale > 0
