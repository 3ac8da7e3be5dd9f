"""Tests of the cost of an idle suite: wake-ups and records of a gateway and workers in virtual time."""

import asyncio
import contextlib
import io
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import structlog
from prometheus_client import CollectorRegistry

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_ADVISORY
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, StepBatch
from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS
from libs.contracts.step_row import step_count
from libs.contracts.topics import QUEUES, STEPS
from libs.telemetry.columns import prefill_shares
from libs.testing.workers.hosts import RecordingBus
from load.chaos.clients import ClientCall, check, send
from load.chaos.cluster import PROFILE, Cluster, SimClock, Stores
from load.chaos.loop import Node, SimLoop, current_node
from load.chaos.net import Log, Net
from services.gateway.fleet import TICK_MS
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.stream import TICK_NS, Hub, TickWriter, tick_forever
from services.planner.kept import Lead, LeaderLease
from services.planner.state import Identity, PlannerState, decide_forever

T = TypeVar("T")

SETTLE_S = 3.0
WATCHED_S = 10.0
MS_NS = 1_000_000
SILENT_MS = 0.5
"""No whole tick of silence."""


class WatchedLoop(SimLoop):
    """A loop that records when each node's timers fire. Timers of one instant wake a process once, and a message in
    flight wakes none."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.woken: defaultdict[str, set[float]] = defaultdict(set)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call the original, with a note."""
        node = None if context is self.world else current_node()

        def fire(*given: Any) -> None:
            if node is not None:
                self.woken[node.name].add(self.time())
            callback(*given)

        return super().call_at(when, fire, *args, context=context)


class Rig:
    """A gateway, a prefill worker and a decode worker."""

    def __init__(self) -> None:
        self.loop = WatchedLoop(Random("turns"))
        self.net = Net(self.loop, Random("network"), Log(self.loop, None))
        self.stores = Stores(self.loop, Random("stores"))
        engine = {**PROFILE, "telemetry_ms": 100, "sim_speedup": 1.0}
        self.cluster = Cluster(self.loop, self.net, self.stores, engine=engine)

    def run(self, work: Callable[["Rig"], Awaitable[T]]) -> T:
        """Return the result once the three have found each other."""

        async def settled() -> T:
            self.cluster.start_gateway("g0")
            for name, role in (("p0", "prefill"), ("d0", "decode")):
                self.cluster.start_worker(name, role)
            await asyncio.sleep(SETTLE_S)
            return await work(self)

        structlog.configure(processors=[_drop])
        try:
            with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
                return self.cluster.run(settled())
        finally:
            structlog.reset_defaults()

    async def watch(self) -> tuple[Counter[str], list[Any]]:
        """Return wake-ups by node, and records, of some idle seconds."""
        self.loop.woken.clear()
        since_unix_ns = self.cluster.clock.now_ns()
        await asyncio.sleep(WATCHED_S)
        woken = Counter({name: len(moments) for name, moments in self.loop.woken.items()})
        return woken, [
            each for topic in (STEPS, QUEUES) for each in self.stores.records(topic, since_unix_ns=since_unix_ns)
        ]

    async def ask(self, tokens: int) -> None:
        """Send one request, and wait for its answer."""
        client = Node("client")
        self.loop.add(client)
        ask = ClientCall(
            1, (97, 98, 99), tokens, temperature=0.8, seed=1, n=1, stream=True, stop="", leaves_after_s=None
        )
        outcome = await self.loop.spawn(client, send(self.net, client, "g0", ask))
        assert outcome is not None and check(outcome) == []

    def batches(self, worker: str) -> list[StepBatch]:
        """Return its telemetry so far."""
        reported = self.stores.records(STEPS)
        return [each for each in reported if isinstance(each, StepBatch) and each.worker_id == worker]


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


@pytest.mark.parametrize(("name", "most_a_second"), [("p0", 30), ("d0", 30), ("g0", 60)])
def test_timers_wake_an_idle_process_at_most_this_often(name: str, most_a_second: int) -> None:
    woken, _ = Rig().run(Rig.watch)
    assert 0 < woken[name] <= most_a_second * WATCHED_S


def test_an_idle_worker_reports_all_of_its_time_three_times_a_second() -> None:
    _, records = Rig().run(Rig.watch)
    for worker in ("p0", "d0"):
        batches = [each for each in records if isinstance(each, StepBatch) and each.worker_id == worker]
        assert len(batches) > 30
        for earlier, later in itertools.pairwise(batches):
            assert later.covered_from_unix_ns == earlier.covered_to_unix_ns
            assert 290 * MS_NS <= later.covered_to_unix_ns - later.covered_from_unix_ns <= 310 * MS_NS


def test_a_busy_worker_reports_its_time_every_period() -> None:
    rig = Rig()

    async def work(rig: Rig) -> None:
        first = len(rig.batches("d0"))
        await rig.ask(200)
        reported = rig.batches("d0")[first:]
        busy = [place for place, each in enumerate(reported) if step_count(each.steps)]
        assert len(busy) > 5
        for each in reported[busy[0] + 1 : busy[-1] + 1]:
            assert each.covered_to_unix_ns - each.covered_from_unix_ns <= 110 * MS_NS

    rig.run(work)


def test_work_begun_by_an_idle_worker_is_reported_within_a_period() -> None:
    rig = Rig()

    async def work(rig: Rig) -> None:
        asking = asyncio.ensure_future(rig.ask(200))
        while not any(step_count(each.steps) for each in rig.batches("d0")):
            await asyncio.sleep(0.001)
        now_ns = rig.cluster.loop.time() * 1e9
        batch = rig.batches("d0")[-1]
        began_ns = min(memoryview(batch.steps.start_unix_ns).cast("Q")) - (batch.covered_to_unix_ns - now_ns)
        assert now_ns - began_ns <= 105 * MS_NS
        await asking

    rig.run(work)


def test_a_new_role_is_reported_within_a_period() -> None:
    rig = Rig()

    async def work(rig: Rig) -> None:
        client = Node("admin")
        rig.loop.add(client)
        await rig.loop.spawn(client, rig.cluster.set_role(client, "d0", "prefill"))
        set_s = rig.loop.time()
        while rig.batches("d0")[-1].assignment.epoch != 2:
            await asyncio.sleep(0.001)
        assert rig.loop.time() - set_s <= 0.105

    rig.run(work)


@pytest.mark.parametrize(("busy", "bound_ms"), [(False, RESTING_SIGN_OF_LIFE_MS), (True, SIGN_OF_LIFE_MS)])
def test_a_worker_sends_each_gateway_a_keepalive_just_in_time(busy: bool, bound_ms: int) -> None:
    rig = Rig()

    async def work(rig: Rig) -> None:
        asking = asyncio.ensure_future(rig.ask(2_000)) if busy else None
        await asyncio.sleep(1.0)
        assert asking is None or not asking.done()
        gateway = rig.cluster.processes["g0"].gateway
        assert gateway is not None
        longest_ms, received = 0.0, 0
        until_s = rig.loop.time() + WATCHED_S
        while rig.loop.time() < until_s and not (asking and asking.done()):
            await asyncio.sleep(0.005)
            links = [link for link in gateway.fleet.links if bool(link.running) == busy]
            longest_ms = max([longest_ms, *(link.silent_ms for link in links)])
            received += sum(link.silent_ms == 0.0 for link in links)
        assert received
        assert longest_ms < bound_ms + 50
        assert busy or longest_ms > bound_ms / 2
        if asking is not None:
            await asking

    rig.run(work)


def test_work_for_an_idle_worker_causes_a_keepalive_at_once() -> None:
    rig = Rig()

    async def work(rig: Rig) -> None:
        gateway = rig.cluster.processes["g0"].gateway
        assert gateway is not None
        for _ in range(7):  # at moments of its beat that differ
            await asyncio.sleep(0.57)
            asking = asyncio.ensure_future(rig.ask(2))
            while not (busy := [link for link in gateway.fleet.links if link.running]):
                await asyncio.sleep(0.0005)
            since_s = rig.loop.time()
            for link in busy:
                link.silent_ms = SILENT_MS
            while any(link.silent_ms % TICK_MS == SILENT_MS for link in busy):  # a frame makes it 0
                await asyncio.sleep(0.0005)
            assert rig.loop.time() - since_s < SIGN_OF_LIFE_MS / 1e3
            await asking

    rig.run(work)


@pytest.mark.parametrize(("readers", "a_second"), [((), 2.5), ((False,), 10), ((False, True), 40)])
def test_the_metrics_service_ticks_faster_than_windows_only_for_readers_that_request_it(
    readers: tuple[bool, ...], a_second: int
) -> None:
    loop = WatchedLoop(Random("turns"))
    node = Node("metrics")
    loop.add(node)
    state, hub = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry())), Hub()
    writer = TickWriter(window_ns=TICK_NS, settled_ns=400 * MS_NS)
    desk = AlertEvaluator(state, MetricsSettings().alert_limits(), lag_ns=0)

    async def watch() -> None:
        with contextlib.ExitStack() as reading:
            for between in readers:
                reading.enter_context(hub.reader(between=between))
            ticking = loop.spawn(node, tick_forever(state, hub, writer, desk, SimClock(loop), lag_ns=50 * MS_NS))
            await asyncio.sleep(WATCHED_S)
            ticking.cancel()

    try:
        loop.run_until_complete(watch())
        assert len(loop.woken["metrics"]) == pytest.approx(a_second * WATCHED_S, abs=2)
    finally:
        loop.run_until_complete(loop.bury([node]))
        loop.close()


@pytest.mark.parametrize(("rests", "looks"), [(True, 10), (False, 50)])
def test_a_planner_decides_and_reports_once_a_second_for_an_idle_cluster(
    rests: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = SimLoop(Random("turns"))
    bus, clock = RecordingBus(), SimClock(loop)
    identity = Identity("planner", clock.now_ns(), MODE_ADVISORY)
    state = PlannerState(identity, lag_ns=0, window_ns=MS_NS, kept_decisions=9)
    state.take_workers([] if rests else [Worker(id="silent")], clock.now_ns())
    looked = []
    monkeypatch.setattr(state, "decide", lambda now_ns: looked.append(now_ns) or PlannerState.decide(state, now_ns))

    async def watch() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCHED_S - 0.05):
                await decide_forever(
                    bus, state, clock, period_s=0.2, lease=LeaderLease(Lead.OURS), news=asyncio.Event()
                )

    try:
        loop.run_until_complete(watch())
    finally:
        loop.close()
    assert (len(looked), len(bus.published)) == (looks, 10)


def test_an_idle_gateway_reports_its_empty_queue_at_most_twice_a_second() -> None:
    _, records = Rig().run(Rig.watch)
    reported = [each.told_unix_ns for each in records if isinstance(each, GatewayQueues)]
    assert reported
    assert all(500 * MS_NS <= later - earlier <= 750 * MS_NS for earlier, later in itertools.pairwise(reported))


def test_news_do_not_delay_later_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner notified of a growing queue again and again still decides every period afterwards."""
    loop = SimLoop(Random("news"))
    bus, clock = RecordingBus(), SimClock(loop)
    state = PlannerState(
        Identity("planner", clock.now_ns(), MODE_ADVISORY), lag_ns=0, window_ns=MS_NS, kept_decisions=9
    )
    state.take_workers([Worker(id="silent")], clock.now_ns())
    looked: list[float] = []
    monkeypatch.setattr(
        state, "decide", lambda now_ns: looked.append(loop.time()) or PlannerState.decide(state, now_ns)
    )

    async def watch() -> None:
        news = asyncio.Event()
        deciding = asyncio.create_task(
            decide_forever(bus, state, clock, period_s=0.2, lease=LeaderLease(Lead.OURS), news=news)
        )
        for _ in range(20):
            news.set()
            await asyncio.sleep(0.03)
        await asyncio.sleep(2)
        deciding.cancel()
        await asyncio.gather(deciding, return_exceptions=True)

    try:
        loop.run_until_complete(watch())
    finally:
        loop.close()
    assert len([at_s for at_s in looked if at_s < 0.6]) >= 15
    assert max(later - earlier for earlier, later in itertools.pairwise(looked)) <= 0.21
