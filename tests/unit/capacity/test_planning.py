"""Tests of capacity plans from inputs, over given tables instead of measured ones."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.capacity.inputs import PlanInput, input_from_json, input_json, input_of_trace
from libs.capacity.measure import Bench, edge
from libs.capacity.planning import (
    PlanQuery,
    bench_of,
    busiest_stretch,
    check_plan,
    fingerprint,
    part_of,
    plan_capacity,
    plan_from_json,
    plan_json,
    reported_hardware,
    rounded,
)
from libs.capacity.traffic import PlanTraffic, gap_cv, made_trace
from libs.cli.forecast.capacity import moment_text, stretches_per_row
from libs.cli.forecast.live import clock_time
from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.demand.history import Mix
from libs.demand.wire import plan_message, plan_of
from libs.lab.hardware import resolve
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.policy.capacity import CapacityPlan, WorkerKind, wishes
from libs.policy.forecast.history import SERIES, DemandHistory
from libs.policy.speed import Speed

SLO = parse_slo("ttft=2s,tpot=50ms")
HARDWARE = resolve("llama-3.1-8b", "h100")


def daily(days: int = 6) -> PlanInput:
    """Return arrivals with a peak at two in the afternoon."""
    hours = np.arange(days * 96) / 4 % 24
    noise = np.exp(np.random.default_rng(1).normal(0, 0.05, len(hours)))
    requests = (20 + 180 * np.exp(-(((hours - 14) / 3) ** 2))) * noise
    history = DemandHistory(900.0, 0.0, requests, requests * 1000, requests * 250)
    kind = WorkerKind(Speed(HARDWARE.profile.step_time, 2048, measured=True), 1, 256, 400_000)
    return PlanInput(
        "llama", history, 1.0, Mix(1000.0, 250.0, 0.0, 1.0), np.array([1.0, 1.1]), kind, {"prefill": 4, "decode": 4}
    )


def table_folder(folder: Path, found: PlanInput, requested: PlanQuery) -> Path:
    """Write tables as if the lab had measured 0.6, 1.4 and 3.2 workers' worth of work on 1, 2 and 4."""
    table = {"workers": [1, 2, 4], "work": [0.6, 1.4, 3.2]}
    name = fingerprint(rounded(bench_of(found, requested, HARDWARE)))
    (folder / f"{name}.json").write_text(json.dumps({"prefill": table, "decode": table}))
    return folder


def plan_row(tmp_path: Path, requested: PlanQuery) -> dict[str, Any]:
    found = daily()
    planned = plan_capacity(found, requested, HARDWARE, table_folder(tmp_path, found, requested))
    return plan_json(found, requested, planned, None)


def test_the_plan_follows_the_day_and_reports_when_capacity_runs_short(tmp_path: Path) -> None:
    row = plan_row(tmp_path, PlanQuery(SLO, 86_400.0, gpu_hour=2.0))
    gpus = row["pools"]["prefill"]["gpus"]
    starts = row["starts_unix_s"]
    hour = [start / 3600 % 24 for start in starts]
    assert len(gpus) == 96
    assert 12 <= hour[int(np.argmax(gpus))] <= 16
    assert gpus[0] < max(gpus)
    short_h = row["pools"]["prefill"]["runs_short_unix_s"]["p50"] / 3600 % 24
    assert 8 <= short_h <= 14
    assert [each["phase"] for each in row["shortages"]] == ["prefill", "decode"]
    assert row["cost"]["hourly"] == pytest.approx(2 * row["gpu_hours"]["hourly"], abs=0.02)
    assert row["gpu_hours"]["hourly"] < row["gpu_hours"]["fixed"]
    json.dumps(row, allow_nan=False)


def test_more_traffic_and_longer_prompts_need_more_gpus_in_their_pool(tmp_path: Path) -> None:
    most = {}
    for name, requested in {
        "now": PlanQuery(SLO, 86_400.0),
        "traffic": PlanQuery(SLO, 86_400.0, traffic=1.5),
        "isl": PlanQuery(SLO, 86_400.0, isl=2.0),
    }.items():
        row = plan_row(tmp_path, requested)
        most[name] = {phase: row["pools"][phase]["most"] for phase in ("prefill", "decode")}
    assert most["traffic"]["prefill"] > most["now"]["prefill"]
    assert most["traffic"]["decode"] > most["now"]["decode"]
    assert most["isl"]["prefill"] >= 1.8 * most["now"]["prefill"]


def test_images_need_more_prefill_workers_by_the_time_of_encoding_them(tmp_path: Path) -> None:
    requested = PlanQuery(SLO, 86_400.0)
    texts = daily()
    assert texts.kind is not None
    each_s = plan_capacity(texts, requested, HARDWARE, table_folder(tmp_path, texts, requested)).bench.work_each()
    # One image comes with each prompt of a thousand tokens, and takes as long as the prompt.
    encode_token_ns = each_s["prefill"] * 1e9 / 1000
    images = replace(texts, kind=replace(texts.kind, encode_token_ns=encode_token_ns))
    found = {
        name: plan_capacity(each, requested, HARDWARE, table_folder(tmp_path, each, requested))
        for name, each in (("texts", texts), ("images", images))
    }
    ratio = found["images"].work["prefill"] / found["texts"].work["prefill"]
    assert ratio == pytest.approx(2, rel=0.1)
    assert found["images"].work["decode"] == pytest.approx(found["texts"].work["decode"])
    assert found["images"].plan.most("prefill") > 1.8 * found["texts"].plan.most("prefill")
    assert found["images"].plan.most("decode") == found["texts"].plan.most("decode")
    note = "encoding images is 50% of prefill's work, at the pace of the present workers"
    assert note in plan_json(images, requested, found["images"], None)["notes"]
    assert not [each for each in plan_json(texts, requested, found["texts"], None)["notes"] if "images" in each]


def test_the_lab_charges_images_to_prompts_and_not_to_answers() -> None:
    bench = replace(bench_of(daily(), PlanQuery(SLO, 3600.0), HARDWARE), encode_token_ns=1e6)
    took, before = bench.lab_hardware.profile.step_time, HARDWARE.profile.step_time
    floor_ns, token_ns = before.prefill_floor_ns, before.prefill_token_ns
    assert took.prefill_floor_ns > floor_ns
    assert replace(took, prefill_floor_ns=floor_ns) == replace(before, prefill_token_ns=token_ns + 1e6)


def bench_of_prompts(slo: str, tokens: int, encode_token_ns: float) -> Bench:
    model = replace(
        HARDWARE.profile.step_time,
        prefill_fixed_ns=0.0,
        prefill_token_ns=27_000.0,
        prefill_token_squared_ns=0.0,
        prefill_floor_ns=7e6,
    )
    hardware = replace(HARDWARE, profile=replace(HARDWARE.profile, step_time=model), chunk_tokens=tokens)
    return Bench(hardware, parse_slo(slo), PlanTraffic([(tokens, 20)], 1.0), 64, encode_token_ns=encode_token_ns)


@pytest.mark.parametrize("tokens, alone_ms", [(100, 10.0), (1000, 57.0)])
def test_the_floor_hides_no_encoding_in_the_plan_or_in_the_lab(tokens: int, alone_ms: float) -> None:
    bench = bench_of_prompts("ttft=2s,tpot=50ms", tokens, 30_000.0)
    assert bench.work_each()["prefill"] * 1e3 == pytest.approx(alone_ms)
    assert bench.lab_hardware.profile.step_time.chunks_ns(tokens, tokens**2) / 1e6 == pytest.approx(alone_ms)


def test_a_floor_without_images_stays_as_it_is() -> None:
    bench = bench_of_prompts("ttft=2s,tpot=50ms", 100, 0.0)
    assert bench.lab_hardware == bench.hardware


def test_ttft_limits_in_multiples_count_images_in_the_queue_and_in_the_lab() -> None:
    # A prompt takes 7 ms and its images 23 ms: 2x allows 60 ms, and without images it would allow less than it takes.
    bench = bench_of_prompts("ttft=2x,tpot=50ms", 100, 230_000.0)
    assert bench.rough_attempt("prefill", 1, 0.5) > 0.95
    assert bench.attempt("prefill", 1, 0.5) > 0.95


def test_prompts_that_cost_nothing_in_a_run_of_decodes_keep_their_ttft_limits() -> None:
    bench = bench_of_prompts("ttft=3x,tpot=50ms", 1000, 0.0)
    assert bench.rough_attempt("decode", 1, 1.0) == 1.0
    assert bench.attempt("decode", 1, 1.0) == 1.0


@pytest.mark.parametrize("days, ahead_days, said", [(2, 5, True), (6, 1, False)])
def test_a_plan_far_beyond_past_demand_says_so(tmp_path: Path, days: int, ahead_days: int, said: bool) -> None:
    found, requested = daily(days), PlanQuery(SLO, ahead_days * 86_400.0)
    folder = table_folder(tmp_path, found, requested)
    notes = plan_capacity(found, requested, HARDWARE, folder).notes
    assert any("times the busiest stretch so far" in note for note in notes) == said


@pytest.mark.parametrize("growth", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("scale", [2**-6, 1, 2**10])
def test_a_plan_asks_for_no_more_than_history_and_the_growth_allowance_support(
    tmp_path: Path, growth: float, scale: float
) -> None:
    found, query = daily(2), PlanQuery(SLO, 5 * 86_400.0, confidence=0.99, growth=growth)
    requests, prefill, decode = (scale * found.history.series(name) for name in SERIES)
    found = replace(found, history=DemandHistory(900.0, 0.0, requests, prefill, decode), peaks=np.ones(1))
    planned = plan_capacity(found, query, HARDWARE, table_folder(tmp_path, found, query))
    each = planned.bench.work_each()["prefill"]
    work = planned.work["prefill"].max(axis=0) / each * planned.bench.traffic.prompt_tokens / 1000
    assert work.max() <= 1.001 * growth * requests.max()
    nights = np.array([start / 3600 % 24 for start in planned.plan.starts_s]) < 3
    assert work[nights].max() <= 1.001 * growth * requests[: 7 * 4].max()
    assert any(
        f"{growth:g} times the busiest stretch so far around their time of day" in note for note in planned.notes
    )


def test_a_plan_within_its_growth_allowance_says_so(tmp_path: Path) -> None:
    found, query = daily(6), PlanQuery(SLO, 86_400.0)
    notes = plan_capacity(found, query, HARDWARE, table_folder(tmp_path, found, query)).notes
    assert "no stretch is planned for more than 2 times past demand around its time of day (--growth)" in notes


def test_a_plan_is_deterministic(tmp_path: Path) -> None:
    assert plan_row(tmp_path, PlanQuery(SLO, 7200.0)) == plan_row(tmp_path, PlanQuery(SLO, 7200.0))


def test_a_planner_decodes_the_plan_that_the_metrics_service_sends(tmp_path: Path) -> None:
    row = plan_row(tmp_path, PlanQuery(SLO, 86_400.0, spare=1))
    sent = plan_message(plan_from_json(row), "llama", "metrics-0", 1).SerializeToString()

    class Kept:
        def plan(self, model: str) -> CapacityPlan | None:
            return plan_of(PlanMessage.FromString(sent)) if model == "llama" else None

    start_s = float(row["starts_unix_s"][0])
    now, noon = wishes(Kept(), "llama", start_s, 240.0), wishes(Kept(), "llama", start_s + 13.5 * 3600, 240.0)
    assert 0 < now["prefill"] < noon["prefill"]
    assert wishes(Kept(), "another", start_s, 240.0) == {}


def test_a_plans_input_survives_a_json_round_trip() -> None:
    found = daily()
    assert found.kind is not None
    found = replace(found, kind=replace(found.kind, encode_token_ns=1234.5))
    again = input_from_json(json.loads(json.dumps(input_json(found))))
    assert again.mix == found.mix
    assert again.there == found.there
    assert again.kind == found.kind
    assert np.allclose(again.history.decode, found.history.decode)


def test_a_trace_is_planned_with_its_own_lengths_and_bursts() -> None:
    found = input_of_trace(generate("gamma:rate=20,isl=500,osl=100,seconds=1800,cv=3", seed=1), "llama-3.1-8b")
    assert found.known
    assert found.mix.prompt_tokens == pytest.approx(500, rel=0.1)
    assert found.mix.dispersion > 3
    assert len(found.history) == 3


def test_an_slo_that_even_a_single_sequence_misses_is_refused_with_a_message() -> None:
    found, requested = daily(), PlanQuery(parse_slo("ttft=2s,tpot=1ms"), 3600.0)
    with pytest.raises(InvalidRequest, match=r"one sequence alone takes [0-9.]+ ms a token; set --slo with") as caught:
        plan_capacity(found, requested, HARDWARE)
    least = re.search(r"with (tpot=[0-9]+ms) or more", caught.value.message)
    assert least is not None
    plan_capacity(found, PlanQuery(parse_slo(f"ttft=2s,{least.group(1)}"), 3600.0), HARDWARE)


def test_traffic_that_no_pool_serves_in_time_is_refused_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attempt", "rough_attempt"):
        monkeypatch.setattr(Bench, name, lambda *_: 0.98)
    with pytest.raises(InvalidRequest, match="at no rate do 4 prefill workers serve 99% of these requests"):
        plan_capacity(daily(), PlanQuery(SLO, 3600.0), HARDWARE)


def test_the_edge_is_found_within_seven_percent_from_either_side() -> None:
    for start in (0.5, 5.0, 50.0):
        assert 4.6 <= edge(lambda rate: rate <= 5.0, start) <= 5.0
    assert edge(lambda rate: False, 5.0) == 0.0


def test_an_edge_hundreds_of_times_below_the_start_takes_few_attempts() -> None:
    tried: list[float] = []

    def good(rate: float) -> bool:
        tried.append(rate)
        return rate <= 1.0

    assert 0.93 <= edge(good, 300.0, step=1.15) <= 1.0
    assert len(tried) <= 14


@pytest.mark.slow
def test_a_burst_of_long_prompts_does_not_limit_decode_by_a_link_that_is_faster_than_prefill() -> None:
    bench = Bench(HARDWARE, SLO, PlanTraffic([(4000, 4)], 8.0), 256)
    rate = 0.5 / bench.work_each()["decode"]
    assert bench.attempt("decode", 1, rate) >= 0.99
    prefill_gbps = HARDWARE.profile.kv_bytes_per_token * 8 / HARDWARE.profile.step_time.prefill_token_ns
    slow = replace(bench, hardware=replace(HARDWARE, link_gbps=prefill_gbps / 10))
    assert slow.attempt("decode", 1, rate) < 0.5


def test_rows_of_a_long_plan_start_at_the_same_times_each_day() -> None:
    assert stretches_per_row(24, 3600.0) == 1
    assert stretches_per_row(168, 3600.0) == 8
    assert stretches_per_row(2 * 24 * 6, 600.0) == 12
    assert stretches_per_row(1000, 3600.0) == 42, "more rows than days fit"


def test_simulated_arrivals_are_as_bursty_as_the_measured_ones() -> None:
    trace = made_trace([(10, 10)], 50.0, gap_cv(4.0), 2000.0, 1)
    counts = np.bincount([each.arrival_ns // 10**10 for each in trace.requests])
    assert counts.var() / counts.mean() == pytest.approx(4.0, rel=0.35)


def test_hardware_reported_by_workers_is_used_as_reported() -> None:
    kind = daily().kind
    assert kind is not None
    assert reported_hardware(kind, "llama").profile.step_time == kind.speed.step_time


@pytest.mark.slow
def test_a_plan_measures_its_pools_in_the_lab_once_and_then_uses_the_cached_result(tmp_path: Path) -> None:
    found, requested, notes = daily(), PlanQuery(SLO, 7200.0), list[str]()
    first = plan_capacity(found, requested, HARDWARE, tmp_path, notes.append)
    measured = list(notes)
    again = plan_capacity(found, requested, HARDWARE, tmp_path, notes.append)
    assert {note.split()[1] for note in measured} == {"prefill", "decode"}
    assert notes == measured
    assert first.tables == again.tables
    for table in first.tables.values():
        assert table.workers == (1, 2, 4)
        assert 0.5 < table.work[0] <= 1.0
    check = check_plan(first)
    assert check["prefill_workers"] + check["decode_workers"] <= 24
    assert check["slo_attainment"] > 0.9


def test_the_checked_stretch_has_the_most_work_of_those_with_the_most_workers() -> None:
    assert busiest_stretch([1, 2, 2, 2, 1], np.array([9.0, 3.0, 4.0, 2.0, 9.0])) == 2


def test_hours_of_a_demand_file_are_shown_as_its_clock_has_them() -> None:
    assert moment_text(5400.0, relative=True) == "1.5 h"
    assert moment_text(343 * 3600.0, relative=True) == "14 d 7 h"
    unix_s = 1_794_182_400.0
    assert moment_text(unix_s, relative=True) == moment_text(unix_s, relative=False) == clock_time(unix_s)


def test_a_part_of_a_plan_has_the_same_balance() -> None:
    assert part_of({"prefill": 10, "decode": 20}, 0.3) == (0.3, {"prefill": 3, "decode": 6})
    assert part_of({"prefill": 3, "decode": 7}, 1.0) == (1.0, {"prefill": 3, "decode": 7})
    assert part_of({"prefill": 1, "decode": 9}, 0.1)[1]["prefill"] == 1


def test_the_queue_estimate_finds_the_rate_at_which_a_pool_is_full() -> None:
    bench = bench_of(daily(), PlanQuery(SLO, 7200.0), HARDWARE)
    for phase, each in bench.work_each().items():
        assert bench.rough_attempt(phase, 2, 1.0 / each) == 1.0
        assert bench.rough_attempt(phase, 2, 3.5 / each) < 0.9
