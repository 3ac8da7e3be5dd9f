"""Workers in the test's own process, with the real host, engine and gRPC. The registry, index and bus only record."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import Message

from libs.bus.port import BusStats, Record, Wanted
from libs.contracts.packing import pack_u32, unpack_u32
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.step_row import StepRow, step_rows
from libs.contracts.topics import Topic
from libs.engine.local import make_engine
from libs.model.info import load_model_info
from libs.perfmodel.learner import FittedModel, StepKind
from libs.policy.worker.saturation import PrefillCurve
from libs.runtime.clock import SystemClock
from libs.runtime.net.access import call_metadata
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner
from libs.stores.kvindex import KvIndex, KvIndexStats, PrefixQuery
from libs.stores.registry import Registry, RegistryStats
from libs.stores.steps import StepTimeKey
from libs.worker.host import WorkerHost
from libs.worker.run import WorkerPorts, open_worker
from libs.worker.settings import WorkerSettings

TOKEN = "test-token"
WAIT_S = 10.0


class RecordingBus:
    """A bus that records what is published."""

    def __init__(self) -> None:
        self.published: list[Message] = []

    async def start(self) -> None: ...

    def publish(self, topic: Topic, value: Message) -> None:
        assert isinstance(value, topic.value)
        self.published.append(value)

    def subscribe(
        self,
        topics: Sequence[Topic],
        *,
        from_start: bool = False,
        since_unix_ns: int | None = None,
        wanted: Wanted | None = None,
    ) -> AsyncIterator[Record]:
        """Raise an error, as workers do not subscribe."""
        raise NotImplementedError

    def stats(self) -> BusStats:
        return BusStats(published=len(self.published), dropped=0, buffered=0)

    async def close(self) -> None: ...


class RecordingRegistry:
    """A registry that records the registrations of one worker, in order; None stands for its withdrawal."""

    def __init__(self) -> None:
        self.seen: list[Worker | None] = []
        self.kept: dict[str, Worker] = {}
        """The roles set by hand."""

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        self.seen.append(worker)

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        self.seen.append(None)

    async def workers(self) -> list[Worker]:
        """Return the last registration."""
        return [worker for worker in self.seen[-1:] if worker is not None]

    async def keep_role(self, worker: Worker, *, keep_ms: int) -> None:
        self.kept.pop(worker.id, None)
        if keep_ms:
            self.kept[worker.id] = worker

    async def kept_role(self, worker_id: str) -> Worker | None:
        return self.kept.get(worker_id)

    def watch(self, *, poll_ms: int = 1000) -> AsyncIterator[list[Worker]]:
        """Raise an error, as workers do not watch the registry."""
        raise NotImplementedError

    def stats(self) -> RegistryStats:
        return RegistryStats()

    async def close(self) -> None: ...


class RecordingKvIndex:
    """A KV index that records which blocks are listed."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Apply the change."""
        self.blocks.update(stored)
        self.blocks.difference_update(removed)

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        """Do nothing, as leases never end here."""

    async def forget(self, model: str, worker_id: str) -> None:
        self.blocks.clear()

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        """Raise an error, as workers do not look up prefixes."""
        raise NotImplementedError

    def stats(self) -> KvIndexStats:
        return KvIndexStats(0, 0, 0)

    async def close(self) -> None: ...


class RecordingStepTimes:
    """A store that records the fits and curves of one cluster."""

    def __init__(self) -> None:
        self.fits: defaultdict[StepTimeKey, dict[StepKind, FittedModel]] = defaultdict(dict)
        self.curves: dict[StepTimeKey, PrefillCurve] = {}
        self.claimed: set[StepTimeKey] = set()

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        return dict(self.fits[key])

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        self.fits[key].update(fits)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        return self.curves.get(key)

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        self.curves[key] = curve

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Grant the claim to the first caller."""
        if key in self.claimed:
            return False
        self.claimed.add(key)
        return True

    async def release(self, key: StepTimeKey) -> None:
        self.claimed.discard(key)

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker that serves in this process."""

    settings: WorkerSettings
    host: WorkerHost
    address: str
    bus: RecordingBus
    registry: RecordingRegistry
    index: RecordingKvIndex
    step_times: RecordingStepTimes

    def batches(self) -> list[StepBatch]:
        """The step telemetry that the worker has published."""
        return [value for value in self.bus.published if isinstance(value, StepBatch)]

    def steps(self, first: int = 0) -> list[StepRow]:
        """Return the steps of the worker's batches from batch `first` on."""
        return [row for batch in self.batches()[first:] for row in step_rows(batch.steps)]


@asynccontextmanager
async def local_worker(
    worker_id: str,
    role: str,
    *,
    registry: Registry | None = None,
    kv_index: KvIndex | None = None,
    step_times: RecordingStepTimes | None = None,
    **overrides: Any,
) -> AsyncIterator[LocalWorker]:
    """Run a sim worker on loopback; leaving the context kills it without a drain.

    A failed task fails the test. A given `registry` or `kv_index` is closed with the worker. `step_times` holds what
    earlier workers stored.
    """
    values: dict[str, Any] = {
        "engine": "sim", "sim_speedup": 50.0, "telemetry_ms": 20, "drain_s": 5.0, "token": TOKEN, "max_sequences": 8,
        "prefill_chunk_tokens": 512,
    } | overrides  # fmt: skip
    settings = WorkerSettings.model_validate({"id": worker_id, "role": role, **values})
    clock, tasks = SystemClock(), TaskOwner()
    model = load_model_info(settings.model_path)
    bus, seen, index = RecordingBus(), RecordingRegistry(), RecordingKvIndex()
    step_times = step_times or RecordingStepTimes()
    engine = make_engine(settings.engine, settings.engine_config(model.name), clock)
    ports = WorkerPorts(
        engine=engine,
        registry=registry or seen,
        kv_index=kv_index or index,
        step_times=step_times,
        bus=bus,
        model=model,
    )
    try:
        async with open_worker(settings, ports, clock, tasks) as running:
            yield LocalWorker(settings, running.host, running.address, bus, seen, index, step_times)
    finally:
        await tasks.close()
    if tasks.error is not None:
        raise tasks.error


@dataclass
class GatewayProbe:
    """A gateway's end of one stream, which records what the worker sends."""

    call: Any
    worker: Worker | None = None
    frames: list[pb.WorkerFrame] = field(default_factory=list)
    prefill_credits: int = 0
    decode_credits: int = 0
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    events: defaultdict[int, list[pb.SequenceEvent]] = field(default_factory=lambda: defaultdict(list))
    error: grpc.aio.AioRpcError | None = None
    returns_credits: bool = True
    wait_s: float = WAIT_S
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serialises writes: a call takes one at a time, and credits are returned while a test submits."""

    async def read(self) -> None:
        """Record frames until the stream ends."""
        try:
            async for frame in self.call:
                await self._take(frame)
                self.changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        self.changed.set()

    async def _take(self, frame: pb.WorkerFrame) -> None:
        self.frames.append(frame)
        if frame.HasField("worker"):
            self.worker = frame.worker
        self.prefill_credits += frame.credit.prefill_grant
        self.decode_credits += frame.credit.decode_grant
        for sequence, token in zip(unpack_u32(frame.token_sequences), unpack_u32(frame.token_ids), strict=True):
            self.tokens[sequence].append(token)
        for event in frame.events:
            self.events[event.sequence].append(event)
        prefill = max(min(frame.credit.prefill_recall, self.prefill_credits), 0)
        decode = max(min(frame.credit.decode_recall, self.decode_credits), 0)
        if self.returns_credits and (prefill or decode):
            self.prefill_credits -= prefill
            self.decode_credits -= decode
            await self.send(pb.GatewayFrame(returned_prefill=prefill, returned_decode=decode))

    async def send(self, frame: pb.GatewayFrame) -> None:
        """Send one frame to the worker."""
        async with self.writing:
            await self.call.write(frame)

    async def submit(self, *submits: pb.Submit) -> None:
        for submit in submits:
            if submit.phase == pb.PHASE_PREFILL:
                self.prefill_credits -= 1
            else:
                self.decode_credits -= 1
        await self.send(pb.GatewayFrame(submits=submits))

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds, for a bounded time."""
        async with asyncio.timeout(self.wait_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def event(self, sequence: int, kind: str) -> Any:
        """Wait for the first event of a kind ("finished", "refused", ...) of a sequence."""
        await self.until(lambda: any(event.HasField(kind) for event in self.events[sequence]))
        return next(getattr(event, kind) for event in self.events[sequence] if event.HasField(kind))


class Reachable(Protocol):
    """A worker in this process or another one."""

    @property
    def settings(self) -> CommonSettings:
        """The settings for connections to it."""
        ...

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        ...


@asynccontextmanager
async def gateway_probe(worker: Reachable, name: str = "gateway-0") -> AsyncIterator[GatewayProbe]:
    """Open a stream to `worker` and wait for its first frame; cancel it when the context closes."""
    async with make_channel(worker.settings, worker.address) as channel:
        metadata = call_metadata(worker.settings, worker.address)
        call = pb_grpc.WorkerServiceStub(channel).Serve(metadata=metadata)  # type: ignore[no-untyped-call]
        probe = GatewayProbe(call)
        await probe.send(pb.GatewayFrame(hello=pb.Hello(gateway_id=name, cluster=worker.settings.cluster)))
        reading = asyncio.create_task(probe.read(), name=f"read {name}")
        try:
            await probe.until(lambda: probe.worker is not None or probe.error is not None)
            yield probe
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def submit(sequence: int, phase: pb.Phase, prompt: Sequence[int], /, *, output: int = 8, **fields: Any) -> pb.Submit:
    """Build a greedy request that never ends early; `fields` override its fields."""
    values: dict[str, Any] = {
        "sequence": sequence,
        "request_id": f"request-{sequence}",
        "epoch": 1,
        "phase": phase,
        "token_ids": pack_u32(list(prompt)),
        "prompt_tokens": len(prompt),
        "max_output_tokens": output,
        "sampling": pb.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True),
        "model": "sim",
    } | fields
    return pb.Submit(**values)


async def eventually(condition: Callable[[], Any], *, within_s: float = WAIT_S) -> None:
    """Poll until `condition` holds; fail after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)
