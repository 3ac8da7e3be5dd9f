"""Tests of `fulcrum lab` as a person or a program calls it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FULCRUM = Path(sys.executable).with_name("fulcrum")
TINY = "poisson:rate=4,seconds=10"


def lab(*arguments: str, code: int = 0, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run((FULCRUM, "lab", *arguments), capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == code, done.stderr
    return done


def test_a_run_prints_one_json_object_and_repeats_exactly() -> None:
    arguments = ("run", "--trace", TINY, "--policy", "fulcrum:2:2", "--workers", "4", "--seed", "7", "--json")
    found = [json.loads(lab(*arguments).stdout) for _ in range(2)]
    walls = [each.pop("wall_s") for each in found]
    assert found[0] == found[1] and all(walls)
    assert found[0]["seed"] == 7 and found[0]["policy"] == "fulcrum:2:2"
    assert found[0]["requests"] == found[0]["completed"] > 20


def test_a_run_prints_its_results_and_the_use_of_gpu_time_for_people() -> None:
    said = lab("run", "--trace", TINY, "--policy", "static", "--workers", "3", "--rate-scale", "2").stdout
    assert "index of dispersion" in said and "superposition" in said
    assert "static:" in said and "GPU time: prefill" in said


def test_another_device_gives_another_result_and_an_assumption_is_labelled() -> None:
    arguments = ("run", "--trace", TINY, "--policy", "fulcrum:2:2", "--workers", "4")
    said = lab(*arguments, "--model", "qwen2.5-7b", "--device", "a100").stdout
    assert "is an assumption" in said
    fast = json.loads(lab(*arguments, "--device", "b200", "--json").stdout)
    slow = json.loads(lab(*arguments, "--device", "a100", "--json").stdout)
    assert fast["ttft_s"]["mean"] < slow["ttft_s"]["mean"]


def test_a_comparison_of_policies_prints_a_table_a_page_and_json(tmp_path: Path) -> None:
    arguments = ("compare", "--trace", TINY, "--policies", "fulcrum:2:2,static,arrow", "--workers", "4", "--jobs", "1")
    said = lab(*arguments, "--report", str(tmp_path / "out"), "--no-gpus").stdout
    assert said.index("fulcrum:2:2") and "arrow" in said
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page.split("<svg")[0]
    kept = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert {each["policy"].split(":")[0] for each in kept["policies"]} == {"fulcrum", "static", "arrow"}
    found = json.loads(lab(*arguments, "--json").stdout)
    assert all(each["gpus_needed"] >= 2 for each in found["policies"]), "an easy trace needs the minimum"


def test_the_number_of_gpus_needed_is_printed_as_text_page_and_json(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("time_s,input_tokens,output_tokens\n" + "".join(f"{at / 4},400,20\n" for at in range(20)))
    page = tmp_path / "needs.html"
    arguments = ("compare", "--trace", str(mine), "--gpus-needed", "--policies", "fulcrum,aggregated", "--jobs", "1")
    said = lab(*arguments, "--html", str(page)).stdout
    assert said.startswith("Aggregate: 1 GPU by aggregated; disaggregated needs 2 GPUs (fulcrum)")
    assert said.splitlines()[0] in page.read_text()
    found = json.loads(lab(*arguments, "--json").stdout)
    assert found["verdict"] == "aggregate" and found["measure"] == "requests" and not found["interrupted"]
    assert {each["policy"]: each["gpus_needed"] for each in found["policies"]} == {"aggregated": 1, "fulcrum": 2}
    assert all(each["tried"] for each in found["policies"])


def test_a_search_finds_a_rate_and_lists_its_trials() -> None:
    found = json.loads(
        lab(
            "search", "--trace", "poisson:rate=8,seconds=8", "--policies", "fulcrum:1:1", "--workers", "2", "--json"
        ).stdout
    )
    edge = found["policies"][0]
    assert edge["rate_scale"] > 0 and len(edge["tried"]) > 2 and not found["interrupted"]


def test_traces_are_listed_described_and_written(tmp_path: Path) -> None:
    assert "Mooncake" in lab("traces").stdout
    assert "poisson" in json.loads(lab("traces", "--json").stdout)["kinds"]
    written = tmp_path / "mine.jsonl"
    made = json.loads(lab("traces", TINY, "--write", str(written), "--json").stdout)
    again = json.loads(lab("traces", str(written), "--json").stdout)
    assert again["requests"] == made["requests"] and again["input_tokens"] == made["input_tokens"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--trace", "nowhere.csv"), "there is no file"),
        (("run", "--trace", TINY, "--workers", "0"), "at least one"),
        (("run", "--trace", TINY, "--slo", "ttft=1us,tpot=50ms"), "cannot be met"),
        (("run", "--trace", TINY, "--policy", "magic"), "no rival 'magic'"),
        (("run", "--trace", TINY, "--device", "h300"), "it is there on"),
        (("run", "--trace", "poisson:rate=1,isl=500000,spread=0"), "larger --tp"),
        (("run", "--trace", "poisson:speed=1"), "no parameter"),
        (("compare", "--trace", TINY, "--policies", "fulcrum,arow"), "no rival 'arow'"),
        (("run", "--trace", "README.md"), "this header works: time_s,input_tokens,output_tokens"),
        (("compare", "--trace", TINY, "--gpus-needed", "--policies", "offline"), "leave it out of --policies"),
        (("compare", "--trace", TINY, "--gpus-needed", "--html", "nowhere/a.html"), "there is no folder nowhere"),
        (("compare", "--trace", TINY, "--gpus-needed", "--report", "out"), "with --html FILE"),
        (("compare", "--trace", TINY, "--html", "a.html"), "is the page of --gpus-needed"),
    ],
)
def test_an_impossible_command_fails_with_one_line_that_names_a_remedy(arguments: tuple[str, ...], says: str) -> None:
    root = Path(__file__).parents[2]
    done = lab(*arguments, code=1, folder=root)
    assert says in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_a_broken_line_of_a_trace_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\nsoon,1,1\n")
    assert f"{file}:3" in lab("run", "--trace", str(file), code=1).stderr


def test_ctrl_c_prints_what_a_comparison_has_found_so_far() -> None:
    arguments = (
        "compare", "--trace", "poisson:rate=40,seconds=60", "--policies", "fulcrum:2:2,aggregated,static:1:3",
        "--workers", "4", "--jobs", "1", "--no-gpus", "--json",
    )  # fmt: skip
    process = subprocess.Popen(
        (FULCRUM, "lab", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if " of 3: " in line:
            break
    process.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + 60
    said, _ = process.communicate(timeout=max(deadline_s - time.monotonic(), 1))
    assert process.returncode == 130
    found = json.loads(said)
    assert found["interrupted"] and 1 <= len(found["policies"]) < 3
