"""Tests of the GPUs that each policy needs on a trace, and of the advice whether to disaggregate."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from libs.cli.lab.needs import Outcome, needs_page
from libs.lab.experiment import Experiment, LabReport
from libs.lab.hardware import resolve
from libs.lab.needs import DesignAnswer, Need, as_record, compare_at_winner, decide, find_need, reasons
from libs.lab.policies import design_of, policy_named
from libs.lab.search import fewest_workers
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate

pytestmark = pytest.mark.usefixtures("quiet_lab")

POLICIES = ("fulcrum", "fulcrum-mixed", "aggregated")
MOST = 8


def made(trace: str, slo: str, interference: float) -> Experiment:
    hardware = resolve("llama-3.1-8b", "h100")
    return Experiment(generate(trace, seed=1), hardware, 4, parse_slo(slo), interference=interference)


def answered(experiment: Experiment) -> tuple[DesignAnswer, list[Need]]:
    needs = [find_need(experiment, name, lambda line: None, most=MOST, measure="requests") for name in POLICIES]
    return decide(needs, 1, MOST), needs


@pytest.fixture(scope="module")
def light() -> Experiment:
    return made("poisson:rate=1,isl=500,osl=40,seconds=10", "ttft=max(2s,3x),tpot=50ms", 0.0)


def test_a_trace_that_one_gpu_serves_gets_the_advice_to_aggregate(light: Experiment) -> None:
    answer, needs = answered(light)
    assert answer.verdict == "aggregate"
    assert answer.sentence.startswith("Aggregate: 1 GPU by ") and "disaggregated needs 2 GPUs" in answer.sentence
    assert {need.policy: need.workers for need in needs} == {"fulcrum": 2, "fulcrum-mixed": 1, "aggregated": 1}
    assert compare_at_winner(light, answer, lambda line: None) is None
    assert reasons(light, answer, None)[-1] == "One worker is enough, and a split takes at least two."


def test_prompts_that_break_the_pace_of_decodes_get_the_advice_to_disaggregate() -> None:
    experiment = made("poisson:rate=8,isl=6000,osl=150,spread=0.3,seconds=9", "ttft=2s,tpot=12ms", 1.0)
    answer, _ = answered(experiment)
    assert answer.verdict == "disaggregate"
    assert answer.sentence.startswith("Disaggregate: 2 GPUs as 1 prefill + 1 decode by fulcrum; aggregated needs ")
    versus = compare_at_winner(experiment, answer, lambda line: None)
    assert versus is not None and versus.score.slo_attainment < 0.9
    said = reasons(experiment, answer, versus)
    assert "of the GPU time" in said[0] and said[1].startswith("With 2 GPUs, fulcrum serves ")


def test_a_trace_that_is_short_compared_to_its_answers_is_flagged(light: Experiment) -> None:
    nobody = DesignAnswer("neither", "", None, None)
    assert len(reasons(light, nobody, None)) == 1
    trace = replace(light.trace, requests=[replace(each, output_tokens=2000) for each in light.trace.requests])
    assert "a longer trace may need more GPUs" in reasons(replace(light, trace=trace), nobody, None)[1]


@pytest.fixture(scope="module")
def any_report(light: Experiment) -> LabReport:
    return find_need(light, "aggregated", lambda line: None, most=MOST, measure="requests").report


def need(report: LabReport, policy: str, workers: int | None, roles: str = "1:1") -> Need:
    return Need(policy, design_of(policy), workers, replace(report, roles=roles), {workers or MOST: 1.0})


def test_equal_numbers_give_the_advice_to_aggregate(any_report: LabReport) -> None:
    found = decide([need(any_report, "fulcrum", 4, "1:3"), need(any_report, "aggregated", 4, "0:4")], 2, MOST)
    assert found.sentence == "Aggregate: 8 GPUs by aggregated; disaggregated needs as many (fulcrum)"


def test_a_side_that_never_meets_the_slo_needs_more_gpus_than_were_tried(any_report: LabReport) -> None:
    found = decide([need(any_report, "static", 6, "2:4"), need(any_report, "niyama", None, "0:8")], 1, MOST)
    assert (
        found.sentence
        == "Disaggregate: 6 GPUs as 2 prefill + 4 decode by static; aggregated needs more than 8 (niyama)"
    )


def test_both_sides_may_miss_the_slo(any_report: LabReport) -> None:
    found = decide([need(any_report, "static", None), need(any_report, "niyama", None)], 1, MOST)
    assert found.verdict == "neither" and "up to 8 GPUs" in found.sentence


def test_a_comparison_without_one_side_gives_no_verdict(any_report: LabReport) -> None:
    assert decide([need(any_report, "static", 4)], 1, MOST).sentence == (
        "Unknown: static needs 4 GPUs, and no aggregated policy was compared"
    )
    assert decide([], 1, MOST).verdict == "unknown"


def test_a_hybrid_that_needs_fewer_gpus_is_named(any_report: LabReport) -> None:
    needs = [need(any_report, name, count) for name, count in (("static", 4), ("aggregated", 5), ("taichi", 3))]
    assert decide(needs, 1, MOST).sentence.endswith(". taichi, which is in between, needs 3 GPUs")


@pytest.mark.parametrize("edge", [1, 2, 3, 7, 8, 30, 63, 64])
@pytest.mark.parametrize("guess", [0, 1, 5, 20, 64])
def test_a_guess_changes_the_sizes_tried_and_not_the_result(any_report: LabReport, edge: int, guess: int) -> None:
    tried: list[int] = []

    def attempt(workers: int) -> LabReport:
        tried.append(workers)
        score = replace(any_report.score, slo_attainment=float(workers >= edge), by_class={})
        return replace(any_report, score=score)

    found = fewest_workers(attempt, 1, 64, guess=guess, measure="requests")
    assert found is not None and found[0] == edge
    assert len(tried) == len(set(tried)) <= 14


def test_one_worker_serves_only_policies_that_do_not_split() -> None:
    assert policy_named("aggregated", 1).name == "aggregated"
    assert [design_of(name) for name in ("aggregated:512+guard", "fulcrum-mixed", "niyama")] == ["aggregated"] * 3
    assert [design_of(name) for name in ("taichi", "fulcrum-mixed:1:2")] == ["hybrid"] * 2
    assert [design_of(name) for name in ("fulcrum", "arrow+ours", "static:1:2")] == ["disaggregated"] * 3


def test_the_page_is_complete_and_its_text_is_escaped(light: Experiment, any_report: LabReport) -> None:
    trace = replace(light.trace, name="<b>", notes=("a & b",))
    needs = [need(any_report, "aggregated", 1, "0:1"), need(any_report, "static", None, "4:4")]
    answer = decide(needs, 1, MOST)
    page = needs_page(Outcome(replace(light, trace=trace), answer, needs, ("Because.",), "requests"))
    assert "<b>" not in page and "&lt;b&gt;" in page and "a &amp; b" in page
    assert answer.sentence in page and "Because." in page and "&gt;8" in page
    assert "http" not in page and "<script" not in page
    assert json.dumps(as_record(needs[1], 1))


def test_the_page_names_the_winning_policy_first(tmp_path: Path, light: Experiment, any_report: LabReport) -> None:
    needs = [need(any_report, "aggregated", 1, "0:1"), need(any_report, "static", 2)]
    page = needs_page(Outcome(light, decide(needs, 1, MOST), needs, (), "requests"))
    assert page.index('class="best"><td>aggregated') < page.index("<td>static")
