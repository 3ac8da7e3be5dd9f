"""Tests of whole runs of the lab: repeatable, balanced and worse under more load."""

import json
from dataclasses import replace

import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.run import InconsistentSimulation, check
from libs.lab.cluster.time import VirtualTime
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import by_name, resolve
from libs.lab.policies import ALL, has_hindsight, policy_named
from libs.lab.search import STEP, SearchResult, fewest_workers, highest_rate, lower_bound
from libs.lab.slo import is_good, parse_slo
from libs.lab.study import run_named
from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace, TraceRequest

pytestmark = pytest.mark.usefixtures("quiet_lab")

SLO = parse_slo("ttft=max(2s,3x),tpot=50ms")
TRACE = generate("poisson:rate=4,seconds=30", seed=3)


def experiment(trace: Trace = TRACE, **fields: object) -> Experiment:
    arguments = {"hardware": resolve("llama-3.1-8b", "h100"), "workers": 4, "slo": SLO, **fields}
    return Experiment(trace, **arguments)  # type: ignore[arg-type]


MORE = ("dynamo-load+ours", "dynamo-load+moves", "arrow+ours", "llm-d+moves+guard", "aggregated+ours")


@pytest.mark.parametrize("name", [*(name for name in ALL if not has_hindsight(name)), *MORE])
def test_every_rival_serves_an_easy_trace_completely(name: str) -> None:
    report, result = run(experiment(), policy_named(name, 4))
    assert report.score.completed == len(TRACE.requests), report.score
    assert sum(answer.tokens for answer in result.answers) == sum(each.output_tokens for each in TRACE.requests)


def test_a_static_split_with_our_order_and_guard_equals_our_policy_with_fixed_roles() -> None:
    ours, given = (run(experiment(), policy_named(name, 4))[0].as_json() for name in ("fulcrum:1:3", "static:1:3+ours"))
    assert {name for name in ours if ours[name] != given[name]} == {"policy", "wall_s"}


def test_a_rivals_mover_over_our_gateway_moves_workers_and_restarts_none() -> None:
    turning = generate("flipflop:rate=8,seconds=60,period=20,isl=3000,osl=200", seed=3)
    report, _ = run(experiment(turning, workers=6), policy_named("arrow:3:3+ours", 6))
    assert report.role_moves and not report.score.aborted


def test_two_runs_of_a_seed_differ_only_in_their_run_time() -> None:
    found = [run(experiment(), policy_named("fulcrum:2:2", 4))[0].as_json() for _ in range(2)]
    walls = [each.pop("wall_s") for each in found]
    assert found[0] == found[1] and all(wall > 0 for wall in walls)
    json.dumps(found[0])


def test_the_requested_figures_of_a_run_are_present() -> None:
    found = run(experiment(), policy_named("fulcrum:2:2", 4))[0].as_json()
    assert {
        "policy", "seed", "requests", "completed", "aborted", "rejected", "slo_attainment", "work_attainment",
        "goodput_rps_per_gpu", "ttft_s", "tpot_s", "gpu_seconds", "role_moves", "wall_s", "virtual_s",
    } <= set(found)  # fmt: skip
    used = found["gpu_seconds"]
    whole = sum(used[name] for name in ("prefill", "decode", "kv_wait", "idle"))
    assert whole == pytest.approx(4 * found["virtual_s"]) and used["starved"] <= used["idle"]


def test_thirty_times_the_load_is_served_worse() -> None:
    heavy = generate("poisson:rate=360,seconds=4", seed=3)
    easy, hard = (run_named(experiment(trace), "fulcrum:2:2").score for trace in (TRACE, heavy))
    assert easy.slo_attainment > 0.95 > hard.slo_attainment


def test_the_best_split_in_hindsight_is_as_good_as_any() -> None:
    lab_run = experiment(generate("poisson:rate=12,isl=4000,osl=50,seconds=20", seed=3))
    best = run_named(lab_run, "static")
    others = [run_named(lab_run, f"static:{prefill}:{4 - prefill}") for prefill in range(1, 4)]
    assert best.score.slo_attainment == max(each.score.slo_attainment for each in others)


def test_a_cached_prefix_is_not_computed_again() -> None:
    alone = [TraceRequest(n, n * 2_000_000_000, 4096, 5) for n in range(8)]
    shared = [replace(each, hash_ids=tuple(range(8))) for each in alone]
    costs = []
    for requests, block_tokens in ((alone, 0), (shared, 512)):
        report, result = run(experiment(Trace("t", requests, block_tokens)), policy_named("fulcrum:1:3", 4))
        costs.append(report.gpu_seconds["prefill"])
        cached = [answer.cached_tokens for answer in result.answers]
    assert costs[1] < 0.3 * costs[0]
    assert cached[0] == 0 and set(cached[1:]) == {3584}, "the last block is computed, to be sampled from"


def test_a_cluster_that_lost_a_token_fails_its_run() -> None:
    _, result = run(experiment(), policy_named("fulcrum:2:2", 4))
    check(result)
    result.answers[3].tokens -= 1
    with pytest.raises(InconsistentSimulation, match="request 3"):
        check(result)
    result.answers[3].tokens += 1
    result.spent[1].idle_ps += 1
    with pytest.raises(InconsistentSimulation, match="w1"):
        check(result)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"workers": 0}, "at least one"),
        ({"slo": parse_slo("ttft=1ms,tpot=50ms")}, "cannot be met"),
        ({"slo": parse_slo("ttft=2s,tpot=1ms")}, "one sequence alone takes"),
        ({"trace": Trace("none", [])}, "no requests"),
        ({"trace": Trace("t", [TraceRequest(0, 0, 10_000_000, 5)])}, "larger --tp"),
    ],
)
def test_an_impossible_run_is_refused_with_a_remedy(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        experiment(**fields)  # type: ignore[arg-type]


def test_prompts_beside_decodes_cost_the_configured_interference() -> None:
    trace = generate("poisson:rate=10,isl=3000,osl=200,seconds=20", seed=1)
    busy = []
    for interference in (0.0, 1.0):
        report = run_named(experiment(trace, interference=interference, workers=2), "aggregated")
        busy.append(report.gpu_seconds["prefill"] + report.gpu_seconds["decode"])
    assert busy[1] > 1.01 * busy[0]


# ---------------------------------------------------------------- scores


def answer(first_ps: int, last_ps: int, tokens: int, late: int = 0) -> LabAnswer:
    made = LabAnswer(TraceRequest(0, 0, 10, tokens), VirtualTime(), 0, 2_000_000_000, 50_000_000)
    made.first_ps, made.last_ps, made.tokens, made.late = first_ps, last_ps, tokens, late
    made.outcome = LabOutcome.COMPLETED
    return made


def test_an_answer_is_good_if_first_token_mean_pace_and_nearly_all_tokens_are_in_time() -> None:
    second = 10**12
    assert is_good(answer(second, 6 * second, 101))  # 50 ms each
    assert not is_good(answer(2 * second + 1000, 3 * second, 101)), "first token late, by a nanosecond"
    assert not is_good(answer(second, 6 * second + 10**9, 101)), "slower than 50 ms in the mean"
    assert is_good(answer(second, 6 * second, 101, late=1))
    assert not is_good(answer(second, 6 * second, 101, late=2)), "more than 1 % late"
    unfinished = answer(second, 2 * second, 50)
    unfinished.outcome = LabOutcome.UNFINISHED
    assert not is_good(unfinished)


def test_a_lower_bound_rises_with_agreement_between_seeds() -> None:
    assert lower_bound([0.9]) == 0.9
    assert lower_bound([0.9, 0.9, 0.9]) == pytest.approx(0.9)
    # mean 0.9, s = 0.02, n = 4: 0.9 - 2.353 * 0.02 / 2
    assert lower_bound([0.88, 0.88, 0.92, 0.92]) == pytest.approx(0.9 - 2.353 * 0.023094 / 2, abs=1e-4)


@pytest.mark.parametrize("edge", [0.31, 1.0, 2.7])
def test_the_highest_rate_is_within_a_step_of_the_edge(edge: float) -> None:
    base = run_named(experiment(), "fulcrum:2:2")

    def at_rate(rate: float) -> list[object]:
        share = 0.95 if rate <= edge else 0.5
        return [replace(base, score=replace(base.score, slo_attainment=share, work_attainment=share))]

    found: SearchResult = highest_rate(at_rate)  # type: ignore[arg-type]
    assert found.rate_scale <= edge < found.rate_scale * STEP
    assert all((bound >= 0.9) == (rate <= edge) for rate, bound in found.tried.items())


def test_the_fewest_workers_are_found_and_none_if_all_sizes_are_too_small() -> None:
    base = run_named(experiment(), "fulcrum:2:2")

    def with_need(need: int) -> object:
        def attempt(workers: int) -> object:
            share = 0.95 if workers >= need else 0.5
            return replace(base, score=replace(base.score, slo_attainment=share, work_attainment=share))

        return attempt

    assert (fewest_workers(with_need(5), 2, 16) or (0,))[0] == 5  # type: ignore[arg-type]
    assert fewest_workers(with_need(17), 2, 16) is None  # type: ignore[arg-type]


def test_a_profiles_own_name_tells_whether_mixed_steps_were_measured() -> None:
    with pytest.raises(InvalidRequest, match="not known"):
        by_name("h100")
