"""Tests of planner and metrics opened over their ports on a virtual clock, without broker, Redis or socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from libs.bus.port import BackReader, BusStats, Record
from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, ACTION_SET_MODE, Decision
from libs.contracts.topics import STEPS, Topic
from libs.policy.copies import LostCopies, UnreachableBrokers
from libs.runtime.tasks import TaskOwner
from libs.telemetry.rollups import TIERS
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.workers.telemetry import step, step_batch
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net
from load.chaos.rpc import SimTransport
from services.metrics.history import HistoryFile
from services.metrics.run import MetricsPorts, RunningMetrics, open_metrics
from services.metrics.settings import MetricsSettings
from services.planner.run import PlannerPorts, RunningPlanner, open_planner
from services.planner.settings import PlannerSettings

ORIGIN_NS = 1_700_000_000_000_000_000
TELEMETRY_MS = 100
RUN_S = 5.0
SILENT_S = 30.0


class LoopClock:
    """Unix time that only the loop moves."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return ORIGIN_NS + round(self._loop.time() * 1e9)


class MemoryBus:
    """A LiveBus between the services of one test: every reader gets the records from its subscription on."""

    def __init__(self) -> None:
        self.published: list[Any] = []
        self._readers: list[tuple[Sequence[Topic], asyncio.Queue[Record]]] = []

    async def start(self) -> None: ...

    def publish(self, topic: Topic, value: Any) -> None:
        self.published.append(value)
        for topics, queue in self._readers:
            if topic in topics:
                queue.put_nowait(Record(topic, "", value, 0, len(self.published)))

    def subscribe(self, topics: Sequence[Topic], **_: Any) -> AsyncIterator[Record]:
        queue: asyncio.Queue[Record] = asyncio.Queue()
        self._readers.append((topics, queue))
        return self._read(queue)

    subscribe_live = subscribe

    async def _read(self, queue: "asyncio.Queue[Record]") -> AsyncIterator[Record]:
        while True:
            yield await queue.get()

    def lost_copies(self) -> LostCopies | None:
        return None

    def unreachable_brokers(self) -> UnreachableBrokers | None:
        return None

    @asynccontextmanager
    async def back_reader(self) -> AsyncIterator[BackReader]:
        raise AssertionError("nothing was left out")
        yield

    def stats(self) -> BusStats:
        return BusStats(len(self.published), 0, 0, 0)

    async def close(self) -> None: ...


class Plane:
    """Both services, beside a worker that is busy for a quarter of its time."""

    def __init__(self, seed: int, **ports: Any) -> None:
        """`ports`: additional ones of the metrics service."""
        self.ports = ports
        self.loop = SimLoop(Random(seed))
        self.clock = LoopClock(self.loop)
        self.net = Net(self.loop, Random(seed), Log(self.loop, None))
        self.bus = MemoryBus()
        self.tasks = TaskOwner()
        self.planner: RunningPlanner
        self.metrics: RunningMetrics
        self.worker: asyncio.Task[None]

    def run(self, work: Callable[["Plane"], Awaitable[Any]]) -> Any:
        with closing(self.loop):
            return self.loop.run_until_complete(self._run(work))

    async def _run(self, work: Callable[["Plane"], Awaitable[Any]]) -> Any:
        worker = Worker(id="decode-0", incarnation=1, node="node-a", gpus=2, state=WORKER_STATE_READY)
        worker.assignment.CopyFrom(step_batch(1, (0, 1)).assignment)
        common: dict[str, Any] = {"sock": None, "clock": self.clock, "tasks": self.tasks}
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.tasks.close)
            self.metrics = await stack.enter_async_context(
                open_metrics(
                    settings=MetricsSettings.model_validate(
                        {"id": "metrics", "alert_webhooks": "http://127.0.0.1:9", "traces_url": "http://127.0.0.1:9"}
                    ),
                    ports=MetricsPorts(self.bus, thread_s=lambda: 0.0, **self.ports),
                    transport=SimTransport(self.net, Node("metrics"), "secret"),
                    **common,
                )
            )
            self.planner = await stack.enter_async_context(
                open_planner(
                    settings=PlannerSettings.model_validate({"id": "planner", "token": "secret"}),
                    ports=PlannerPorts(self.bus, ListedRegistry([worker])),
                    transport=SimTransport(self.net, Node("planner"), "secret"),
                    **common,
                )
            )
            self.worker = self.tasks.spawn("worker", self._report())
            await asyncio.sleep(RUN_S)
            result = await work(self)
        assert self.tasks.error is None
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    async def _report(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(TELEMETRY_MS / 1000)
            from_ms, number = number * TELEMETRY_MS, number + 1
            steps = [step(from_ms, from_ms + TELEMETRY_MS / 4, decode=1)]
            self.bus.publish(STEPS, step_batch(number, (from_ms, from_ms + TELEMETRY_MS), steps, gpus=2))

    async def ask(self, service: str, method: str, path: str, **more: Any) -> Any:
        _, app = self.net.apps[service]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{service}") as http:
            answer = await http.request(method, path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def look(plane: Plane) -> dict[str, Any]:
    """Return the answers of both after some virtual seconds."""
    (worker,) = await plane.ask("planner", "GET", "/v1/workers")
    (decision,) = await plane.ask("planner", "GET", "/v1/decisions?limit=1")
    occupancy = await plane.ask("metrics", "GET", "/v1/occupancy?window=1s")
    return {
        "url": (plane.planner.url, plane.metrics.url),
        "coverage": worker["coverage"],
        "pool": decision["pools"][0]["busy"],
        "decisions": len([each for each in plane.bus.published if isinstance(each, Decision)]),
        "decode": occupancy["decode"],
        "counted": dict(plane.metrics.state.decisions),
    }


def test_planner_and_metrics_serve_over_any_ports_in_virtual_time_and_leave_nothing_behind():
    seen = Plane(1).run(look)
    assert seen["url"] == ("http://planner", "http://metrics")
    assert (seen["coverage"], seen["pool"], seen["decode"]) == (1.0, 0.25, 0.25)
    assert seen["counted"] == {"keep": seen["decisions"]}
    assert 4 <= seen["decisions"] <= 7


def test_a_run_of_both_replays_exactly():
    def said(seed: int) -> list[bytes]:
        plane = Plane(seed)
        plane.run(look)
        return [each.SerializeToString(deterministic=True) for each in plane.bus.published]

    assert said(7) == said(7)


def test_a_mode_without_a_store_applies_and_is_reported_as_not_stored():
    async def set_mode(plane: Plane) -> Any:
        headers = {"authorization": "Bearer secret"}
        return await plane.ask("planner", "PUT", "/v1/mode", json={"mode": "off"}, headers=headers)

    plane = Plane(1)
    assert plane.run(set_mode) == {"mode": "off", "kept": False}
    decisions = [each for each in plane.bus.published if isinstance(each, Decision)]
    assert {each.action for each in decisions[:-1]} == {ACTION_KEEP}
    assert decisions[-1].action == ACTION_SET_MODE


def open_history(path: Path) -> HistoryFile:
    return HistoryFile(path, "local", TIERS[1:])


def test_history_is_stored_and_its_file_released_at_the_end(tmp_path):
    path = tmp_path / "history"
    Plane(1, history=open_history(path)).run(look)
    again = open_history(path)
    assert again.written_to_ns() is not None
    assert [member.worker_id for member in again.members()] == ["decode-0"]
    again.close()


def test_a_service_that_cannot_open_leaves_no_task_and_releases_its_file(tmp_path, monkeypatch):
    @asynccontextmanager
    async def refused(*_args: Any, **_more: Any) -> AsyncIterator[str]:
        raise StartupError("nobody may listen")
        yield ""

    path = tmp_path / "history"
    plane = Plane(1, history=open_history(path))
    monkeypatch.setattr(SimTransport, "http", refused)
    with pytest.raises(StartupError, match="nobody may listen"):
        plane.run(look)
    assert len(plane.tasks) == 0
    open_history(path).close()


def test_alerts_are_posted_with_the_given_client():
    posts: list[list[dict[str, Any]]] = []

    def receive(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/":
            posts.append(json.loads(request.content))
        return httpx.Response(200)

    async def fall_silent(plane: Plane) -> set[str]:
        plane.worker.cancel()
        await asyncio.sleep(SILENT_S)
        return {alert.name for alert in plane.metrics.desk.book.firing()}

    network = httpx.MockTransport(receive)
    firing = Plane(1, make_client=partial(httpx.AsyncClient, transport=network)).run(fall_silent)
    assert firing and firing == {alert["labels"]["alertname"] for alert in posts[-1]}
