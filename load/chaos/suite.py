"""A whole suite in virtual time: the real gateways, workers, planner and metrics service, with their clients.

A test or bench is a coroutine over a `VirtualSuite`. The same seed and coroutine give the same run.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeVar

import msgspec

from load.chaos.clients import ClientCall, send
from load.chaos.cluster import Cluster, Stores
from load.chaos.invariants import METRICS, PLANNER
from load.chaos.loop import Node, replayable
from load.chaos.net import Log, Net
from services.gateway.batch.run import BatchPorts
from services.metrics.status.report import status_now

T = TypeVar("T")
GATEWAY: Final = "g0"
# The time in which all processes find one another.
SETTLE_S: Final = 3.0
KV_LEASE_MS: Final = 30_000
TELEMETRY_MS: Final = 100
LETTERS: Final = range(97, 123)
# Each part of an answer with a token contains this once.
TOKEN: Final = b'"text"'
# The client gives up a request after this time.
LATE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class SuiteSpec:
    """The processes to start. Settings are the services' own, by field."""

    roles: Sequence[str]
    worker: Mapping[str, Any]
    gateway: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    batch: BatchPorts | None = None


@dataclass(slots=True)
class ClientRequest:
    """A request with what its client has received so far. Times are the loop's."""

    isl: int
    osl: int
    sent_s: float
    first_s: float = 0.0
    """The time of the first token; 0 before."""
    tokens: int = 0
    done: bool = False
    status: int = 0
    broken: str = ""

    @property
    def failed(self) -> str:
        """The reason why the request failed; empty while it runs and if it succeeded."""
        if self.broken or not self.done:
            return self.broken
        return "" if self.status == 200 and self.tokens else f"status {self.status}"


class VirtualSuite:
    """A running suite, its clock and its clients."""

    def __init__(self, spec: SuiteSpec, cluster: Cluster, seed: int) -> None:
        self._roles = spec.roles
        self.cluster = cluster
        self.client = Node("client")
        self.requests: list[ClientRequest] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._chance = Random(f"{seed} prompts")
        cluster.loop.add(self.client)

    @property
    def now_s(self) -> float:
        return self.cluster.loop.time()

    async def start(self) -> None:
        """Start everything. Return once all processes have found one another."""
        self.cluster.start_gateway(GATEWAY)
        for number, role in enumerate(self._roles):
            self.cluster.start_worker(f"w{number}", role)
        self.cluster.start_planner(PLANNER)
        self.cluster.start_metrics(METRICS)
        await asyncio.sleep(SETTLE_S)

    def status(self) -> dict[str, Any]:
        metrics = self.cluster.processes[METRICS].metrics
        assert metrics is not None
        now_ns = self.cluster.clock.now_ns()
        report = status_now(metrics.state, metrics.verdicts, metrics.desk.book, now_ns)
        return dict(msgspec.to_builtins(report))

    def alerts(self) -> set[str]:
        metrics = self.cluster.processes[METRICS].metrics
        assert metrics is not None
        return {each.name for each in metrics.desk.book.firing()}

    def play(self, requests: Sequence[tuple[float, int, int]]) -> "asyncio.Task[None]":
        """Send each request (time in seconds, ISL, OSL) at its time, counted from now."""
        task = self.cluster.loop.spawn(self.client, self._play(requests))
        self._tasks.append(task)
        return task

    async def ask(self, isl: int, osl: int, *, model: str = "sim") -> ClientRequest:
        """Send one streamed request, and return it at its end."""
        request = ClientRequest(isl, osl, self.now_s)
        self.requests.append(request)
        prompt = tuple(self._chance.choice(LETTERS) for _ in range(isl))
        ask = ClientCall(
            len(self.requests), prompt, osl, temperature=0.0, seed=0, n=1, stream=True, stop="", leaves_after_s=LATE_S,
            model=model,
        )  # fmt: skip

        def came(part: bytes) -> None:
            count = part.count(TOKEN)
            if count:
                request.first_s = request.first_s or self.now_s
                request.tokens += count

        outcome = await send(self.cluster.net, self.client, GATEWAY, ask, came)
        request.done = True
        if outcome is None or outcome.left:
            request.broken = "refused" if outcome is None else "too late"
        else:
            request.status, request.broken = outcome.status, outcome.broken
        return request

    async def set_roles(self, workers: Sequence[str], role: str) -> None:
        """Set roles as `fulcrum role` does. Return once each worker has answered."""
        await asyncio.gather(*(self.cluster.set_role(self.client, name, role) for name in workers))

    def stop(self) -> None:
        """Stop all clients and close their streams."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()

    async def _play(self, requests: Sequence[tuple[float, int, int]]) -> None:
        began_s = self.now_s
        async with asyncio.TaskGroup() as asking:
            for at_s, isl, osl in requests:
                await asyncio.sleep(max(began_s + at_s - self.now_s, 0))
                asking.create_task(self.ask(isl, osl))


def run_virtual(spec: SuiteSpec, seed: int, play: Callable[[VirtualSuite], Coroutine[Any, Any, T]]) -> T:
    """Start a suite, run `play` on it, and stop the suite. Raise AssertionError if a service failed."""
    with replayable(seed) as loop:
        net = Net(loop, Random(f"{seed} network"), Log(loop, None))
        engine = {"kv_lease_ms": KV_LEASE_MS, "telemetry_ms": TELEMETRY_MS, "engine": "sim", **spec.worker}
        settings = {"gateway": spec.gateway, "planner": spec.planner, "metrics": spec.metrics}
        stores = Stores(loop, Random(f"{seed} stores"))
        cluster = Cluster(loop, net, stores, engine=engine, settings=settings, batch=spec.batch)
        suite = VirtualSuite(spec, cluster, seed)
        return cluster.run(_run(suite, play))


async def _run(suite: VirtualSuite, play: Callable[[VirtualSuite], Coroutine[Any, Any, T]]) -> T:
    await suite.start()
    found = await play(suite)
    suite.stop()
    await asyncio.sleep(0)
    wrong = [*suite.cluster.wrong, *suite.cluster.net.faults]
    if wrong:
        raise AssertionError("; ".join(wrong[:5]))
    return found
