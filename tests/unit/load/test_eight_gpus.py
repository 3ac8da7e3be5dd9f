"""The command for eight GPUs: its plan, the lab's figures, what deviations mean, and a rehearsal without a GPU."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.lab.hardware import resolve
from load.gpu import engine_steps, serve
from load.gpu.against_profile import MODEL
from load.gpu.bench_gpu import ROOT, Outcome
from load.gpu.deviations import judge_moves, judge_serving, judge_steps
from load.gpu.eight import (
    GPUS,
    LINES,
    Load,
    chosen,
    expected,
    is_off,
    judgements,
    key_of,
    lab_figures,
    main,
    parser,
    part_of,
    serving,
)
from load.gpu.shapes import LLAMA_8B, SHAPES, write_shape

pytestmark = pytest.mark.usefixtures("quiet_lab")

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


@pytest.mark.parametrize(("device", "page"), [("h200", "gpu.md"), ("h100", "results/gpu-evidence.md")])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "low" else pytest.mark.slow)
    for name, line in LINES.items() if line.load is not None and not line.load.moves
])  # fmt: skip
def test_pages_have_the_labs_figures_of_today(name: str, device: str, page: str) -> None:
    requested = options()
    requested.hardware = resolve(MODEL, device)
    found = lab_figures(LINES[name], requested)
    assert found is not None
    times = [
        ", ".join(f"{found[time][of]:.{digits}f}" for of in ("p50", "p99"))
        for time, digits in (("ttft_ms", 0), ("tpot_ms", 1))
    ]
    # The lab does not simulate role moves by hand.
    same = [each for each, line in LINES.items() if line.load and replace(line.load, moves=0) == LINES[name].load]
    rows = [line.split(" | ") for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| `")]
    shown = {each: [cell.strip(" |") for cell in row[-2:]] for row in rows for each in same if f"`{each}`" in row[0]}
    assert shown == dict.fromkeys(same, times), "put the figures of load.gpu.eight --dry-run there"


def test_every_line_of_the_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in LINES if f"`{name}`" not in page] == []


def test_figures_within_their_band_are_as_expected() -> None:
    figures = {**TIMES, "answered": 5, "requests": 5, "moves": 3, "move_effect_ms": {"p50": 4.0}}
    assert all(each.ok for each in [*judge_serving(figures, TIMES), *judge_moves(figures, 3)])


@pytest.mark.parametrize(
    ("change", "what", "means"),
    [
        ({"answered": 4}, "answered", "`failed`"),
        ({"ttft_ms": {"p50": 300.0, "p99": 200.0}}, "ttft_ms p50", "TCP"),
        ({"tpot_ms": {"p50": 9.0, "p99": 6.0}}, "tpot_ms p50", "lab calibrate"),
        ({"tpot_ms": {"p50": 2.0, "p99": 6.0}}, "tpot_ms p50", "faster"),
        ({"ttft_ms": {"p50": 100.0, "p99": 900.0}}, "ttft_ms p99", "--again"),
        ({"client_late_ms": 400.0}, "client_late_ms", "client"),
        ({"tpot_ms": {"p50": 5.0}}, "tpot_ms p99", "cannot be judged"),
    ],
)
def test_a_figure_that_is_off_says_what_that_means(change: dict[str, Any], what: str, means: str) -> None:
    (off,) = [each for each in judge_serving({**TIMES, "answered": 5, "requests": 5, **change}, TIMES) if not each.ok]
    assert off.what == what and means in off.means


@pytest.mark.parametrize(
    ("change", "what", "means"),
    [
        ({"answered": 4}, "answered while roles move", "`failed`"),
        ({"moves": 1}, "move_effect_ms p50", "moves_ended_by"),
        ({"move_effect_ms": {"p50": 51.0}}, "move_effect_ms p50", "planner's log"),
        ({"move_effect_ms": {"p50": None}}, "move_effect_ms p50", "refused"),
    ],
)
def test_moves_are_judged_by_their_number_their_time_and_the_answers(
    change: dict[str, Any], what: str, means: str
) -> None:
    figures = {"answered": 5, "requests": 5, "moves": 3, "move_effect_ms": {"p50": 4.0}, **change}
    (off,) = [each for each in judge_moves(figures, 3) if not each.ok]
    assert off.what == what and means in off.means


@pytest.mark.parametrize("name", ["low", "moves"])
def test_a_serving_line_without_figures_is_off(name: str) -> None:
    judged = judgements(name, LINES[name], Outcome(name, 0, None, []), TIMES, "NVIDIA H200")
    assert judged and not any(each.ok for each in judged)


async def test_moves_go_there_and_back_at_equal_distances_within_the_load() -> None:
    class Changer:
        async def move_one(self) -> Any:
            return now_s, "there"

        async def move_back(self) -> Any:
            return now_s, "back"

    now_s = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    changer: Any = Changer()
    held: list[Any] = []
    await serve.move_there_and_back(changer, 4, 10.0, held, now_s=lambda: now_s, sleep=sleep)
    assert held == [(102.0, "there"), (104.0, "back"), (106.0, "there"), (108.0, "back")]


def test_a_model_without_weights_has_the_shape_and_a_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    folder = write_shape(tmp_path / "model", LLAMA_8B, source)
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in SHAPES[LLAMA_8B]} == SHAPES[LLAMA_8B]
    assert (folder / "tokenizer.json").exists()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10_000, "no GPU and no disk is filled"


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
    assert key_of(line, options("--link-gbps", "20"), machine) != key
    assert key_of(line, requested, {**machine, "versions": {"vllm": "0.33.0"}}) != key


def test_times_of_a_rehearsal_do_not_fail_it() -> None:
    late = {"judgements": [{"what": "ttft_ms p50", "ok": False}, {"what": "answered", "ok": True}]}
    assert is_off(late, rehearsal=False) and not is_off(late, rehearsal=True)
    assert is_off({"judgements": [{"what": "answered", "ok": False}]}, rehearsal=True)


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
    assert (
        record["revision"] == kept["revision"] and kept["rehearsal"] and set(kept) >= {"card", "versions", "revision"}
    )

    ran: list[str] = []

    def fake(name: str, *_: Any) -> dict[str, Any]:
        ran.append(name)
        return {"exit_code": 1, "seconds": 0.0, "judgements": [{"what": name, "found": None, "expected": None,
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
