"""Tests of the command line against a running suite on the sim engine."""

import json
import os
import stat
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, joining, running_suite
from libs.testing.wait import until

pytestmark = pytest.mark.suite

WORKER_KEYS = {
    "id", "pid", "node", "role", "budget_tokens", "engine", "model", "device", "gpus", "epoch", "state", "running",
    "waiting", "preemptions", "recomputed_tokens", "pool_faults", "address", "unpaired",
}  # fmt: skip
OCCUPANCY_KEYS = {"window_ms", "gpus", "coverage", "prefill", "decode", "kv_wait", "idle", "ratio", "workers"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("commands")
    arguments = ("--engine", "sim", "--decode", "2", "--mixed", "1", "--gateways", "2")
    with running_suite(folder, *arguments, env={"FULCRUM_CACHE": str(folder / "cache")}) as found:
        yield found


def one_json_line(suite: RunningSuite, *arguments: str) -> Any:
    """Return the JSON of a command, which must be one line with nothing on stderr."""
    done = suite.fulcrum(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.endswith("\n")
    (line,) = done.stdout.splitlines()
    return json.loads(line)


MEASURED = ("tune", "prefill", "--limit", "40", "--most-tokens", "512")
"""Bound on small steps, which take a fraction of a second together unless the machine is overloaded."""


def test_tuning_prefill_reports_the_curve_the_choice_and_its_gain(suite: RunningSuite) -> None:
    (found,) = one_json_line(suite, *MEASURED, "--tpot", "50")
    assert found["worker"].startswith("prefill") and found["applied"]
    assert 16 <= found["chunk_tokens"] <= 512 and found["chunk_tokens_default"] == 512
    assert found["ttft_ms"] > 0 and found["ttft_ms_default"] > 0 and found["decode_batch"] >= 1
    assert len(found["curve"]) >= 6
    (kept,) = one_json_line(suite, "tune", "prefill", "--kept")
    assert kept["curve"] == found["curve"] and kept["chunk_tokens"] == found["chunk_tokens"]
    (named,) = one_json_line(suite, "tune", "prefill", "--set", "256")
    assert (named["chunk_tokens"], named["chunk_tokens_before"]) == (256, found["chunk_tokens"])
    again = suite.fulcrum(*MEASURED, found["worker"], "--measure-only")
    assert again.returncode == 0, again.stderr
    assert "█" in again.stdout and "256" in again.stdout
    assert "no worker 'nobody' here; there are: " in suite.fulcrum("tune", "prefill", "nobody").stderr
    refused = suite.fulcrum("tune", "prefill", "--set", "10000", "--json")
    assert refused.returncode == 1 and "1 to 8192 prompt tokens" in json.loads(refused.stdout)[0]["error"]


def test_the_tuning_curve_is_drawn_as_a_picture(suite: RunningSuite, tmp_path: Path) -> None:
    file = tmp_path / "curve.svg"
    done = suite.fulcrum(*MEASURED, "--measure-only", "--picture", str(file))
    assert done.returncode == 0, done.stderr
    assert "prompt tokens in a step" in file.read_text()


def test_the_largest_decode_batch_within_a_target_is_printed_for_each_decode_worker(suite: RunningSuite) -> None:
    found = one_json_line(suite, "tune", "decode", "--tpot", "20", "--context", "500")
    assert {each["worker"] for each in found} == {"decode-1", "decode-2", "mixed-1"}
    assert all(0 < each["decode_batch"] <= each["max_sequences"] for each in found)
    result = suite.fulcrum("tune", "decode", "decode-1", "--tpot", "0.001")
    assert result.returncode == 0 and "no sequence holds a TPOT of 0.001 ms" in result.stdout


def test_the_ready_file_lists_every_address_and_only_its_owner_can_read_it(suite: RunningSuite) -> None:
    assert stat.S_IMODE(suite.ready_file.stat().st_mode) == 0o600
    assert suite.ready["pid"] == suite.process.pid
    assert len(suite.ready["token"]) >= 16
    assert suite.ready["gateways"][0] == suite.ready["gateway"]
    assert len(set(suite.ready["gateways"])) == 2
    for url in (*suite.ready["gateways"], suite.ready["planner"], suite.ready["metrics"]):
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_the_suite_writes_the_default_ready_file_too(suite: RunningSuite) -> None:
    port = suite.gateway.rpartition(":")[2]
    default = Path(suite.env["FULCRUM_CACHE"]) / "suites" / f"{port}.json"
    assert json.loads(default.read_text()) == suite.ready


def test_workers_are_all_present_once_the_suite_is_ready(suite: RunningSuite) -> None:
    workers = one_json_line(suite, "workers")
    assert {worker["id"] for worker in workers} == {"prefill-1", "decode-1", "decode-2", "mixed-1"}
    roles = {worker["id"]: worker["role"] for worker in workers}
    assert roles == {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode", "mixed-1": "mixed"}
    for worker in workers:
        assert worker.keys() >= WORKER_KEYS
        assert (worker["engine"], worker["model"], worker["state"]) == ("sim", "sim", "ready")
        os.kill(worker["pid"], 0)


def test_chat_prints_the_answer_and_who_served_it(suite: RunningSuite) -> None:
    answer = one_json_line(suite, "chat", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert answer["text"]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8
    assert 0 < answer["ttft_s"] < 60
    assert 0 < answer["tpot_s"] < 60
    ids = {worker["id"] for worker in one_json_line(suite, "workers")}
    assert {answer["prefill_worker"], answer["decode_worker"]} <= ids


def test_chat_streams_to_stdout_and_prints_who_served_it_on_stderr(suite: RunningSuite) -> None:
    done = suite.fulcrum("chat", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == one_json_line(suite, "chat", "Hello", "--max-tokens", "8", "--temperature", "0")[
        "text"
    ].rstrip("\n")
    assert "first token after" in done.stderr


def test_occupancy_of_a_requested_window_adds_up(suite: RunningSuite) -> None:
    figures = one_json_line(suite, "occupancy", "--window", "1s")
    assert figures.keys() >= OCCUPANCY_KEYS
    assert figures["window_ms"] == 1000
    for worker in figures["workers"]:
        assert worker.keys() >= OCCUPANCY_KEYS - {"window_ms", "workers"}
        if worker["idle"] is not None:
            assert sum(worker[phase] for phase in ("prefill", "decode", "kv_wait", "idle")) == pytest.approx(1)


@pytest.mark.parametrize("command", [("workers",), ("occupancy",)])
def test_commands_print_tables_for_people(suite: RunningSuite, command: tuple[str, ...]) -> None:
    done = suite.fulcrum(*command)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (("chat", "hi", "--model", "nobody"), "nobody"),
        (("chat", "hi", "--max-tokens", "1000000"), "exceed the context"),
        (("occupancy", "--window", "soon"), "window"),
        (("role", "nobody", "prefill"), "prefill-1"),
        (("role", "decode-1", "both"), "standby"),
    ],
)
def test_a_refusal_is_one_line_and_a_nonzero_exit(suite: RunningSuite, command: tuple[str, ...], word: str) -> None:
    done = suite.fulcrum(*command)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert word in done.stderr


def test_a_role_change_of_a_worker_shows_everywhere(suite: RunningSuite) -> None:
    moved = one_json_line(suite, "role", "decode-2", "prefill", "--reason", "a test", "--first-step-s", "0")
    assert (moved["worker"], moved["role"], moved["epoch"]) == ("decode-2", "prefill", 2)
    assert 0 < moved["effect_ms"] < 5000
    assert (moved["first_step_ms"], moved["gateways_behind"], moved["running"]) == (None, 0, 0)
    stale = suite.fulcrum("role", "decode-2", "decode", "--epoch", "1")
    assert stale.returncode == 1 and "expected epoch 1, the worker is at 2" in stale.stderr
    result = suite.fulcrum("role", "decode-2", "decode", "--first-step-s", "0")
    assert result.returncode == 0 and "since epoch 3" in result.stdout
    (worker,) = [each for each in one_json_line(suite, "workers") if each["id"] == "decode-2"]
    assert (worker["role"], worker["epoch"], worker["moves"], worker["moved_by"]) == (
        "decode",
        3,
        2,
        f"token ({getuser()})",
    )
    decisions = httpx.get(f"{suite.ready['planner']}/v1/decisions", params={"limit": 1000}).json()
    assert {"decode-2"} == {each["worker"] for each in decisions if each["action"] == "role_moved"}
    assert f"token ({getuser()})" in suite.fulcrum("workers").stdout


def test_the_planner_is_switched_off_and_on(suite: RunningSuite) -> None:
    assert one_json_line(suite, "planner", "mode") == {"mode": "advisory", "kept": True}
    assert one_json_line(suite, "planner", "mode", "off") == {"mode": "off", "kept": True}
    newest = httpx.get(f"{suite.ready['planner']}/v1/decisions", params={"limit": 1}).json()[0]
    assert (newest["action"], newest["mode"]) == ("set_mode", "off")
    assert one_json_line(suite, "planner", "mode", "advisory")["mode"] == "advisory"


async def test_a_worker_with_an_incompatible_kv_layout_is_reported_and_the_others_keep_serving(
    suite: RunningSuite, tmp_path: Path
) -> None:
    own = {"FULCRUM_WORKER_ENGINE": "sim", "FULCRUM_WORKER_BLOCK_SIZE_TOKENS": "32"}
    why = "other gets no work: no prefill worker of model 'sim' has KV like its own; prefill-1 differs in"

    gateways = suite.ready["gateways"]
    with joining(suite, tmp_path, "other", **own) as other:
        await until(lambda: other.ready, timeout_s=30, what="the worker")
        for url in gateways:
            metrics = f"{url}/metrics"
            await until(
                lambda at=metrics: "unpaired_workers 1.0" in httpx.get(at).text, timeout_s=10, what="the gateway"
            )
        said = suite.fulcrum("workers")
        assert f"{why} block32 here, block16 there" in said.stdout, said.stdout
        assert suite.fulcrum("chat", "Hello").returncode == 0
        assert "block32 here, block16 there" in other.err.read_text()
    for url in gateways:
        metrics = f"{url}/metrics"
        await until(lambda at=metrics: "unpaired_workers 0.0" in httpx.get(at).text, timeout_s=10, what="it has gone")
