"""The real gateways, workers, planner and metrics service on a simulated network with stores in memory.

The stores replace Redis and the broker. A seed draws the delays of the network.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar
from zlib import crc32

from google.protobuf.message import Message

from libs.actuators.port import Actuator
from libs.bus.codec import Outgoing
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.roles import role_from_name
from libs.contracts.topics import ALL, Topic
from libs.engine.local import make_engine
from libs.keys.table import KeyTable
from libs.model.info import load_model_info
from libs.runtime.net.access import bearer
from libs.runtime.tasks import TaskOwner
from libs.stores.limits import Ledger
from libs.testing.memory.broker import MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.memory.kvindex import MemoryKvIndex
from libs.testing.memory.registry import MemoryRegistry
from libs.testing.memory.steptimes import MemoryStepTimes
from libs.testing.memory.store import MemoryStore
from libs.worker.host import drain
from libs.worker.run import RunningWorker, WorkerPorts, open_worker
from libs.worker.settings import WorkerSettings
from load.chaos.loop import Node, SimLoop, Stuck
from load.chaos.net import Net
from load.chaos.rpc import SimTransport
from services.gateway.batch.run import BatchPorts
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, RunningGateway, open_gateway
from services.gateway.settings import GatewaySettings
from services.metrics.run import MetricsPorts, RunningMetrics, open_metrics
from services.metrics.settings import MetricsSettings
from services.planner.run import PlannerPorts, RunningPlanner, open_planner
from services.planner.settings import PlannerSettings

CLUSTER = "simulated"
# The minimum travel time of a message. The maximum is twice as long.
ONE_WAY_S = 0.00025


class Stores:
    """The stores that all nodes of a run share."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self._loop = loop
        self._random = random
        self.late_s = 0.0
        """The longest delay of the registry's notifications."""
        self.redis = MemoryStore(travel=self._travel, news_travel=self._travel_late)
        self.broker = MemoryBroker(travel=self._travel)

    def records(self, topic: Topic, *, since_unix_ns: int = 0) -> list[Message]:
        """Return all of a topic's records that the broker has taken. The records of each key are in order."""
        return self.broker.values(topic, CLUSTER, since_unix_ns=since_unix_ns)

    def digest(self) -> int:
        """Return a digest of every record. Runs with equal records have equal digests."""
        digest = 0
        for topic in ALL:
            for value in self.records(topic):
                # Without `deterministic`, maps are written in any order.
                digest = crc32(value.SerializeToString(deterministic=True), digest)
        return digest

    def heal(self) -> None:
        """Restart and resume both stores, and remove their delays."""
        self.late_s = 0.0
        for server in (self.redis, self.broker):
            server.start()
            server.thaw()

    async def _travel(self) -> None:
        await self._pass(ONE_WAY_S * (1 + self._random.random()))

    async def _travel_late(self) -> None:
        await self._pass(ONE_WAY_S + self.late_s * self._random.random())

    async def _pass(self, delay_s: float) -> None:
        # The loop's timer outside any node, so that a frozen process does not delay the message.
        arrived = self._loop.create_future()
        self._loop.after(delay_s, _arrive, arrived)
        await arrived


def _arrive(arrived: "asyncio.Future[None]") -> None:
    if not arrived.done():
        arrived.set_result(None)


T = TypeVar("T")
EPOCH_NS = 1_700_000_000_000_000_000
TOKEN = "simulated"
_METADATA = bearer(TOKEN)
# The deadline of each call that sets a role.
ADMIN_S = 2.0
PORT = 50051
DRAIN_S = 3
KV_LEASE_MS = 4000
BUDGET_TOKENS = 64
PROFILE: dict[str, Any] = {"engine": "sim", "sim_speedup": 4.0, "max_sequences": 12, "prefill_chunk_tokens": 128}


class SimClock:
    """A clock that shows the loop's virtual time as Unix time."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return EPOCH_NS + int(self._loop.time() * 1e9)

    def to_s(self, unix_ns: int) -> float:
        """Return the loop's time for a Unix time."""
        return (unix_ns - EPOCH_NS) / 1e9


@dataclass(eq=False)
class Process:
    """One life of a service, from its start until it is killed or leaves."""

    node: Node
    tasks: TaskOwner
    stopping: asyncio.Event
    bus: MemoryBus
    main: "asyncio.Task[None] | None" = None
    gateway: RunningGateway | None = None
    worker: RunningWorker | None = None
    planner: RunningPlanner | None = None
    metrics: RunningMetrics | None = None
    decided: list[Decision] = field(default_factory=list)
    """The decisions that the process's planner has published. Of repeated ones, only the newest is kept."""
    spare_tasks: int = 0
    """The number of tasks that the process has beside its links' when nothing runs."""
    served_s: float | None = None
    """The time at which the process began to serve; None before."""
    ended_s: float | None = None
    """The time at which the process was killed or asked to leave; None before."""
    still_since_s: float | None = None
    still_s: list[tuple[float, float]] = field(default_factory=list)
    """The past intervals in which the process was frozen."""

    @property
    def up(self) -> bool:
        return not self.node.dead and self.served_s is not None and not self.stopping.is_set()

    def stood_still(self, now_s: float) -> list[tuple[float, float]]:
        """Return the intervals in which the process was frozen, up to now."""
        return [*self.still_s, *([] if self.still_since_s is None else [(self.still_since_s, now_s)])]


@dataclass
class Cluster:
    """All processes of a run, including dead ones."""

    loop: SimLoop
    net: Net
    stores: Stores
    wrong: list[str] = field(default_factory=list)
    engine: Mapping[str, Any] = field(default_factory=lambda: PROFILE)
    """The settings of workers beside their names and roles."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings of each service (gateway, planner, metrics) beside its name."""
    batch: BatchPorts | None = None
    """The batch ports of every gateway; None to run no batches."""
    keys: KeyTable | None = None
    """The keys that every gateway knows; None to accept every caller."""
    limits: Ledger | None = None
    """The ledger that all gateways share; None for no limits and no shared places."""
    actuator: Actuator | None = None
    """The actuator of every planner; None to scale nothing."""
    processes: dict[str, Process] = field(default_factory=dict)
    past: list[Process] = field(default_factory=list)
    lost: list[Outgoing] = field(default_factory=list)
    """The records that killed processes had not sent, which the broker may therefore lack."""

    def __post_init__(self) -> None:
        self.clock = SimClock(self.loop)

    def workers(self) -> list[Process]:
        """Return the serving workers in order of their names."""
        return [each for _, each in sorted(self.processes.items()) if each.up and each.worker is not None]

    def gateways(self) -> list[Process]:
        """Return the serving gateways in order of their names."""
        return [each for _, each in sorted(self.processes.items()) if each.up and each.gateway is not None]

    def start_gateway(self, name: str) -> None:
        """Start a gateway. An earlier process with this name must have ended."""
        self._start(name, self._gateway)

    def start_worker(self, name: str, role: str) -> None:
        """Start a worker in a first role. An earlier process with this name must have ended."""
        self._start(name, partial(self._worker, role=role))

    def start_planner(self, name: str) -> None:
        self._start(name, self._planner)

    def start_metrics(self, name: str) -> None:
        self._start(name, self._metrics)

    def kill(self, name: str) -> None:
        """Kill a process as SIGKILL does."""
        process = self.processes.pop(name)
        process.ended_s = self.loop.time()
        self.past.append(process)
        self.lost += process.bus.unsent()
        self.loop.kill(process.node)
        self.net.killed(process.node)

    def freeze(self, name: str) -> None:
        """Stop a process as SIGSTOP does."""
        process = self.processes[name]
        if process.still_since_s is None:
            process.still_since_s = self.loop.time()
        process.node.frozen = True
        self.net.frozen(process.node)

    def thaw(self, name: str) -> None:
        """Continue a process as SIGCONT does."""
        process = self.processes.get(name)
        if process is not None and process.still_since_s is not None:
            process.node.frozen = False
            process.still_s.append((process.still_since_s, self.loop.time()))
            process.still_since_s = None

    def stop(self, name: str) -> None:
        """Ask a process to leave, as SIGTERM does."""
        process = self.processes[name]
        process.ended_s = self.loop.time()
        self.loop.call_soon(process.stopping.set, context=process.node.context.copy())

    async def set_role(self, client: Node, name: str, *roles: str) -> None:
        """Set a role through the admin service, as the planner does. The worker may refuse it.

        If several roles are sent for the same epoch, at most one may be accepted.
        """
        async with SimTransport(self.net, client, TOKEN).channel(f"{name}:{PORT}") as channel:
            stub: Any = pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                found = await stub.Describe(pb.DescribeRequest(), metadata=_METADATA, timeout=ADMIN_S)
            except Exception as error:
                self.net.log.add(f"set role of {name}: {type(error).__name__}")
                return
            won = await asyncio.gather(*(self._set_role(stub, found.worker, role) for role in roles))
        if sum(won) > 1:
            self.wrong.append(f"{name}: {sum(won)} of {roles} were taken at epoch {found.worker.assignment.epoch}")

    async def _set_role(self, stub: Any, worker: Worker, role: str) -> bool:
        name, _, budget = role.partition(":")
        number, budget_tokens = role_from_name(name, int(budget or BUDGET_TOKENS))
        epoch = worker.assignment.epoch
        request = pb.SetRoleRequest(
            expected_epoch=epoch,
            incarnation=worker.incarnation,
            role=number,
            budget_tokens=budget_tokens,
            force=True,  # a fault may request any change
        )
        try:
            answer = await stub.SetRole(request, metadata=_METADATA, timeout=ADMIN_S)
        except Exception as error:
            self.net.log.add(f"set role of {worker.id}: {type(error).__name__}")
            return False
        if answer.assignment.epoch != epoch + 1:
            self.wrong.append(f"{worker.id}: epoch {answer.assignment.epoch} follows {epoch}")
        return True

    def _start(self, name: str, live: Callable[[Process, AsyncExitStack], Awaitable[None]]) -> None:
        node = Node(name)
        self.loop.add(node)
        tasks = TaskOwner(lambda error: self.wrong.append(f"{name}: a task failed with {error!r}"))
        bus = MemoryBus(self.stores.broker, CLUSTER, clock=self.clock, on_failure=tasks.fail)
        process = self.processes[name] = Process(node, tasks, asyncio.Event(), bus)
        process.main = self.loop.spawn(node, self._live(process, live))

    async def _live(self, process: Process, live: Callable[[Process, AsyncExitStack], Awaitable[None]]) -> None:
        """Run a process to its end. Close what `live` opened, then the process's tasks, then its bus."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(process.bus.close)
            stack.push_async_callback(process.tasks.close)
            await live(process, stack)
        self._ended(process)

    async def _serve(self, process: Process) -> None:
        """Serve until the process is asked to leave."""
        process.served_s = self.loop.time()
        await process.stopping.wait()

    async def _gateway(self, process: Process, stack: AsyncExitStack) -> None:
        name = process.node.name
        settings = GatewaySettings.model_validate(
            {"id": name, "port": 0, "drain_s": DRAIN_S, "max_waiting": 512, "no_workers_wait_ms": 8000}
            | dict(self.settings.get("gateway", {}))
        )
        starting = process.tasks.spawn("bus", process.bus.start())
        ports = GatewayPorts(
            process.bus, self._registry(), MemoryKvIndex(self.stores.redis, CLUSTER), self.batch, keys=self.keys,
            limits=self.limits, random_bytes=Random(f"{name} {self.loop.time()}").randbytes,
        )  # fmt: skip
        process.gateway = await stack.enter_async_context(
            open_gateway(
                settings=settings, ports=ports, catalog=load_catalog(settings.models), sock=None,  # type: ignore[arg-type]
                clock=self.clock, tasks=process.tasks, transport=self._transport(process),
            )
        )  # fmt: skip
        process.spare_tasks = len(process.tasks) - (not starting.done())
        await self._serve(process)

    async def _worker(self, process: Process, stack: AsyncExitStack, role: str) -> None:
        name, redis = process.node.name, self.stores.redis
        settings = WorkerSettings.model_validate(
            {
                "id": name, "role": role, "host": name, "port": PORT, "node": name,
                "budget_tokens": BUDGET_TOKENS if role == "mixed" else 0, "drain_s": DRAIN_S,
                "kv_lease_ms": KV_LEASE_MS, "telemetry_ms": 500, "kv_shared_dir": None, **self.engine,
            }
        )  # fmt: skip
        model = load_model_info(settings.model_path)
        chance = Random(self.net.random.getrandbits(64))
        config = settings.engine_config(model.name)
        engine = make_engine(settings.engine, config, self.clock, random_bytes=chance.randbytes)
        ports = WorkerPorts(
            engine=engine, registry=self._registry(), kv_index=MemoryKvIndex(redis, CLUSTER),
            step_times=MemoryStepTimes(redis, CLUSTER), bus=process.bus, model=model,
        )  # fmt: skip
        opening = open_worker(settings, ports, self.clock, process.tasks, self._transport(process))
        process.worker = await stack.enter_async_context(opening)
        await self._serve(process)
        await drain(process.worker.host, DRAIN_S)

    async def _planner(self, process: Process, stack: AsyncExitStack) -> None:
        publish = process.bus.publish

        def overheard(topic: Topic, value: Message) -> None:
            if isinstance(value, Decision) and not value.HasField("measured"):
                process.decided.append(Decision.FromString(value.SerializeToString()))
            publish(topic, value)

        process.bus.publish = overheard  # type: ignore[method-assign]
        actuators = [self.actuator] if self.actuator is not None else []
        opening = open_planner(
            settings=PlannerSettings.model_validate(
                {"id": process.node.name, "token": TOKEN, **self.settings.get("planner", {})}
            ),
            ports=PlannerPorts(process.bus, self._registry(), actuators=actuators), sock=None,  # type: ignore[arg-type]
            clock=self.clock, tasks=process.tasks, transport=self._transport(process),
        )  # fmt: skip
        process.planner = await stack.enter_async_context(opening)
        await self._serve(process)

    async def _metrics(self, process: Process, stack: AsyncExitStack) -> None:
        opening = open_metrics(
            settings=MetricsSettings.model_validate({"id": process.node.name, **self.settings.get("metrics", {})}),
            ports=MetricsPorts(process.bus, thread_s=lambda: 0.0), sock=None,  # type: ignore[arg-type]
            clock=self.clock, tasks=process.tasks, transport=self._transport(process),
        )  # fmt: skip
        process.metrics = await stack.enter_async_context(opening)
        await self._serve(process)

    def _registry(self) -> MemoryRegistry:
        return MemoryRegistry(self.stores.redis, CLUSTER)

    def _transport(self, process: Process) -> SimTransport:
        return SimTransport(self.net, process.node, TOKEN)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result. Close the loop without leftovers for the garbage collector."""
        try:
            return self.loop.run_until_complete(work)
        finally:
            self.bury()
            self.loop.close()

    def bury(self, *others: Node) -> None:
        """End silently what is left of a run: tasks of its processes, including dead ones, and of `others`.

        Otherwise the garbage collector would end them at a random moment.
        """
        processes = (*self.past, *self.processes.values())
        self.loop.set_exception_handler(lambda _loop, _context: None)
        with suppress(Stuck):
            self.loop.run_until_complete(self.loop.bury([*others, *(each.node for each in processes)]))

    def _ended(self, process: Process) -> None:
        """Record that a process left by itself, and check that its earlier tasks have ended."""
        if self.processes.get(process.node.name) is process:
            del self.processes[process.node.name]
        self.past.append(process)
        left = [task for task in process.node.tasks if not task.done() and task is not process.main]
        if left:
            self.wrong.append(f"{process.node} has ended and left {len(left)} tasks: {left[:3]}")
