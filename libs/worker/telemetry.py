"""Step telemetry: learned step times, and batches of events that cover a worker's time without gaps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import structlog

from libs.bus.port import Bus
from libs.contracts import topics
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load, StepTime
from libs.contracts.pb.fulcrum.telemetry.v1 import telemetry_pb2 as pb
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import DummySteps, Interval, KvTransfer, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.counters import GpuReading, GpuSampler
from libs.engine.port import Engine
from libs.engine.reports import EngineEvent, EngineLoad, KvTransferReport, StepReport
from libs.model.info import ModelInfo
from libs.perfmodel.fit import MIN_STEPS
from libs.perfmodel.learner import FittedModel, StepKind, StepTimeLearner, combine
from libs.perfmodel.utilisation import Compute
from libs.perfmodel.wire import compute_message, step_time_message, step_work
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.saturation import PrefillCurve
from libs.runtime.clock import Clock
from libs.runtime.linux import CpuWaitReader
from libs.stores.steps import StepTimeKey, StepTimeStore
from libs.worker.host import WorkerHost
from libs.worker.kv_server import KvServicer
from libs.worker.wire import load_message

log = structlog.get_logger()

REFIT_S: Final = 2.0
# The number of leading characters of a model's revision in the keys of stored step times.
REVISION_CHARS: Final = 16
# The interval at which learned step times are stored. They are also stored at the end.
SAVE_S: Final = 30.0


class StepTimes:
    """The step times learned from every step, refitted and stored at intervals. Observers are notified of changes."""

    def __init__(self, store: StepTimeStore, key: StepTimeKey, prior: StepTimeModel, *, exact: bool = False) -> None:
        """Create the learner. `exact` means that the prior is the formula of a simulated device."""
        self._store = store
        self._key = key
        self._exact = frozenset(StepKind) if exact else frozenset[StepKind]()
        self._learner = StepTimeLearner(prior, self._exact)
        self._observers: list[Callable[[StepTimeModel], None]] = []
        self.fitted: FittedModel = self._learner.fitted()
        self.known: frozenset[StepKind] = frozenset()
        """The kinds of steps that earlier workers have learned."""

    def on_change(self, observer: Callable[[StepTimeModel], None]) -> None:
        """Call `observer` with the model now and after each noticeable change."""
        self._observers.append(observer)
        observer(self.fitted.model)

    def on_event(self, event: EngineEvent) -> None:
        step = event.step
        if step is not None and step.end_unix_ns and not step.encoded_images:
            self._learner.add(work_of(step), step.end_unix_ns - step.start_unix_ns)

    async def restore(self) -> None:
        """Load the fits of earlier workers with the same key."""
        found = await self._store.load(self._key)
        if found:
            self.known = frozenset(found)
            self._learner = StepTimeLearner(combine(self._learner.model, found), self._exact | self.known)
            self.fitted = self._learner.fitted()
            log.info("step times restored", kinds=sorted(kind.value for kind in found))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        saved_s = loop.time()
        while True:
            await asyncio.sleep(REFIT_S)
            await self.refit()
            if loop.time() >= saved_s + SAVE_S:
                saved_s = loop.time()
                await self.save()

    async def refit(self) -> None:
        """Refit if there are new steps. A thread fits, so that the event loop need not wait."""
        rows = self._learner.news()
        changed = rows is not None and self._learner.take(await asyncio.to_thread(self._learner.fit, rows), rows)
        self.fitted = self._learner.fitted()
        if changed:
            for observer in self._observers:
                observer(self.fitted.model)

    async def save(self) -> None:
        """Store the fits of the kinds of steps that this worker has seen often enough."""
        fits = {kind: self.fitted for kind in StepKind if self.fitted.of(kind).steps >= MIN_STEPS}
        await self._store.save(self._key, fits)

    async def kept_curve(self) -> PrefillCurve | None:
        """Return the last prefill measurement by a worker with the same key."""
        return await self._store.load_curve(self._key)

    async def keep_curve(self, curve: PrefillCurve) -> None:
        """Store a prefill measurement for other workers with the same key."""
        await self._store.save_curve(self._key, curve)

    @asynccontextmanager
    async def claim(self, lease_s: float) -> AsyncIterator[bool]:
        """Yield whether this worker may measure prefill. Only one worker with the same key may do so at a time."""
        mine = await self._store.claim(self._key, lease_s=lease_s)
        try:
            yield mine
        finally:
            if mine:
                await self._store.release(self._key)


def step_time_key(engine: Engine, model: ModelInfo) -> StepTimeKey:
    """Return the key of the properties that determine a started engine's step times and prefill curve."""
    name = f"{model.name}@{model.revision[:REVISION_CHARS]}"
    return StepTimeKey(engine.name, name, engine.device, engine.capabilities.variant)


def work_of(step: StepReport) -> StepWork:
    return step_work(_step(step, epoch=0))


# The upper bound of dummy steps that wait for their batch. The oldest beyond it are counted without their time.
MAX_DUMMIES: Final = 4_096


@dataclass(frozen=True, slots=True)
class TelemetrySource:
    worker_id: str
    incarnation: int
    node: str
    gpus: int
    engine: str
    compute: Compute | None = None
    """The inputs for computing utilisation; None if unknown."""
    kv_blocks: int = 0
    """The number of KV blocks in the engine's pool; 0 if unknown."""
    max_sequences: int = 0
    """The maximum number of concurrent sequences; 0 if unknown."""
    block_size_tokens: int = 0
    chunk_tokens: int = 0
    """The maximum number of prompt tokens in one step; 0 if unknown."""
    group: str = ""
    """The data-parallel group of which the worker is a rank; empty for none."""


class StepBatchBuilder:
    """A builder that collects engine events and cuts them into batches.

    The spans of time that batches cover are adjacent and do not overlap.
    """

    def __init__(self, source: TelemetrySource, start_unix_ns: int) -> None:
        self._source = source
        self._covered_to_ns = start_unix_ns
        self._sequence = 0
        self._assignment: Assignment | None = None
        self._description = 0
        """The number of assignments so far. All other parts of the description are constant."""
        self._steps: list[StepRow] = []
        self._waits: list[tuple[int, int]] = []
        self._starved: list[tuple[int, int]] = []
        self._dummies: list[tuple[int, int]] = []
        self._dummy_steps = 0
        self._transfers: list[KvTransfer] = []

    @property
    def empty(self) -> bool:
        return not (self._steps or self._waits or self._starved or self._dummies or self._transfers)

    def add(self, event: EngineEvent, epoch: int) -> None:
        if event.step is not None:
            self._add_step(_step(event.step, epoch))
        self._waits.extend(event.kv_waits)
        self._starved.extend(event.starved)
        self._take_dummies(event.dummy_steps)
        self._transfers.extend(map(_transfer, event.kv_transfers))

    def cut(
        self,
        now_ns: int,
        load: EngineLoad,
        assignment: Assignment,
        *,
        dropped_batches: int = 0,
        step_time: StepTime | None = None,
        gpu_readings: Iterable[GpuReading] = (),
        last: bool = False,
    ) -> StepBatch | None:
        """Return the batch from the end of the last one to now, or to the time up to which the engine has reported.

        Return None if that span is empty; collected events then remain for the next batch. `last` marks the final
        batch.
        """
        covered_from = self._covered_to_ns
        covered_to = min(now_ns, load.reported_to_unix_ns or now_ns)
        if covered_to <= covered_from:
            return None
        self._covered_to_ns = covered_to
        self._sequence += 1
        source = self._source
        if assignment != self._assignment:
            self._assignment = Assignment()
            self._assignment.CopyFrom(assignment)
            self._description += 1
        batch = StepBatch(
            worker_id=source.worker_id,
            incarnation=source.incarnation,
            sequence=self._sequence,
            node=source.node,
            gpus=source.gpus,
            engine=source.engine,
            compute=compute_message(source.compute) if source.compute else None,
            assignment=assignment,
            covered_from_unix_ns=covered_from,
            covered_to_unix_ns=covered_to,
            steps=step_columns(step for step in self._steps if step.start_unix_ns < covered_to),
            kv_waits=_between(self._waits, covered_from, covered_to, load.kv_wait_since_unix_ns),
            starved=_between(self._starved, covered_from, covered_to, load.starved_since_unix_ns),
            kv_transfers=self._transfers,
            load=load_message(load),
            dropped_batches=dropped_batches,
            step_time=step_time,
            gpu_readings=map(_gpu_reading, gpu_readings),
            kv_blocks=source.kv_blocks,
            max_sequences=source.max_sequences,
            block_size_tokens=source.block_size_tokens,
            chunk_tokens=source.chunk_tokens,
            group=source.group,
            dummy_steps=self._cut_dummies(covered_to),
            description=self._description,
            last=last,
        )
        self._steps = [step for step in self._steps if step.start_unix_ns >= covered_to]
        self._waits = [wait for wait in self._waits if wait[1] > covered_to]
        self._starved = [span for span in self._starved if span[1] > covered_to]
        self._transfers = []
        return batch

    def _take_dummies(self, steps: Iterable[tuple[int, int]]) -> None:
        # An empty interval means that the duration of a step is unknown. The step is only counted.
        for start, end in steps:
            self._dummy_steps += 1
            if start < end:
                self._dummies.append((start, end))
        del self._dummies[:-MAX_DUMMIES]

    def _cut_dummies(self, covered_to: int) -> DummySteps | None:
        """Return the dummy steps that ended in the covered time or were reported late.

        Each is returned whole, in one batch.
        """
        if not self._dummy_steps:
            return None
        ended = [Interval(start_unix_ns=start, end_unix_ns=end) for start, end in self._dummies if end <= covered_to]
        self._dummies = [step for step in self._dummies if step[1] > covered_to]
        return DummySteps(steps=self._dummy_steps, spans=ended)

    def _add_step(self, step: StepRow) -> None:
        # The end of an announced step replaces its announcement if that has not been sent.
        last = self._steps[-1] if self._steps else None
        if last is not None and not last.end_unix_ns and last.start_unix_ns == step.start_unix_ns:
            self._steps.pop()
        self._steps.append(step)


def _between(ended: list[tuple[int, int]], covered_from: int, covered_to: int, ongoing_since: int) -> list[Interval]:
    """Cut spans at the edges of the covered time. The rest of a span belongs to the neighbouring batch."""
    spans = [*ended, (ongoing_since, covered_to)] if ongoing_since else ended
    cut = ((max(start, covered_from), min(end, covered_to)) for start, end in spans)
    return [Interval(start_unix_ns=start, end_unix_ns=end) for start, end in cut if start < end]


def _step(report: StepReport, epoch: int) -> StepRow:
    return StepRow(
        start_unix_ns=report.start_unix_ns,
        end_unix_ns=report.end_unix_ns,
        prefill_tokens=report.prefill_tokens,
        prefill_sequences=report.encoded_images or report.prefill_sequences,
        prefill_context_tokens=report.prefill_context_tokens,
        decode_sequences=report.decode_sequences,
        decode_kv_tokens=report.decode_kv_tokens,
        epoch=epoch,
        waiting=report.waiting,
        waiting_prefill_tokens=report.waiting_prefill_tokens,
        prefill_squared_tokens=report.prefill_squared_tokens,
        encoded_images=report.encoded_images,
    )


def _gpu_reading(reading: GpuReading) -> pb.GpuReading:
    return pb.GpuReading(**asdict(reading))


def _transfer(report: KvTransferReport) -> KvTransfer:
    return KvTransfer(
        request_id=report.request_id,
        from_worker_id=report.from_worker_id,
        blocks=report.blocks,
        bytes=report.data_bytes,
        start_unix_ns=report.start_unix_ns,
        end_unix_ns=report.end_unix_ns,
        prompt_tokens=report.prompt_tokens,
        prompt_tokens_computed=report.prompt_tokens_computed,
        shared_memory=report.shared,
        ready_ns=report.ready_ns,
        named=report.named,
    )


# The number of periods in one batch of an idle worker. The batch must end before `FULCRUM_METRICS_LAG_MS` have passed,
# when windows are read.
REST_PERIODS: Final = 3
# The upper bound of that batch's duration, unless a single period is longer.
MAX_REST_S: Final = 0.3


class _ReportedState(NamedTuple):
    """The state in a batch beside its events. An idle worker sends a batch early only if this state has changed."""

    load: Load
    assignment: Assignment
    dropped_batches: int
    kv_pulls: int
    refused_kv_pulls: int


class TelemetryPublisher:
    """A publisher of batches. It also sends changed loads to gateways, at the same pace."""

    def __init__(
        self,
        builder: StepBatchBuilder,
        host: WorkerHost,
        step_times: StepTimes,
        bus: Bus,
        clock: Clock,
        *,
        kv: KvServicer,
        gpus: GpuSampler,
        cpu_waits: CpuWaitReader | None = None,
        period_ms: int,
    ) -> None:
        self._builder = builder
        self._host = host
        self._step_times = step_times
        self._bus = bus
        self._clock = clock
        self._kv = kv
        self._gpus = gpus
        self._cpu_waits = cpu_waits
        self._period_s = period_ms / 1000
        self._rest_s = max(self._period_s, min(REST_PERIODS * self._period_s, MAX_REST_S))
        self._reported: _ReportedState | None = None
        """The state in the last batch; None before the first."""
        self._reported_s = 0.0

    def on_event(self, event: EngineEvent) -> None:
        """Add an engine event. A step belongs to the epoch in which it started, however late it is reported."""
        epoch = self._host.assignment.current.epoch
        if event.step is not None:
            epoch = self._host.last_change.epoch_at(event.step.start_unix_ns, epoch)
        self._builder.add(event, epoch)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._period_s)
            # An idle worker's batch is due after a whole number of periods. Timers are off by less than half a period.
            if not self._at_rest() or loop.time() - self._reported_s > self._rest_s - self._period_s / 2:
                self.publish()
                self._reported_s = loop.time()
            self._host.refresh_load()

    def publish(self, *, last: bool = False) -> None:
        """Publish the collected events. `last` is true if the worker is leaving."""
        load = self._host.engine.load()
        state = self._state(load)
        step_time = step_time_message(self._step_times.fitted)
        step_time.kv_token_ns = self._host.speed.settled_kv_token_ns
        batch = self._builder.cut(
            self._clock.now_ns(),
            load,
            state.assignment,
            dropped_batches=state.dropped_batches,
            step_time=step_time,
            gpu_readings=self._gpus.take(),
            last=last,
        )
        if batch is not None:
            batch.load.kv_pulls, batch.load.refused_kv_pulls = state.kv_pulls, state.refused_kv_pulls
            waited_ns = None if self._cpu_waits is None else self._cpu_waits.take()
            if waited_ns is not None:
                batch.sched_delay_ns = waited_ns
            self._bus.publish(topics.STEPS, batch)
            self._reported = state

    def _at_rest(self) -> bool:
        """Return whether nothing happened since the last batch, no work is present, and the state is unchanged."""
        load = self._host.engine.load()
        return (
            not (load.running or load.waiting or load.awaiting_kv)
            and self._builder.empty
            and not self._gpus.fresh
            and self._state(load) == self._reported
        )

    def _state(self, load: EngineLoad) -> _ReportedState:
        kv = self._kv
        return _ReportedState(
            load_message(load), self._host.assignment.message, self._bus.stats().dropped, kv.pulls, kv.refused_pulls
        )
