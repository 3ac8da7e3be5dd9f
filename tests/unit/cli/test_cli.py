"""Tests of the command line without a suite."""

import io
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from libs.cli.find import find_one_suite, find_suite
from libs.cli.forecast import live
from libs.cli.main import app
from libs.cli.planner.tune import of_each
from libs.cli.status.tables import BAR_CELLS, PHASES, last_move, phase_bar
from libs.cli.suite.chat import ChatAnswer, take_line
from libs.cli.suite.role import WorkerMove, parse_role, reported
from libs.cli.up.serve import Bars
from libs.contracts.errors import QueueFull, StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, ROLE_STANDBY, Assignment
from libs.launch.ready import Ready, write_ready
from libs.worker.admin_client import RoleMove

COMMANDS = (
    "up", "chat", "workers", "occupancy", "role", "top", "tune prefill", "tune decode", "status", "advice", "alerts",
    "alerts list", "alerts silence", "alerts ack", "alerts unsilence", "events", "request", "logs", "down",
    "keys create", "keys list", "keys revoke", "keys limits",
)  # fmt: skip


@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)])
def test_help_has_an_example(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [word for each in arguments for word in each.split()] + ["--help"])
    assert result.exit_code == 0
    assert "Example: fulcrum" in result.stdout


@pytest.mark.system
def test_the_command_line_starts_without_imports_of_its_commands() -> None:
    heavy = ("grpc", "httpx", "torch", "pydantic", "rich")
    code = f"import sys, libs.cli.main; libs.cli.main.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.system
@pytest.mark.parametrize(
    "command", [("chat", "hi"), ("workers",), ("occupancy",), ("status",), ("events",), ("request", "x")]
)
def test_without_a_suite_a_command_prints_one_line_that_says_how_to_start_one(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    run = [sys.executable, "-m", "libs.cli.main", *command, "--json", "--ready", str(tmp_path / "none")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "fulcrum up" in done.stderr


@given(st.tuples(*[st.integers(0, 10**9)] * len(PHASES)).filter(any))
def test_a_bar_always_has_its_full_width(times_ns: tuple[int, ...]) -> None:
    total_ns = sum(times_ns)
    figures = {phase: time_ns / total_ns for phase, time_ns in zip(PHASES, times_ns, strict=True)}
    assert len(phase_bar(figures).plain) == BAR_CELLS


def test_a_bar_can_be_read_without_colours() -> None:
    assert len(set(phase_bar(dict.fromkeys(PHASES, 1 / len(PHASES))).plain)) == len(PHASES)


@pytest.mark.parametrize("ready", [False, True])
def test_a_process_is_ticked_once_it_is_ready_and_not_after_its_last_stage(*, ready: bool) -> None:
    screen = io.StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=80))
    bars.progress("prefill-1", "warming up", 1.0)
    if ready:
        bars.ready("prefill-1", "127.0.0.1:1")
    bars.finish()
    assert ("✓" in screen.getvalue()) is ready


def test_a_worker_without_telemetry_has_no_bar() -> None:
    assert "no telemetry" in phase_bar(dict.fromkeys(PHASES)).plain


def test_an_answer_is_assembled_from_its_chunks() -> None:
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Par"}}]},
        {"choices": [{"delta": {"content": "is"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        {"choices": [], "fulcrum": {"prefill_worker": "p", "decode_worker": "d", "ttft_ms": 90.0, "tpot_ms": None}},
    ]
    answer = ChatAnswer()
    pieces = [take_line(f"data: {json.dumps(chunk)}", answer) for chunk in chunks]
    assert [*pieces, take_line("data: [DONE]", answer), take_line("", answer)] == ["", "Par", "is", "", "", "", ""]
    assert answer.to_json() == {
        "text": "Paris",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "ttft_s": 0.09,
        "tpot_s": None,
        "prefill_worker": "p",
        "decode_worker": "d",
    }
    assert answer.served_by() == "p → d, first token after 90 ms, 3 + 2 tokens"


def test_an_error_in_mid_stream_is_printed() -> None:
    with pytest.raises(StartupError, match="worker gone"):
        take_line('data: {"error": {"message": "worker gone"}}', ChatAnswer())


def test_roles_are_parsed_with_or_without_a_budget() -> None:
    assert parse_role("prefill") == (ROLE_PREFILL, 0)
    assert parse_role("decode") == (ROLE_MIXED, 0)
    assert parse_role("mixed:64") == (ROLE_MIXED, 64)
    assert parse_role("mixed")[1] > 0
    assert parse_role("standby") == (ROLE_STANDBY, 0)


@pytest.mark.parametrize("text", ["", "both", "prefill:64", "mixed:", "mixed:many", "mixed:-1", "mixed:²"])
def test_an_invalid_role_lists_the_allowed_ones(text: str) -> None:
    with pytest.raises(StartupError, match="prefill, decode, mixed"):
        parse_role(text)
    for budget in ("0", "1000001", "9" * 30):
        with pytest.raises(StartupError, match="1 to 1000000"):
            parse_role(f"mixed:{budget}")


def test_one_of_several_suites_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    for port in (8000, 9000):
        assert find_one_suite(None).pid == (os.getpid() if port == 9000 else 0)
        urls = dict.fromkeys(("gateway", "planner", "metrics"), f"http://127.0.0.1:{port}")
        rest = dict.fromkeys(("token", "kafka", "redis", "cluster", "model", "engine"), "x")
        file = tmp_path / "suites" / f"{port}.json"
        write_ready(file, Ready(gateways=(urls["gateway"],), pid=os.getpid(), **urls, **rest))
    with pytest.raises(StartupError, match=r"2 suites run here: name one with --ready FILE, of .*9000.json"):
        find_one_suite(None)
    assert find_one_suite(file).gateway.endswith(":9000")


def test_a_killed_suites_file_does_not_count_among_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    monkeypatch.setattr("libs.cli.find.is_suite", lambda pid, _commands: pid == os.getppid())
    for port, pid in ((8000, os.getpid()), (9000, os.getppid())):
        urls = dict.fromkeys(("gateway", "planner", "metrics"), f"http://127.0.0.1:{port}")
        rest = dict.fromkeys(("token", "kafka", "redis", "cluster", "model", "engine"), "x")
        suite = Ready(gateways=(urls["gateway"],), pid=pid, **urls, **rest)
        write_ready(tmp_path / "suites" / f"{port}.json", suite)
    assert find_one_suite(None).gateway.endswith(":9000")


def write_suite(folder: Path, port: int, metrics: str, gateway: str | None = None) -> Path:
    url = f"http://127.0.0.1:{port}" if gateway is None else gateway
    rest = dict.fromkeys(("token", "kafka", "redis", "cluster", "model", "engine"), "x")
    file = folder / "suites" / f"{port}.json"
    write_ready(file, Ready(gateway=url, gateways=(url,), planner=metrics, metrics=metrics, pid=os.getpid(), **rest))
    return file


@pytest.mark.system
def test_the_only_suite_that_answers_is_found_at_any_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    with ExitStack() as stack:
        nobody, at_default, one, other = (stack.enter_context(socket.socket()) for _ in range(4))
        for each in (nobody, at_default, one, other):
            each.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (nobody, at_default, one, other)]
        default_port = at_default.getsockname()[1] - 2
        monkeypatch.setattr("libs.cli.find.DEFAULT_GATEWAY_PORT", default_port)
        write_suite(tmp_path, 9000, urls[0])
        assert find_suite(None).pid == 0  # its process no longer answers
        one.listen()
        file = write_suite(tmp_path, 9010, urls[2])
        assert find_suite(None).metrics == urls[2]
        assert capsys.readouterr().err == f"suite at http://127.0.0.1:9010 ({file})\n"
        assert find_suite(None, quiet=True).metrics == urls[2]
        assert capsys.readouterr().err == ""
        other.listen()
        write_suite(tmp_path, 9020, urls[3])
        with pytest.raises(StartupError, match=r"2 suites run here: .*9010\.json .*, .*9020\.json"):
            find_suite(None)
        at_default.listen()  # containers, which write no file
        assert find_suite(None).pid == 0
        at_default.close()
        write_suite(tmp_path, default_port, urls[0])
        assert find_suite(None).metrics == urls[0]


@pytest.mark.system
def test_an_observed_fleet_is_found_and_has_no_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    monkeypatch.setattr("libs.cli.find.DEFAULT_GATEWAY_PORT", 1)
    with socket.create_server(("127.0.0.1", 0)) as metrics:
        url = f"http://127.0.0.1:{metrics.getsockname()[1]}"
        write_suite(tmp_path, 9000, url, gateway="")
        found = find_suite(None)
    assert (found.metrics, found.gateway) == (url, "http://127.0.0.1:1")


def test_a_forecast_without_history_prints_no_zeros(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bands = {name: [0.0] for name in ("p5", "p25", "p50", "p75", "p95")}
    found = {"model": "m", "starts_unix_s": [1e9], "trend": [], "series": dict.fromkeys(live.UNITS, bands)}
    monkeypatch.setattr(live, "find_suite", lambda _: SimpleNamespace(metrics="http://127.0.0.1:1"))
    unknown = "no bin of this series is known: nothing is predicted"
    monkeypatch.setattr(live, "get_json", lambda *_, **__: found | {"notes": [unknown]})
    live.show_forecast(None, "", "1h", "", as_json=False)
    assert capsys.readouterr().out.startswith("No demand is known yet: ask again after some requests, or `fulcrum")
    monkeypatch.setattr(live, "get_json", lambda *_, **__: found | {"notes": []})
    live.show_forecast(None, "", "1h", "", as_json=False)
    assert "requests/s, 90 % band" in capsys.readouterr().out


def test_the_last_move_is_shown_with_its_age() -> None:
    for age_s, said in ((0, "0.0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (200_000, "2 d ago")):
        moved = {"moved_unix_ns": 10**18, "moved_by": "somebody"}
        assert str(last_move(moved, 10**18 + age_s * 10**9)) == f"{said}, somebody"
    assert str(last_move({"moved_unix_ns": 0}, 1)) == "–"


def test_an_error_of_one_worker_leaves_the_figures_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(worker: dict[str, Any]) -> dict[str, Any]:
        if worker["id"] == "two":
            raise QueueFull("two: another measurement runs")
        return {"worker": worker["id"], "chunk_tokens": 96}

    workers = [{"id": "one"}, {"id": "two"}, {"id": "three"}]
    found, failed = of_each(workers, ask, None)
    assert [each["worker"] for each in found] == ["one", "three"]
    assert failed == ["two: another measurement runs"]
    (line,) = capsys.readouterr().out.splitlines()
    assert [each.get("error") for each in json.loads(line)] == [None, "two: another measurement runs", None]
    published: list[dict[str, Any]] = []
    assert of_each(workers, ask, published.append) == (published, failed)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("first_step_s", "there", "says"),
    [
        (0.0123, 3, "The first step of its kind ended after 12.3 ms."),
        (None, 0, "No step of its kind ended within 0.5 s: nothing was there to do."),
        (None, 8, "No step of its kind ended within 0.5 s: 8 sequences are there, of the old role or not begun."),
    ],
)
def test_a_missing_first_step_after_a_move_is_explained(first_step_s: float | None, there: int, says: str) -> None:
    assignment = Assignment(role=ROLE_PREFILL, epoch=2)
    move = RoleMove(assignment, effect_s=0.002, call_s=0.001, gateways_behind=0, running=8)
    moved = WorkerMove("decode-1", assignment, move, first_step_s, there)
    assert reported(moved, 0.5).splitlines()[-1] == says


def test_a_worker_that_already_has_the_role_is_unchanged() -> None:
    assert reported(WorkerMove("gpu-1", Assignment(role=ROLE_PREFILL, epoch=7)), 2.0) == (
        "gpu-1 is prefill already: unchanged, epoch 7."
    )
