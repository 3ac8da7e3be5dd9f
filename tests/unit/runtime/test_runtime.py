"""Tests of runtime parts: self-explaining settings, owned tasks, bound sockets and admin tokens."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from pydantic import SecretStr

from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.net.rpc import make_channel, make_server
from libs.runtime.paths import cache_dir
from libs.runtime.settings import CommonSettings, load_settings
from libs.runtime.tasks import TaskOwner, until_first
from libs.testing.wait import ManualClock


def test_an_invalid_setting_names_variable_value_and_allowed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_LOG_LEVEL", "loud")
    with pytest.raises(StartupError) as caught:
        load_settings(CommonSettings)
    line = caught.value.message
    assert "FULCRUM_LOG_LEVEL='loud'" in line
    assert "'debug', 'info', 'warning' or 'error'" in line
    assert "\n" not in line


def test_a_secret_appears_in_no_text_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_TOKEN", "hush-hush")
    settings = load_settings(CommonSettings)
    assert settings.token.get_secret_value() == "hush-hush"
    assert "hush" not in repr(settings) + str(settings) + settings.model_dump_json()


def test_a_cluster_name_is_valid_in_topics_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CLUSTER", "a b/c")
    with pytest.raises(StartupError, match="FULCRUM_CLUSTER"):
        load_settings(CommonSettings)


async def test_a_failed_task_is_reported_once_and_remembered() -> None:
    seen: list[BaseException] = []
    owner = TaskOwner(on_failure=seen.append)

    async def fail() -> None:
        raise ValueError("broken")

    owner.spawn("one", fail())
    owner.spawn("two", fail())
    while len(owner):
        await asyncio.sleep(0)
    assert len(seen) == 1
    assert owner.error is seen[0]


async def test_a_part_with_its_own_tasks_reports_failures_here() -> None:
    seen: list[BaseException] = []
    owner = TaskOwner(on_failure=seen.append)
    part = TaskOwner(on_failure=owner.fail)

    async def fail() -> None:
        raise ValueError("broken")

    part.spawn("inner", fail())
    while len(part):
        await asyncio.sleep(0)
    assert seen == [part.error] == [owner.error]


async def test_closing_cancels_tasks_and_lets_them_clean_up() -> None:
    owner = TaskOwner()
    cleaned = asyncio.Event()

    async def hold() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    owner.spawn("holder", hold())
    await asyncio.sleep(0)
    await owner.close()
    assert cleaned.is_set()
    assert len(owner) == 0
    assert owner.error is None


async def test_a_cancellation_swallowed_by_a_library_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.runtime.tasks.CANCEL_AGAIN_S", 0.01)
    awaited = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await asyncio.wait_for(awaited, 5)
        await asyncio.Event().wait()

    owner = TaskOwner()
    owner.spawn("work", work())
    await asyncio.sleep(0)
    awaited.set_result(None)  # in the same turn as the cancellation, which Python 3.11's wait_for then loses
    async with asyncio.timeout(5):
        await owner.close()
    assert not len(owner)
    assert owner.error is None


async def test_the_first_task_to_end_or_fail_ends_the_others_and_its_error_is_raised() -> None:
    cleaned = asyncio.Event()

    async def hold() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await until_first(hold=hold(), fail=fail())
    assert cleaned.is_set()


@pytest.mark.system
def test_a_port_in_use_is_one_line_that_names_the_variable() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {port} .* in use.*FULCRUM_GATEWAY_PORT"):
            bind("127.0.0.1", port, "FULCRUM_GATEWAY_PORT")


@pytest.mark.system
def test_an_address_of_another_host_cannot_be_bound() -> None:
    with pytest.raises(StartupError, match="FULCRUM_HOST"):
        bind("192.0.2.1", 0, "FULCRUM_GATEWAY_PORT")


class _Admin(worker_pb2_grpc.WorkerAdminServiceServicer):
    async def Describe(self, request: object, context: object) -> worker_pb2.DescribeResponse:  # noqa: N802
        return worker_pb2.DescribeResponse()


@pytest.mark.system
@pytest.mark.parametrize(("given", "passes"), [("Bearer right", True), ("Bearer wrong", False), ("", False)])
async def test_admin_calls_need_the_token(given: str, passes: bool) -> None:
    settings = CommonSettings(token=SecretStr("right"))
    server, port = make_server(settings, "127.0.0.1:0")
    worker_pb2_grpc.add_WorkerAdminServiceServicer_to_server(_Admin(), server)
    await server.start()
    try:
        async with make_channel(settings, f"127.0.0.1:{port}") as channel:
            call = worker_pb2_grpc.WorkerAdminServiceStub(channel).Describe(
                worker_pb2.DescribeRequest(), metadata=(("authorization", given),)
            )
            if passes:
                await call
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert (caught.value.details() or "").startswith("unauthenticated: ")
    finally:
        await server.stop(None)


@pytest.mark.system
async def test_without_a_configured_token_no_admin_call_is_accepted() -> None:
    settings = CommonSettings()
    server, port = make_server(settings, "127.0.0.1:0")
    worker_pb2_grpc.add_WorkerAdminServiceServicer_to_server(_Admin(), server)
    await server.start()
    try:
        async with make_channel(settings, f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await worker_pb2_grpc.WorkerAdminServiceStub(channel).Describe(
                    worker_pb2.DescribeRequest(), metadata=(("authorization", "Bearer "),)
                )
    finally:
        await server.stop(None)


def test_the_system_clock_never_steps_back() -> None:
    clock = SystemClock()
    times = [clock.now_ns() for _ in range(1000)]
    assert times == sorted(times)


class Machine:
    """Wall clock and monotonic clock of a machine, in seconds."""

    def __init__(self) -> None:
        self.wall_s, self.steady_s = 1_800_000_000.0, 50.0
        self.clock = SystemClock(lambda: int(self.wall_s * 1e9), lambda: int(self.steady_s * 1e9))

    def passes(self, passed_s: float, *, step_s: float = 0.0) -> float:
        """Advance time, and the wall clock by `step_s` more; return the seconds that the clock advanced."""
        before_ns = self.clock.now_ns()
        self.wall_s, self.steady_s = self.wall_s + passed_s + step_s, self.steady_s + passed_s
        return (self.clock.now_ns() - before_ns) / 1e9

    @property
    def ahead_s(self) -> float:
        return self.clock.now_ns() / 1e9 - self.wall_s


def test_the_clock_is_right_at_once_after_the_machine_slept_or_the_wall_clock_jumped_ahead() -> None:
    machine = Machine()
    assert machine.passes(1.0) == pytest.approx(1.0)
    assert machine.passes(0.0, step_s=3600.0) == pytest.approx(3600.0)
    assert machine.passes(1.0) == pytest.approx(1.0) and machine.ahead_s == pytest.approx(0.0, abs=1e-3)


def test_a_wall_clock_set_back_slows_time_until_they_agree_and_never_reverses_it() -> None:
    machine = Machine()
    assert machine.passes(0.1, step_s=-10.0) == pytest.approx(0.1)
    passed = [machine.passes(0.5) for _ in range(159)]
    assert all(each == pytest.approx(0.5 * 7 / 8) for each in passed)
    assert 0 < machine.ahead_s < 0.1
    assert sum(machine.passes(0.5) for _ in range(2)) == pytest.approx(1.0, abs=0.07)
    assert machine.ahead_s == pytest.approx(0.0, abs=1e-3) and machine.passes(1.0) == pytest.approx(1.0)


def test_small_corrections_of_the_wall_clock_change_nothing() -> None:
    machine = Machine()
    for step_s in (0.2, -0.4, 0.4, -0.2):
        assert machine.passes(1.0, step_s=step_s) == pytest.approx(1.0)


def test_a_manual_clock_moves_only_on_request() -> None:
    clock = ManualClock(5)
    clock.advance_ms(1.5)
    assert clock.now_ns() == 1_500_005


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULCRUM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/fulcrum")
    monkeypatch.setenv("FULCRUM_CACHE", "/y")
    assert cache_dir() == Path("/y")


SERVICE = """
import asyncio, sys
from libs.contracts.errors import StartupError
from libs.runtime import status
from libs.runtime.service import end_process, run_service
from libs.runtime.settings import CommonSettings

async def main(service):
    {body}

end_process(run_service("probe", CommonSettings, main, failed_s=0.2))
"""


def _start(body: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE.format(body=body)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "FULCRUM_TOKEN": "hush"},
    )  # fmt: skip


@pytest.mark.system
def test_a_service_stops_on_sigterm_with_code_0() -> None:
    process = _start("status.emit('ready'); await service.stopping.wait()")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "ready"}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0


@pytest.mark.system
def test_a_service_that_cannot_start_gives_the_reason_in_one_line_and_exits_2() -> None:
    process = _start("raise StartupError('no such model: try another')")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert json.loads(out) == {"event": "failed", "error": "no such model: try another"}
    assert err.strip() == "fulcrum probe: no such model: try another"


@pytest.mark.system
def test_a_failed_task_stops_its_service_with_code_1() -> None:
    process = _start("service.tasks.spawn('bad', asyncio.sleep('x')); await service.stopping.wait()")
    _out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "task failed" in err


@pytest.mark.system
def test_a_failed_service_that_hangs_while_it_closes_still_ends() -> None:
    body = "service.tasks.spawn('bad', asyncio.sleep('x')); await service.stopping.wait(); import time; time.sleep(60)"
    process = _start(body)
    _out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "task failed" in err


@pytest.mark.system
def test_a_service_that_ends_flushes_its_output_and_skips_interpreter_shutdown() -> None:
    body = "import atexit; atexit.register(print, 'taken apart'); sys.stdout.write('said')"
    out, _err = _start(body).communicate(timeout=20)
    assert out == "said"
