"""The command for eight GPUs: its plan, the lab's figures, what deviations mean, and a rehearsal without a GPU."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from libs.lab.hardware import resolve
from load.gpu import engine_steps, serve
from load.gpu.against_profile import MODEL
from load.gpu.bench_gpu import ROOT
from load.gpu.deviations import judge_serving, judge_steps
from load.gpu.eight import GPUS, LINES, Load, chosen, expected, is_off, key_of, main, parser, part_of, serving

TIMES = {"ttft_ms": {"p50": 100.0, "p99": 200.0}, "tpot_ms": {"p50": 5.0, "p99": 6.0}}
SHORT = "poisson:rate=8,isl=2000,osl=40,seconds=4"


def options(*words: str) -> argparse.Namespace:
    found = parser().parse_args(words)
    found.hardware = resolve(MODEL, "h200")
    return found


def test_every_line_has_a_command_that_its_script_accepts_and_all_fit_into_an_hour() -> None:
    requested = options("--model", "/model")
    for name, line in chosen(requested).items():
        part = part_of(line, requested)
        if line.load is not None:
            assert part is not None and len(line.load.roles) == GPUS
            found = serve.parser().parse_args(part.arguments)
            assert (found.engine, found.trace, found.auto) == ("vllm", line.load.trace, line.load.auto)
        elif name == "steps":
            assert part is not None
            engine_steps.parser().parse_args(part.command("cuda:0", line.limit_s)[1:])
    assert sum(line.limit_s for line in LINES.values()) <= 3600


def test_the_lab_answers_every_request_and_expects_more_wait_of_more_load() -> None:
    hardware = resolve(MODEL, "h200")
    calm, busy = (
        expected(Load(1, 1, 0, SHORT.replace("rate=8", f"rate={rate}")), hardware, kv_mb=20_000, link_gbps=80.0)
        for rate in (2, 40)
    )
    assert calm["answered"] == calm["requests"] > 0
    assert calm["ttft_ms"]["p99"] < busy["ttft_ms"]["p99"]


def test_a_plan_shows_commands_and_expected_figures_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("load.gpu.eight.card", lambda: {"gpus": [], "driver": None})
    assert main(parser().parse_args(["--dry-run", "--lines", "gpus", "low", "--device", "h100"])) == 0
    said = capsys.readouterr().out
    assert "h100" in said and "load.gpu.serve --prefill 4 --decode 4" in said
    assert "the lab expects 361 of 361 answered, TTFT" in said


def test_the_page_has_the_labs_figures_of_today() -> None:
    load = LINES["low"].load
    assert load is not None
    found = expected(load, resolve(MODEL, "h200"), kv_mb=40 << 10, link_gbps=80.0)
    times = [
        ", ".join(f"{found[name][of]:.{digits}f}" for of in ("p50", "p99"))
        for name, digits in (("ttft_ms", 0), ("tpot_ms", 1))
    ]
    (row,) = [line for line in (ROOT / "docs" / "gpu.md").read_text().splitlines() if line.startswith("| `low`")]
    assert row.endswith(f"| {times[0]} | {times[1]} |"), "run load.gpu.eight --dry-run and put its figures there"


def test_every_line_of_the_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in LINES if f"`{name}`" not in page] == []


def test_figures_within_their_band_are_as_expected() -> None:
    figures = {**TIMES, "answered": 5, "requests": 5, "moves": 3, "move_effect_ms": {"p50": 4.0}}
    assert all(each.ok for each in judge_serving(figures, TIMES, moves=3))


@pytest.mark.parametrize(
    ("change", "what", "means"),
    [
        ({"answered": 4}, "answered", "`failed`"),
        ({"ttft_ms": {"p50": 300.0, "p99": 200.0}}, "ttft_ms p50", "TCP"),
        ({"tpot_ms": {"p50": 9.0, "p99": 6.0}}, "tpot_ms p50", "lab calibrate"),
        ({"tpot_ms": {"p50": 2.0, "p99": 6.0}}, "tpot_ms p50", "faster"),
        ({"ttft_ms": {"p50": 100.0, "p99": 900.0}}, "ttft_ms p99", "--again"),
        ({"client_late_ms": 400.0}, "client_late_ms", "client"),
        ({"moves": 1}, "move_effect_ms p50", "moves_ended_by"),
    ],
)
def test_a_figure_that_is_off_says_what_that_means(change: dict[str, Any], what: str, means: str) -> None:
    figures = {**TIMES, "answered": 5, "requests": 5, "moves": 3, "move_effect_ms": {"p50": 4.0}, **change}
    off = [each for each in judge_serving(figures, TIMES, moves=3) if not each.ok]
    assert [each.what for each in off] == [what]
    assert means in off[0].means


def test_steps_are_judged_by_their_kind() -> None:
    rows = [
        {"prompt": 512, "batch": 0, "ratio": 1.05},
        {"prompt": 0, "batch": 8, "ratio": 1.5},
        {"prompt": 512, "batch": 8, "ratio": 1.1},
    ]
    assert [(each.found, each.ok) for each in judge_steps(rows)] == [(1.05, True), (1.5, False), (1.1, True)]
    assert not judge_steps([])[0].ok


def test_a_line_is_run_again_if_its_command_card_or_versions_change_and_not_for_a_new_folder_of_weights() -> None:
    machine = {"card": {"gpus": ["H100"]}, "versions": {"vllm": "0.32.0"}}
    line, requested, again = LINES["low"], options(), options()
    for each, folder in ((requested, "/first"), (again, "/second")):
        each.model = each.written = Path(folder)
    key = key_of(line, requested, machine)
    assert key_of(line, again, machine) == key
    assert key_of(line, options("--model", "/named"), machine) != key
    assert key_of(line, options("--kv-mb", "9000"), machine) != key
    assert key_of(line, requested, {**machine, "versions": {"vllm": "0.33.0"}}) != key


def test_times_of_a_rehearsal_do_not_fail_it() -> None:
    late = {"verdicts": [{"what": "ttft_ms p50", "ok": False}, {"what": "answered", "ok": True}]}
    assert is_off(late, rehearsal=False) and not is_off(late, rehearsal=True)
    assert is_off({"verdicts": [{"what": "answered", "ok": False}]}, rehearsal=True)


def test_without_a_gpu_the_command_ends_and_names_what_needs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("load.gpu.eight.card", lambda: {"gpus": [], "driver": None})
    assert main(parser().parse_args(["--lines", "low"])) == 1
    assert "--rehearse" in capsys.readouterr().err


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_rehearsal_serves_on_simulated_gpus_and_goes_on_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "eight.json"
    words = ["--rehearse", "--lines", "moves", "--out", str(out)]
    assert main(parser().parse_args(words)) == 0
    kept = json.loads(out.read_text())
    (record,) = kept["lines"].values()
    figures = record["figures"]
    assert figures["answered"] == figures["requests"] == record["expected_by_lab"]["answered"]
    assert kept["rehearsal"] and set(kept) >= {"card", "versions", "revision"}

    ran: list[str] = []

    def fake(name: str, *_: Any) -> dict[str, Any]:
        ran.append(name)
        return {"exit_code": 1, "seconds": 0.0, "verdicts": [{"what": name, "found": None, "expected": None,
                                                               "ok": False, "means": "cut"}]}  # fmt: skip

    monkeypatch.setattr("load.gpu.eight.run_line", fake)
    words[2:3] = ["low", "moves"]
    words[1:2] = ["--lines"]
    assert main(parser().parse_args(words)) == 1
    assert main(parser().parse_args(words)) == 1
    assert ran == ["low", "low"], "what ended well is kept, and what failed is run again"
    assert json.loads(out.read_text())["lines"]["moves"] == record


def test_a_rehearsal_leaves_a_worker_of_each_role_while_one_moves() -> None:
    load = LINES["moves"].load
    assert load is not None
    small = load.rehearsed()
    assert small.decode > 1 and small.moves
    part = serving(small, options("--rehearse"))
    assert serve.parser().parse_args(part.arguments).engine == "sim"
