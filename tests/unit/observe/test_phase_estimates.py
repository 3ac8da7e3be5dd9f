"""Tests of prefill's share of an engine's time, estimated from its counters alone."""

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.observe.server import ObservedServer
from libs.observe.vllm import VllmParser
from libs.policy.observe import PhaseEstimator, Sample, StepCost, fit_step_cost
from libs.policy.observed_work import CountedWork, Reading, interval

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, float("inf"))
COSTS = {
    "graphs": StepCost(0.005, 22e-6, 20e-6, 0.0, 0.0, 0.5, 0.0),
    "eager": StepCost(0.006, 22e-6, 20e-6, 0.0, 0.025, 0.0, 0.0),
    "slow": StepCost(0.030, 150e-6, 120e-6, 0.0, 0.0, 0.0, 0.0),
}


class Engine:
    """An engine whose steps cost what is said, and its counters; requests decode `osl` tokens each."""

    def __init__(self, cost: StepCost, seed: int) -> None:
        self.cost, self.random = cost, np.random.default_rng(seed)
        self.now_s = 0.0
        self.left: list[int] = []
        self.prompts: list[int] = []
        self.busy_s = self.prefill_s = 0.0
        self.counts = dict.fromkeys(("samples", "prompt", "generated", "first", "gaps", "gaps_s"), 0.0)
        self.histogram = [0] * len(BOUNDS)
        self.next_s = 0.0

    def run(self, until_s: float, rate: float, isl: int, osl: int) -> None:
        """Serve requests with random arrivals, that many per second."""
        while self.now_s < until_s:
            while self.next_s <= self.now_s:
                self.prompts.append(max(1, int(self.random.gamma(4.0, isl / 4))))
                self.next_s += self.random.exponential(1 / rate)
            if not self.prompts and not self.left:
                self.now_s = min(until_s, self.next_s)
                continue
            self._step(osl)

    def _step(self, osl: int) -> None:
        decoding = len(self.left)
        chunk = self.prompts.pop(0) if self.prompts else 0
        took_s = self.cost.mixed_s(chunk, decoding) if chunk else self.cost.decode_s(decoding)
        self.now_s += took_s
        self.busy_s += took_s
        if chunk:
            self.prefill_s += took_s * self.cost.prefill_share(chunk, decoding)
        for bound, _ in enumerate(BOUNDS):
            if chunk + decoding <= BOUNDS[bound]:
                self.histogram[bound] += 1
                break
        changed: dict[str, float] = {
            "samples": 1,
            "prompt": chunk,
            "generated": decoding + bool(chunk),
            "first": bool(chunk),
        }
        changed |= {"gaps": decoding, "gaps_s": decoding * took_s}
        for name, by in changed.items():
            self.counts[name] += by
        self.left = [each - 1 for each in self.left if each > 1]
        if chunk:
            self.left.append(osl)

    def reading(self) -> Reading:
        counts = self.counts
        return Reading(
            self.now_s, counts["samples"], counts["prompt"], counts["generated"], counts["first"], counts["gaps"],
            counts["gaps_s"], 0.0, 0.0, len(self.left), len(self.prompts),
            tuple(zip(BOUNDS, accumulate(self.histogram), strict=True)),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("seed", range(3))
def test_step_costs_are_learned_from_an_engine_and_its_shares_are_found(cost: str, seed: int) -> None:
    """Decodes with few prompts, many prompts, then both: within 5 points of the truth in each, and 2 in the mean."""
    engine, estimator = Engine(COSTS[cost], seed), PhaseEstimator()
    scale = 0.006 / COSTS[cost].base_s
    loads = ((4 * scale, 200, 100), (6 * scale, 2000, 20), (8 * scale, 800, 60), (2 * scale, 1000, 100))
    off = []
    before = engine.reading()
    for load, (rate, isl, osl) in enumerate(loads, 1):
        prefill_s, busy_s = engine.prefill_s, engine.busy_s
        found_prefill_s = found_busy_s = 0.0
        while engine.now_s < 40 * load:
            engine.run(engine.now_s + 0.5, rate, isl, osl)
            after = engine.reading()
            estimate = estimator.observe(interval(before, after))
            before = after
            if estimate:
                found_prefill_s += estimate.prefill_s
                found_busy_s += estimate.busy_s
        off.append(abs(found_prefill_s / found_busy_s - (engine.prefill_s - prefill_s) / (engine.busy_s - busy_s)))
    assert max(off) < 0.05, off
    assert np.mean(off) < 0.02, off


@pytest.mark.parametrize("rate", [1.0, 2.5, 6.0])
def test_prompts_that_find_the_engine_idle_are_counted_as_alone(rate: float) -> None:
    """Short answers, from a tenth of the time to most of it busy: few prompts are computed beside decodes at first."""
    cost = COSTS["graphs"]
    engine = Engine(cost, 1)
    before, prefill_s, decode_s = engine.reading(), 0.0, 0.0
    while engine.now_s < 300:
        engine.run(engine.now_s + 0.5, rate, 2000, 16)
        after = engine.reading()
        found_s = cost.prefill_and_decode_s(interval(before, after).work)
        before, prefill_s, decode_s = after, prefill_s + found_s[0], decode_s + found_s[1]
    assert prefill_s / (prefill_s + decode_s) == pytest.approx(engine.prefill_s / engine.busy_s, abs=0.01)


def test_loads_barely_beyond_the_knee_say_nothing_of_further_sequences() -> None:
    cost, off = COSTS["graphs"], 1.1  # the load beyond the knee was slower for some other reason
    works = [CountedWork(1.0, 100.0, decode_tokens=100.0 * each) for each in (8, 32, 64.3)]
    samples = [Sample(each, 100.0 * cost.decode_s(each.decoding), 1.0) for each in works]
    samples[-1] = replace(samples[-1], took_s=off * samples[-1].took_s)
    found = fit_step_cost(samples)
    assert found is not None
    assert found.decode_s(300.0) < 3.0 * cost.decode_s(300.0)


def test_one_phase_alone_has_no_interval_and_an_idle_engine_no_share() -> None:
    engine, estimator = Engine(COSTS["graphs"], 1), PhaseEstimator()
    before = engine.reading()
    engine.now_s += 0.5
    idle = estimator.observe(interval(before, engine.reading()))
    assert idle is not None
    assert (idle.busy_s, idle.prefill_s) == (0.0, 0.0)
    engine.left = [10_000] * 32
    decoding = None
    for _ in range(20):
        before = engine.reading()
        until_s = engine.now_s + 0.5
        while engine.now_s < until_s:
            engine._step(1)
        decoding = estimator.observe(interval(before, engine.reading()))
    assert decoding is not None
    assert decoding.busy_s == pytest.approx(0.5, abs=0.01)
    assert (decoding.prefill_low_s, decoding.prefill_high_s) == (0.0, 0.0)


DATA = Path(os.environ.get("FULCRUM_DATA", "")) / "vllm_h200"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recording", "mean", "worst", "busy"), [("default", 0.015, 0.04, 0.015), ("eager", 0.015, 0.04, 0.02)]
)
def test_shares_of_a_recorded_vllm_are_close_to_those_of_cuda_events(
    recording: str, mean: float, worst: float, busy: float
) -> None:
    """One vLLM 0.32.0 on an H200, /metrics twice a second; no constant here was fitted to its truth."""
    if not (DATA / f"{recording}.truth.json").is_file():
        pytest.skip(f"FULCRUM_DATA names no folder with vllm_h200/{recording}.truth.json")
    truth = json.loads((DATA / f"{recording}.truth.json").read_text())["phases"]
    server = ObservedServer()
    cut = [phase["to_s"] for phase in truth]
    off, off_busy, covered = [], [], []
    with gzip.open(DATA / f"{recording}.scrapes.jsonl.gz", "rt") as lines:
        for line in lines:
            scrape = json.loads(line)
            if "m" not in scrape:
                continue
            server.scraped("\n".join(scrape["m"]), scrape["t"])
            if cut and scrape["t"] >= cut[0]:
                phase = truth[len(truth) - len(cut)]
                cut.pop(0)
                found = server.shares(scrape["t"])
                if phase["prefill_share_of_busy"] is None:
                    continue
                assert found.busy is not None
                assert found.prefill is not None
                assert found.low is not None
                assert found.high is not None
                off.append(abs(found.prefill - phase["prefill_share_of_busy"]))
                off_busy.append(abs(found.busy - phase["busy_share"]))
                covered.append(found.low <= phase["prefill_share_of_busy"] <= found.high)
    assert len(off) == 7
    assert np.mean(off) < mean, off
    assert max(off) < worst, off
    assert np.mean(off_busy) < busy, off_busy
    assert sum(covered) >= 6, covered


@pytest.mark.slow
def test_the_busy_share_of_a_recorded_prefill_server_is_close_to_that_of_cuda_events() -> None:
    """One-token answers, so that nothing but prompts' times says how long steps took."""
    if not (DATA / "prefill_role.truth.json").is_file():
        pytest.skip("FULCRUM_DATA names no folder with vllm_h200/prefill_role.truth.json")
    truth = json.loads((DATA / "prefill_role.truth.json").read_text())["phases"]
    server, off = ObservedServer(), []
    with gzip.open(DATA / "prefill_role.scrapes.jsonl.gz", "rt") as lines:
        for scrape in map(json.loads, lines):
            if "m" not in scrape:
                continue
            server.scraped("\n".join(scrape["m"]), scrape["t"])
            if len(off) < len(truth) and scrape["t"] >= truth[len(off)]["to_s"]:
                found = server.shares(scrape["t"])
                assert found.busy is not None
                assert found.prefill == 1.0
                off.append(abs(found.busy - truth[len(off)]["busy_share"]))
    assert len(off) == 4
    assert np.mean(off) < 0.015, off
    assert max(off) < 0.03, off


class PrefillEngine:
    """An engine of prompts alone that schedules a step ahead of the one that runs, as vLLM does."""

    BASE_S, TOKEN_S, BUDGET = 0.008, 22e-6, 8192

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.now_s = self.next_s = self.busy_s = 0.0
        self.waiting: list[int] = []
        self.steps: list[tuple[float, float, list[int]]] = []
        """The time at which each step in flight was scheduled, its end, and its prompts."""
        self.counts = dict.fromkeys(("samples", "prompt", "first", "prefills_s"), 0.0)

    def run(self, until_s: float, rate: float, isl: int) -> None:
        while True:
            end_s = self.steps[0][1] if self.steps else float("inf")
            self.now_s = min(until_s, self.next_s, end_s)
            if self.now_s == until_s:
                return
            if self.now_s == end_s:
                self._finish()
            else:
                self.waiting.append(max(1, min(int(self.random.gamma(4.0, isl / 4)), self.BUDGET)))
                self.next_s += self.random.exponential(1 / rate)
            while self.waiting and len(self.steps) < 2:
                self._schedule()

    def _schedule(self) -> None:
        prompts = [self.waiting.pop(0)]
        while self.waiting and sum(prompts) + self.waiting[0] <= self.BUDGET:
            prompts.append(self.waiting.pop(0))
        took_s = self.BASE_S + self.TOKEN_S * sum(prompts)
        begin_s = self.steps[-1][1] if self.steps else self.now_s
        self.busy_s += took_s
        self.steps.append((self.now_s, begin_s + took_s, prompts))

    def _finish(self) -> None:
        scheduled_s, end_s, prompts = self.steps.pop(0)
        self.counts["samples"] += 1
        self.counts["prompt"] += sum(prompts)
        self.counts["first"] += len(prompts)
        self.counts["prefills_s"] += len(prompts) * (end_s - scheduled_s)

    def reading(self) -> Reading:
        counts, first = self.counts, self.counts["first"]
        running = float(sum(len(each[2]) for each in self.steps))
        return Reading(
            self.now_s, counts["samples"], counts["prompt"], first, first, 0.0, 0.0, first, counts["prefills_s"],
            running, float(len(self.waiting)), ((float("inf"), counts["samples"]),),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_step_costs_of_a_prefill_server_are_learned_from_the_overlap_of_prompts(seed: int) -> None:
    """Few long prompts to many short ones, from a tenth of the time to nearly all of it: within 8 points."""
    engine, estimator = PrefillEngine(seed), PhaseEstimator()
    before, off = engine.reading(), []
    for load, (rate, isl) in enumerate(((3, 1_500), (10, 1_500), (40, 300), (70, 150), (12, 2_500)), 1):
        busy_s, found_s, at_s = engine.busy_s, 0.0, engine.now_s
        while engine.now_s < 30 * load:
            engine.run(engine.now_s + 0.5, rate, isl)
            after = engine.reading()
            estimate = estimator.observe(interval(before, after))
            before = after
            found_s += estimate.busy_s if estimate else 0.0
        off.append(abs(found_s - (engine.busy_s - busy_s)) / (engine.now_s - at_s))
    assert max(off) < 0.08, off
    assert np.mean(off) < 0.03, off


def exposition(change: Callable[[str], str] = str) -> str:
    return change(
        "\n".join(
            f'vllm:{name}{{engine="0",model_name="m"}} {value}'
            for name, value in {
                "iteration_tokens_total_count": 10,
                "iteration_tokens_total_sum": 20,
                "prompt_tokens_total": 300,
                "generation_tokens_total": 40,
                "time_to_first_token_seconds_count": 2,
                "num_requests_running": 3,
                "num_requests_waiting": 1,
            }.items()
        )
    )


def read_vllm(text: str) -> dict[str, Reading]:
    return VllmParser().parse(text.encode(), 1.0).readings


def test_computed_prompt_tokens_are_used_if_vllm_reports_them_separately() -> None:
    assert read_vllm(exposition())["0"].prompt_tokens == 300
    apart = '\nvllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="%s"} %d'
    reported = exposition() + apart % ("local_compute", 100) + apart % ("local_cache_hit", 200)
    assert read_vllm(reported)["0"].prompt_tokens == 100


def test_engines_of_one_server_are_read_separately_and_their_shares_add_up() -> None:
    text = exposition() + "\n" + exposition(lambda one: one.replace('engine="0"', 'engine="1"'))
    assert set(read_vllm(text)) == {"0", "1"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "no metric of vLLM's"),
        ("<html>", "no metric of vLLM's"),
        ("vllm:num_requests_running{ 3", "not a Prometheus exposition"),
        ("vllm:num_requests_running 3", "vllm:iteration_tokens_total_count"),
    ],
)
def test_metrics_that_are_not_vllms_are_refused_by_name(text: str, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        read_vllm(text)


def test_a_restart_causes_no_spike() -> None:
    server = ObservedServer()
    server.scraped(exposition(), 1.0)
    server.scraped(exposition(lambda text: text.replace(" 300", " 5").replace(" 40", " 1")), 2.0)
    assert server.shares(2.0).busy is None
