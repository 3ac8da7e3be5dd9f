"""The processes of a suite under test, by the names that the launcher gives them, and the resources they hold."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import httpx
import psutil

from libs.bus.embedded import PROGRAM
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.roles import role_from_name
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.testing.suites.suite import RunningSuite

_COMMANDS = {
    "planner": "services.planner",
    "metrics": "services.metrics",
    "kafka": PROGRAM,
    "redis": "redis-server",
}
POLL_S = 0.02
BACK_S = 60.0
"""The time in which killed processes are back, even on a busy machine."""
DOWN_POLL_S = 0.1
"""The least time that a process of a suite takes to start."""


def pid_of(suite: RunningSuite, name: str) -> int | None:
    """Return the id of the process that now runs under `name` (gateway-1, prefill-2, planner, kafka ...), if any."""
    for process in psutil.Process(suite.process.pid).children():
        try:
            if name_of(process) == name and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
        except psutil.NoSuchProcess:
            continue
    return None


def name_of(process: psutil.Process) -> str | None:
    """Return the launcher's name for its child; None for helpers. Raise psutil.NoSuchProcess."""
    words = process.cmdline()
    for name, command in _COMMANDS.items():
        if any(command in word for word in words):
            return name
    environment = process.environ()
    return environment.get("FULCRUM_GATEWAY_ID") or environment.get("FULCRUM_WORKER_ID")


async def kill(suite: RunningSuite, name: str) -> int:
    """Kill with `kill -9` the process under `name` as soon as there is one, and return its id."""
    while (pid := pid_of(suite, name)) is None:  # noqa: ASYNC110 - other processes set no event
        await asyncio.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)
    return pid


@asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    """Stop a process with SIGSTOP while the context is open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def kept_down(suite: RunningSuite, *names: str) -> AsyncIterator[None]:
    """Kill the processes under these names, and again after each restart, until the context closes."""

    async def killing() -> None:
        while True:
            for name in names:
                pid = pid_of(suite, name)
                if pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(DOWN_POLL_S)

    task = asyncio.create_task(killing())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def gateway_metrics(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Return a gateway's metrics, summed over labels."""
    found: dict[str, float] = {}
    for line in (await http.get(f"{url}/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            short = name.split("{")[0].removeprefix("fulcrum_gateway_")
            found[short] = found.get(short, 0.0) + float(value)
    return found


async def workers(http: httpx.AsyncClient, suite: RunningSuite) -> list[dict[str, Any]]:
    """Return the workers that the planner lists."""
    answer = await http.get(f"{suite.ready['planner']}/v1/workers")
    found: list[dict[str, Any]] = answer.json() if answer.is_success else []
    return found


async def is_whole(http: httpx.AsyncClient, suite: RunningSuite) -> bool:
    """Return whether every process is back and knows all others."""
    try:
        if len(await workers(http, suite)) < suite.workers:
            return False
        for url in suite.ready["gateways"]:
            if (await gateway_metrics(http, url))["workers"] < suite.workers:
                return False
        for service in ("planner", "metrics"):
            if (await http.get(f"{suite.ready[service]}/readyz")).status_code != httpx.codes.OK:
                return False
    except httpx.TransportError:
        return False
    return True


async def until_whole(http: httpx.AsyncClient, suite: RunningSuite) -> None:
    """Wait until all of the suite's processes are back, for a bounded time."""
    async with asyncio.timeout(BACK_S):
        while not await is_whole(http, suite):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(POLL_S)


async def integrity(suite: RunningSuite, address: str) -> pb.Integrity:
    """Return the counters of what a worker still holds."""
    async with make_channel(CommonSettings(), address) as channel:
        metadata = grpc.aio.Metadata(("authorization", f"Bearer {suite.ready['token']}"))
        stub = pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.Describe(pb.DescribeRequest(), metadata=metadata)
        found: pb.Integrity = answer.integrity
        return found


async def set_role(suite: RunningSuite, address: str, epoch: int, role: str, budget_tokens: int = 0) -> int:
    """Change a worker's role as a planner would, and return the new epoch."""
    number, budget_tokens = role_from_name(role, budget_tokens)
    request = pb.SetRoleRequest(
        expected_epoch=epoch, role=number, budget_tokens=budget_tokens, reason="test", force=True
    )
    async with make_channel(CommonSettings(), address) as channel:
        metadata = grpc.aio.Metadata(("authorization", f"Bearer {suite.ready['token']}"))
        stub = pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.SetRole(request, metadata=metadata)
        return int(answer.assignment.epoch)


async def leftovers(http: httpx.AsyncClient, suite: RunningSuite) -> list[str]:
    """Return what gateways and workers hold without any request; empty if nothing leaks."""
    found = await _held_by_workers(http, suite)
    for url in suite.ready["gateways"]:
        metrics = await gateway_metrics(http, url)
        found += [f"{url}: {metrics[name]:g} {name}" for name in ("live", "waiting", "legs") if metrics[name]]
    return found


async def _held_by_workers(http: httpx.AsyncClient, suite: RunningSuite) -> list[str]:
    found: list[str] = []
    for worker in await workers(http, suite):
        held = await integrity(suite, worker["address"])
        counts = {name: getattr(held, name) for name in ("live_sequences", "referenced_blocks", "leased_handles")}
        found += [f"{worker['id']}: {count} {name}" for name, count in counts.items() if count]
    return found
