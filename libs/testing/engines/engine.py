"""Engines in tests without workers: a fetcher between engines, a reader of events, the account of phase time, and a
device that checks its input.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import KvLost
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.kv_shared_pool import PoolMap, PoolMaps
from libs.engine.port import Engine, EngineIdentity, EngineRequest
from libs.engine.reports import EngineEvent, EngineIntegrity, FinishReason, Logprob, SequenceOutput
from libs.engine.runner import Batch, Chunk, Sampled
from libs.engine.sim_tokens import TokenSource
from libs.perfmodel.learner import FittedModel, StepTimeLearner
from libs.perfmodel.profiles import prior_step_time
from libs.perfmodel.wire import step_time_message
from libs.policy.step_time import StepTimeModel
from libs.runtime.clock import Clock
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.steps import PhaseTime
from libs.worker.telemetry import StepBatchBuilder, TelemetrySource, work_of

WAIT_S = 300.0
"""The bound on everything a test waits for, including real models on a busy machine. pytest's own bound is shorter."""


async def exported(
    engine: Engine,
    opaque: bytes,
    kv_layout: str,
    from_block: int = 0,
    *,
    in_place: bool = False,
    named: bool = False,
) -> AsyncGenerator[KvChunk, None]:
    """Yield the blocks behind a handle as they become ready."""
    news = asyncio.Event()
    export = engine.export(opaque, kv_layout, from_block, news=news.set, in_place=in_place, named=named)
    try:
        while not export.done:
            news.clear()
            chunk = export.take()
            if chunk is not None:
                yield chunk
            elif not export.done:
                await news.wait()
    finally:
        export.close()


@dataclass
class DirectFetcher:
    """A `KvFetcher` over engines in this process, by worker id. It copies bytes, or reads them from the source's pool
    file.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Chunks arrive while this is set."""
    dies: bool = False
    """True if every source dies after its first chunk."""
    maps: PoolMaps | None = None
    """The folder of the pool files."""
    fetching: int = 0
    """The number of transfers in progress."""

    def __post_init__(self) -> None:
        self.gate.set()

    async def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncIterator[KvChunk]:
        """Yield the source's export, and acknowledge it at the end."""
        source = self.engines.get(handle.worker_id)
        if source is None:
            raise KvLost(f"worker {handle.worker_id} is gone")
        self.fetching += 1
        try:
            await self.gate.wait()
            pool = self.maps.get(handle.worker_id, handle.incarnation) if self.maps is not None else None
            assert pool is None or pool.nonce == source.capabilities.kv_nonce
            in_place, named = pool is not None, handle.named
            async for chunk in exported(source, handle.opaque, kv_layout, from_block, in_place=in_place, named=named):
                yield _shared(chunk, pool) if pool else _sent(chunk)
                await self.gate.wait()
                if self.dies:
                    raise KvLost(f"worker {handle.worker_id} is gone")
            source.release(handle.opaque)
        finally:
            self.fetching -= 1


def _shared(chunk: KvChunk, pool: PoolMap) -> KvChunk:
    return replace(chunk, data=tuple(map(pool.block, chunk.pool_blocks)), shared=True)


def _sent(chunk: KvChunk) -> KvChunk:
    return replace(chunk, data=tuple(memoryview(bytes(view)) for view in chunk.data))


@dataclass
class SequenceLog:
    """The output of an engine for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    pulled: int = 0
    """The number of times that a request for its first block was reported."""
    streamed_handle: KvHandle | None = None
    """The handle by which the sequence's blocks can be pulled while its prompt is computed."""
    end: SequenceOutput | None = None


class EventReader:
    """A consumer of an engine's events, which it sorts by sequence."""

    def __init__(self, engine: Engine, also: Callable[[EngineEvent], None] | None = None) -> None:
        self._also = also
        self.events: list[EngineEvent] = []
        self._logs: dict[int, SequenceLog] = {}
        self._engine = engine
        self._covered_to_ns = self._announced_ns = 0
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read(), name="event reader")
        self._task.add_done_callback(lambda _task: self._news.set())

    def log(self, sequence_id: int) -> SequenceLog:
        """Return the log of one sequence so far."""
        return self._logs.setdefault(sequence_id, SequenceLog())

    async def ended(self, sequence_id: int) -> SequenceLog:
        """Wait for a sequence to end, and return its log."""
        await self.until(lambda: self.log(sequence_id).end is not None)
        return self._logs.pop(sequence_id)

    async def tokens(self, sequence_id: int, count: int) -> None:
        """Wait until a sequence has at least `count` tokens here, or has ended."""
        await self.until(lambda: len(self.log(sequence_id).token_ids) >= count or self.log(sequence_id).end is not None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, checked after each event. Raise the error that ended the events."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                if self._task.done():
                    await self._task
                    raise EOFError("the events have ended")
                self._news.clear()
                await self._news.wait()

    async def finished(self) -> None:
        """Wait until the events end. Raise the error that ended them."""
        async with asyncio.timeout(WAIT_S):
            await self._task

    async def close(self) -> None:
        """Stop reading; unread events stay with the engine."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async for event in self._engine.events():
            self.events.append(event)
            self._check_cover(event)
            if self._also is not None:
                self._also(event)
            for output in event.outputs:
                self._note(output)
            self._news.set()

    def _check_cover(self, event: EngineEvent) -> None:
        """Check that no unannounced step began before a time for which all steps were reported."""
        step = event.step
        if step is not None:
            known = step.start_unix_ns >= self._covered_to_ns or step.start_unix_ns == self._announced_ns
            late_us = (self._covered_to_ns - step.start_unix_ns) / 1e3
            assert known, f"a step began {late_us:.0f} us before what telemetry has covered"
            self._announced_ns = 0 if step.end_unix_ns else step.start_unix_ns
        self._covered_to_ns = max(self._covered_to_ns, self._engine.load().reported_to_unix_ns)

    def _note(self, output: SequenceOutput) -> None:
        log = self.log(output.sequence_id)
        assert log.end is None, f"sequence {output.sequence_id} spoke after its end"
        log.token_ids.extend(output.token_ids)
        log.logprobs.extend(output.logprobs)
        log.pulled += output.pulling
        log.streamed_handle = log.streamed_handle or output.streamed_handle
        if output.finish is not None:
            log.end = output


class EngineBench:
    """Engines of one kind that fetch from one another. `close` checks that nothing leaks."""

    def __init__(self, make: Callable[..., Engine], shared_dir: Path | None = None) -> None:
        self.fetcher = DirectFetcher(maps=PoolMaps(shared_dir) if shared_dir else None)
        self._make = make
        self._readers: list[EventReader] = []

    async def start(self, worker_id: str, **config: object) -> tuple[Engine, EventReader]:
        """Start a new engine, with changes to its configuration."""
        engine = self._make(**config)
        await engine.start(EngineIdentity(worker_id, 1, "nowhere:1"), self.fetcher, lambda _stage, _fraction: None)
        self.fetcher.engines[worker_id] = engine
        reader = EventReader(engine)
        self._readers.append(reader)
        return engine, reader

    async def woken(self, worker_id: str, incarnation: int) -> EventReader:
        """Wake an engine under a new incarnation, and return a reader of it."""
        engine = self.fetcher.engines[worker_id]
        identity = EngineIdentity(worker_id, incarnation, "nowhere:1")
        await engine.wake(identity, self.fetcher, lambda _stage, _fraction: None)
        reader = EventReader(engine)
        self._readers.append(reader)
        return reader

    async def close(self) -> None:
        """Close every engine and wait for the end of its events."""
        if self.fetcher.maps is not None:
            self.fetcher.maps.close()
        for engine in self.fetcher.engines.values():
            await engine.close()
            assert engine.integrity() == EngineIntegrity(0, 0, 0), "something was left behind"
        for reader in self._readers:
            await reader.close()


CUT_S: Final = 0.1
REFIT_CUTS: Final = 20
WORKER: Final = "one"


class PhaseAccount:
    """The telemetry of one engine, cut as a worker does and entered as the metrics service does."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        worker_id: str = WORKER,
        gpus: int = 1,
        fleet: FleetTelemetry | None = None,
    ) -> None:
        """Create an account in its own fleet, or in one that others share."""
        self._worker_id = worker_id
        self._engine = engine
        self._clock = clock
        self._builder = StepBatchBuilder(TelemetrySource(worker_id, 1, "node", gpus, engine.name), clock.now_ns())
        self._learner = StepTimeLearner(prior_step_time(engine.name, engine.device))
        self._fleet = fleet or FleetTelemetry(prefill_shares)

    @property
    def model(self) -> StepTimeModel:
        """The learned model of the engine's steps, which splits mixed ones."""
        return self._learner.model

    @property
    def fitted(self) -> FittedModel:
        """The fitted model with the errors of its predictions."""
        return self._learner.fitted()

    def on_event(self, event: EngineEvent) -> None:
        self._builder.add(event, 1)
        if event.step is not None and event.step.end_unix_ns:
            self._learner.add(work_of(event.step), event.step.end_unix_ns - event.step.start_unix_ns)

    async def run(self) -> None:
        """Cut batches until cancelled."""
        cuts = 0
        while True:
            await asyncio.sleep(CUT_S)
            cuts += 1
            if cuts % REFIT_CUTS == 0:
                self._learner.refit()
            self.cut()

    def cut(self) -> None:
        """Cut a batch of the gathered events, and enter it."""
        now_ns = self._clock.now_ns()
        step_time = step_time_message(self._learner.fitted())
        batch = self._builder.cut(now_ns, self._engine.load(), Assignment(epoch=1), step_time=step_time)
        if batch is not None:
            self._fleet.add(batch, now_ns)

    def phases(self, low_ns: int, high_ns: int) -> PhaseTime:
        """Return the engine's time in [low, high) by phase."""
        return self._fleet.phases(self._worker_id, low_ns, high_ns)


SOURCE = TokenSource.builtin()
NOTHING: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class CheckingDevice:
    """A device that records the token and position whose KV is in each slot, and checks each step."""

    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        self.slots = np.full((blocks, block_size_tokens), -1, dtype=np.int64)
        """[blocks, block_size]"""

    def run(self, batch: Batch) -> dict[int, Sampled]:
        """Run a step, and check it before and after."""
        for chunk in batch.chunks:
            self._check(chunk.block_table, chunk.history[: chunk.start])
        for chunk in batch.chunks:
            assert np.array_equal(chunk.history[chunk.start :], chunk.token_ids)
            self.fill(chunk.block_table, chunk.history, chunk.start)
        for chunk in batch.chunks:
            self._check(chunk.block_table, chunk.history)
        return {chunk.sequence_id: SOURCE.sample(chunk) for chunk in batch.chunks if chunk.sample}

    def fill(self, table: NDArray[np.int32], tokens: NDArray[np.int32], start: int = 0) -> None:
        """Enter the KV of `tokens` from position `start` on at the slots of a block table."""
        size = self.slots.shape[1]
        for position in range(start, len(tokens)):
            self.slots[table[position // size], position % size] = position << 20 | int(tokens[position])

    def _check(self, table: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        expected = np.arange(len(tokens), dtype=np.int64) << 20 | tokens
        assert np.array_equal(self.slots[table].reshape(-1)[: len(tokens)], expected), "KV is not what was computed"


def reference(
    request: EngineRequest, eos_token_ids: frozenset[int], max_context_tokens: int
) -> tuple[list[int], FinishReason]:
    """Return the tokens of a sequence that runs alone, one position at a time, and its finish reason."""
    tokens, sampling = list(request.token_ids), request.sampling
    while True:
        history = np.array(tokens, dtype=np.int32)
        chunk = Chunk(0, NOTHING, 0, NOTHING, True, sampling, history, request.prompt_tokens)
        tokens.append(SOURCE.sample(chunk).token_id)
        new = tokens[len(request.token_ids) :]
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] in eos_token_ids and not sampling.ignore_eos):
            return new, FinishReason.STOP
        if len(tokens) >= min(request.prompt_tokens + request.max_output_tokens, max_context_tokens):
            return new, FinishReason.LENGTH
