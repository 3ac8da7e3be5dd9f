"""Tests of how a suite starts, survives and ends without leaving anything behind."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from libs.runtime.net.ports import LOOPBACK, listening_ports
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite]

STOP_S = 10.0
SOON_S = 8.0
"""The sum of the grace periods of a stop, and a margin for a busy machine."""
RESTART_S = 30.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment that marks every process of a test's suites and keeps their files together."""
    (tmp_path / "tmp").mkdir()
    marker = {"FULCRUM_NODE": f"node-{secrets.token_hex(6)}"}
    return {**marker, "FULCRUM_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}


def processes(env: dict[str, str]) -> dict[int, dict[str, str]]:
    """Return the environment by pid of every process that carries the mark."""
    found = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get("FULCRUM_NODE") == env["FULCRUM_NODE"] and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = environ
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def pid_of(env: dict[str, str], variable: str, value: str) -> int | None:
    """Return the process of the service with this setting."""
    return next((pid for pid, environ in processes(env).items() if environ.get(variable) == value), None)


def came_back(env: dict[str, str], variable: str, value: str, last_pid: int) -> bool:
    return pid_of(env, variable, value) not in (None, last_pid)


def until(holds: Callable[[], Any], bound_s: float, what: str) -> Any:
    deadline_s = time.monotonic() + bound_s
    while not (found := holds()):
        assert time.monotonic() < deadline_s, f"{what} did not come true in {bound_s} s"
        time.sleep(0.05)
    return found


def port_of(url: str) -> int:
    return urlsplit(url).port or 0


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port_of(url))) == 0


def assert_nothing_left(ready: dict[str, Any], ready_file: Path, env: dict[str, str]) -> None:
    until(lambda: not processes(env), STOP_S, "the end of every process")
    urls = (*ready["gateways"], ready["planner"], ready["metrics"])
    # A process that ends frees its memory, by which it is found, before its ports.
    until(lambda: not [url for url in urls if listens(url)], STOP_S, "the end of every port")
    until(lambda: not list(Path(env["TMPDIR"]).glob("fulcrum-*")), STOP_S, "the end of the temporary folder")
    assert not ready_file.exists()
    assert not list((Path(env["FULCRUM_CACHE"]) / "suites").iterdir())


def up(env: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `fulcrum up`, which is expected to end by itself."""
    command = [sys.executable, "-m", "libs.cli.main", "up", "--no-question", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


@contextlib.contextmanager
def open_streams(suite: RunningSuite, count: int) -> Iterator[list[Iterator[str]]]:
    """Yield the lines of answers that have begun and would continue for long."""
    body = {"model": "sim", "prompt": "p", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(timeout=30))
        url = f"{suite.gateway}/v1/completions"
        answers = [stack.enter_context(http.stream("POST", url, json=body)).iter_lines() for _ in range(count)]
        assert all(next(lines) for lines in answers)
        yield answers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_open_streams_and_every_process_port_and_folder(
    tmp_path: Path, env: dict[str, str], number: signal.Signals
) -> None:
    with running_suite(tmp_path, "--engine", "sim", env=env) as suite, open_streams(suite, 4) as answers:
        assert len(processes(env)) >= 8
        suite.process.send_signal(number)
        assert suite.process.wait(SOON_S) == 0
        for lines in answers:
            assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]["code"]
        assert_nothing_left(suite.ready, suite.ready_file, env)


STARTER = """
import sys
from pathlib import Path
from libs.testing.suites.suite import running_suite
with running_suite(Path(sys.argv[1]), "--engine", "sim") as suite:
    print(suite.process.pid, flush=True)
    suite.process.wait()
"""


def test_kill_9_of_its_launcher_ends_a_suite_and_all_its_processes(tmp_path: Path, env: dict[str, str]) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        ready = json.loads((tmp_path / "ready.json").read_text()) if starter.stdout.readline() else {}
        assert len(processes(env)) >= 9
        starter.kill()
    assert_nothing_left(ready, tmp_path / "ready.json", env)


def test_a_signal_during_the_start_ends_everything(tmp_path: Path, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "libs.cli.main", "up", "--engine", "sim", "--gateway-port", "0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True)
        until(lambda: pid_of(env, "FULCRUM_WORKER_ID", "gpu-1"), RESTART_S, "a first worker")
        process.terminate()
        assert process.wait(STOP_S) != 0
    assert not processes(env)
    assert not list(Path(env["TMPDIR"]).glob("fulcrum-*"))


def test_two_suites_run_side_by_side(tmp_path: Path, env: dict[str, str]) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        running_suite(folders[0], "--engine", "sim", env=env) as one,
        running_suite(folders[1], "--engine", "sim", "--decode", "2", env=env) as two,
    ):
        assert one.ready["token"] != two.ready["token"]
        ports = [port_of(suite.ready[name]) for suite in (one, two) for name in ("gateway", "planner", "metrics")]
        assert len(set(ports)) == len(ports) and set(ports) <= set(listening_ports())
        for suite in (one, two):
            number, cache = port_of(suite.gateway), Path(env["FULCRUM_CACHE"])
            assert (cache / "suites" / f"{number}.json").exists() and (cache / "logs" / str(number)).is_dir()
        counts = []
        for suite in (one, two):
            assert suite.fulcrum("chat", "hi", "--max-tokens", "4").returncode == 0
            counts.append(len(json.loads(suite.fulcrum("workers", "--json").stdout)))
        assert counts == [2, 3]


def test_killed_children_are_restarted_under_their_names(tmp_path: Path, env: dict[str, str]) -> None:
    names = {"decode-1": "FULCRUM_WORKER_ID", "prefill-1": "FULCRUM_WORKER_ID", "gateway-1": "FULCRUM_GATEWAY_ID"}
    with running_suite(tmp_path, "--engine", "sim", env=env) as suite:
        for name, variable in names.items():
            pid = pid_of(env, variable, name)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(partial(came_back, env, variable, name, pid), RESTART_S, f"the return of {name}")
            assert f"{name} died (signal SIGKILL" in (tmp_path / "up.log").read_text()
        until(lambda: listens(suite.gateway), RESTART_S, "the gateway on its port")
        ask = partial(suite.fulcrum, "chat", "hi", "--max-tokens", "4")
        until(lambda: ask().returncode == 0, RESTART_S, "an answer afterwards")


def test_with_no_restart_the_death_of_a_child_ends_the_suite(tmp_path: Path, env: dict[str, str]) -> None:
    with running_suite(tmp_path, "--engine", "sim", "--no-restart", env=env) as suite:
        pid = pid_of(env, "FULCRUM_WORKER_ID", "decode-1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert suite.process.wait(STOP_S) == 1
        assert_nothing_left(suite.ready, suite.ready_file, env)
        assert "fulcrum: decode-1 died (signal SIGKILL" in (tmp_path / "up.log").read_text().splitlines()[-1]


def test_a_port_in_use_is_one_line_that_names_the_option(env: dict[str, str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = up(env, "--engine", "sim", "--gateway-port", str(port))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"fulcrum: port {port} on 127.0.0.1 is in use: stop what holds it or set --gateway-port"
    ]


@pytest.mark.parametrize(
    ("arguments", "extra", "words"),
    [
        (("--model", "no-such-model"), {}, ["no-such-model", "name a folder"]),
        (("--engine", "sim"), {"FULCRUM_CACHE": "/proc/nowhere"}, ["/proc/nowhere", "FULCRUM_CACHE"]),
        (("--engine", "sim", "--kafka", "127.0.0.1:1"), {}, ["--kafka", "connection refused"]),
        (("--engine", "sim", "--redis", "redis://127.0.0.1:1"), {}, ["--redis", "connection refused"]),
        (("--engine", "sim", "--prefill", "0"), {}, ["--prefill 1"]),
        (("--engine", "sim"), {"FULCRUM_LOG_LEVEL": "loud"}, ["FULCRUM_LOG_LEVEL", "loud"]),
        (("--engine", "sim"), {"FULCRUM_WORKER_SIM_PROFILE": "warp"}, ["cannot start", "warp"]),
        (("--engine", "sim"), {"FULCRUM_HOST": "0.0.0.0"}, ["cannot start", "FULCRUM_ALLOW_PLAINTEXT_TOKEN"]),
    ],
    ids=["model", "cache", "kafka", "redis", "numbers", "setting", "child", "strangers"],
)  # fmt: skip
def test_a_suite_that_cannot_start_prints_one_line_and_leaves_nothing(
    env: dict[str, str], arguments: tuple[str, ...], extra: dict[str, str], words: list[str]
) -> None:
    done = up({**env, **extra}, "--gateway-port", "0", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fulcrum: ")
    assert all(word in last for word in words), last
    assert not processes(env)
    assert not list(Path(env["TMPDIR"]).glob("fulcrum-*"))


def test_with_json_stdout_is_the_ready_file_and_nothing_else(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "libs.cli.main", "up", "--engine", "sim", "--json"]
    process = subprocess.Popen(
        [*command, "--gateway-port", "0"],
        env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        process.terminate()
        rest, _ = process.communicate(timeout=STOP_S)
    finally:
        process.kill()
        process.wait()
    assert ready.keys() >= {"gateway", "metrics", "planner", "pid", "token"}
    assert rest == ""
    assert not processes(env)
