"""The engine port over the pure core and a runner: one loop of steps, one task a KV fetch, one queue of events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from secrets import token_bytes

from libs.contracts.errors import FulcrumError, KvLost, KvMismatch, QueueFull
from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.events import EventQueue
from libs.engine.kv.copy import BlockCopies, BlockWriter
from libs.engine.kv.handles import RandomBytes
from libs.engine.kv.transfer import BlockExport, receive_blocks
from libs.engine.kv_port import KvExport, KvFetcher
from libs.engine.port import Capabilities, DeviceMemory, EngineIdentity, EngineRequest, Progress
from libs.engine.reports import EngineEvent, EngineIntegrity, EngineLoad, FinishReason, StepReport
from libs.engine.runner import Batch, Runner, Sampled
from libs.engine.sequence import Sequence
from libs.engine.trial import trial_batch
from libs.policy.step_time import StepTimeModel
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

ANNOUNCE_AFTER_S = 0.1
"""A step that runs so long is announced, so that telemetry can show it before it ends."""
POOL_CHECK_STEPS = 1000
"""An engine checks its pool's books so often, and each time when nothing is left that holds blocks."""
MAX_FETCHES = 64
"""KV fetches at a time; others wait in order. Most of them wait for a prompt, not for bytes."""


class PoolFault(RuntimeError):
    """The block pool counts other blocks as held than are held: a defect, after which no answer can be trusted."""


class LocalEngine:
    """Runs sequences on one runner in this process."""

    def __init__(
        self, runner: Runner, config: EngineConfig, clock: Clock, *, random_bytes: RandomBytes = token_bytes
    ) -> None:
        """`random_bytes`: of KV handles; only a simulation, which must replay, has others than the system's."""
        self._runner = runner
        self._config = config
        self._clock = clock
        self._random_bytes = random_bytes
        self._started: tuple[Core, Capabilities, KvFetcher, BlockCopies] | None = None
        self._events = EventQueue()
        self._tasks = TaskOwner(on_failure=self._events.end)
        self._wake = asyncio.Event()
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._fetches: dict[int, tuple[asyncio.Task[None], BlockWriter]] = {}
        self._filled = asyncio.Event()
        """Blocks may have become ready whose checksums can be taken."""
        self._kv_waiting: set[Callable[[], None]] = set()
        """Whom to tell when blocks have become ready for others, or will never be."""
        self._unannounced_ns = 0
        """Start of the running step as long as it is not announced, else 0."""
        self._trial: tuple[int, asyncio.Future[int | None]] | None = None
        """A measurement that waits for its turn: tokens, and the future of its result."""
        self._pool_faults = 0
        self._closed = False

    @property
    def name(self) -> str:
        """The runner's name."""
        return self._runner.name

    @property
    def device(self) -> str:
        """What the runner computes on."""
        return self._runner.device

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `start`."""
        return self._parts[1]

    @property
    def _core(self) -> Core:
        return self._parts[0]

    @property
    def _parts(self) -> tuple[Core, Capabilities, KvFetcher, BlockCopies]:
        if self._started is None:
            raise RuntimeError("the engine has not been started")
        return self._started

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Load the runner and start the loop. Raises StartupError."""
        self._begin(await self._runner.load(identity, progress), identity, fetcher)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Abort what runs, end the events, keep the weights in host memory. Idempotent."""
        assert keep_weights, "capabilities say so"
        if not self._closed:
            await self._stop()
            await self._runner.sleep()

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start again from host memory, with an empty pool. Raises StartupError."""
        capabilities = await self._runner.wake(identity, progress)
        self._events = EventQueue()
        self._tasks = TaskOwner(on_failure=self._events.end)
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._fetches, self._kv_waiting, self._trial, self._unannounced_ns = {}, set(), None, 0
        self._closed = False
        self._begin(capabilities, identity, fetcher)

    async def device_memory(self) -> DeviceMemory | None:
        """Nothing of a model that sleeps stays on the device."""
        return None

    def _begin(self, capabilities: Capabilities, identity: EngineIdentity, fetcher: KvFetcher) -> None:
        eos_token_ids = self._runner.eos_token_ids
        core = Core(self._config, capabilities, eos_token_ids, identity, random_bytes=self._random_bytes)
        copies = BlockCopies(self._runner, capabilities.kv_block_bytes)
        self._started = (core, capabilities, fetcher, copies)
        self._tasks.spawn("engine loop", self._run())
        if capabilities.kv_nonce:  # blocks of another device would have to be copied here first
            self._tasks.spawn("KV checksums", self._sum(core, copies))

    def submit(self, request: EngineRequest) -> None:
        """Take a sequence. Raises InvalidRequest when it can never run here, QueueFull when the bound is reached."""
        self._core.submit(request, self._clock.now_ns())
        self._settle()

    def abort(self, sequence_id: int) -> None:
        """End a sequence, or the lease of its blocks; unknown ids are ignored."""
        if sequence_id in self._fetches:  # before the blocks: it writes no more then
            fetch, writer = self._fetches.pop(sequence_id)
            writer.stop()
            fetch.cancel()
        self._core.abort(sequence_id, self._clock.now_ns())
        self._settle()

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        """Tokens sampled where a streamed prompt was computed: with its KV it goes on. Raises InvalidRequest."""
        self._core.proceed(sequence_id, token_ids, self._clock.now_ns())
        self._settle()

    def hand_over(self, sequence_id: int) -> None:
        """Let a sequence leave with its KV at its next step boundary; unknown ids are ignored."""
        self._core.hand_over(sequence_id, self._clock.now_ns())
        self._settle()

    def set_prefill_budget(self, tokens: int) -> None:
        """Prompt tokens a step may compute beside decodes, at most `prefill_chunk_tokens`; at 0, prompts wait."""
        self._core.set_prefill_budget(tokens)
        self._wake.set()

    def set_prefill_chunk(self, tokens: int) -> None:
        """Prompt tokens a step computes at most, whatever the budget; the configured ones until this is called."""
        self._core.set_prefill_chunk(tokens)
        self._wake.set()

    def set_step_time(self, model: StepTimeModel) -> None:
        """Hold prompt chunks and newcomers to running TPOT targets by this model."""
        self._core.set_step_time(model)

    async def measure_prefill(self, tokens: int) -> int | None:
        """Nanoseconds of one step of made-up prompts, run between other steps; None without room, or where it would
        hold up what decodes. Raises QueueFull."""
        if self._trial is not None:
            raise QueueFull("another measurement waits")
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._trial = (max(tokens, 1), done)
        self._wake.set()
        try:
            return await done
        finally:
            if self._trial is not None and self._trial[1] is done:
                self._trial = None

    async def events(self) -> AsyncIterator[EngineEvent]:
        """Events until the engine is closed; raises what made it fail. Iterating again goes on where it was left."""
        while (event := await self._events.get()) is not None:
            yield event

    def export(
        self, opaque: bytes, kv_layout: str, from_block: int, *, news: Callable[[], None], in_place: bool = False
    ) -> KvExport:
        """The blocks behind a handle as they fill, its lease renewed with each chunk. Raises KvLost, KvMismatch."""
        core, capabilities, _, _ = self._parts
        if kv_layout != capabilities.kv_layout:
            raise KvMismatch(f"KV layout {kv_layout!r} was asked for, this engine has {capabilities.kv_layout!r}")
        pulled = core.offers.pull(opaque, self._clock.now_ns())

        def left() -> None:
            core.offers.leave(pulled, self._clock.now_ns())
            self._wake.set()  # its lease may end sooner than the loop expects

        return BlockExport(
            self._runner,
            capabilities,
            from_block,
            in_place=in_place,
            held=lambda: core.offers.held(opaque, self._clock.now_ns()),
            waits=lambda: self._kv_waiting.add(news),
            left=left,
        )

    def release(self, opaque: bytes) -> None:
        """The receiver has the blocks; unknown handles are ignored."""
        self._core.release(opaque, self._clock.now_ns())
        self._settle()

    def abandon(self, opaque: bytes) -> None:
        """Perhaps nobody comes for the blocks: they wait for a short time only."""
        self._core.offers.leave_unread(opaque, self._clock.now_ns())
        self._settle()

    def load(self) -> EngineLoad:
        """Depths now, and how far the events that were read account for the time."""
        starts = (self._unannounced_ns, self._events.oldest_start_ns())
        reported_to_ns = min((ns for ns in starts if ns), default=0)
        return self._core.load(reported_to_ns=reported_to_ns, pool_faults=self._pool_faults)

    def integrity(self) -> EngineIntegrity:
        """Counters that must be zero when nothing runs."""
        return replace(self._core.integrity(), pool_faults=self._pool_faults)

    async def close(self) -> None:
        """Abort what runs, end the events, free the device. Idempotent."""
        if not self._closed:
            await self._stop()
        await self._runner.close()

    async def _stop(self) -> None:
        self._closed = True
        await self._tasks.close()
        if self._trial is not None:
            self._trial[1].cancel()
        if self._started is not None:
            self._parts[3].close()
            self._core.drop_all(self._clock.now_ns())
            self._publish()
        self._events.end()

    async def _run(self) -> None:
        steps = 0
        while True:
            await self._events.room()
            self._wake.clear()
            if self._trial is not None:
                await self._measure(*self._trial)
            batch = self._core.plan(self._clock.now_ns())
            if batch is None:
                self._settle(wake=False)
                if not self._core.holds_blocks:
                    self._check_pool()
                await self._idle()
            else:
                await self._step(batch)
                steps += 1
                if steps % POOL_CHECK_STEPS == 0:
                    self._check_pool()
                await asyncio.sleep(0)  # a runner that never waits must not starve the loop

    def _check_pool(self) -> None:
        """Compare the pool's books with who holds blocks, between steps; a difference ends the engine."""
        if fault := self._core.pool_fault():
            self._pool_faults = 1
            raise PoolFault(f"the KV block pool's books are wrong, so that answers could mix: {fault}")

    async def _idle(self) -> None:
        """Wait for something to do, at most until the next lease ends."""
        expiry_ns = self._core.offers.next_expiry_ns
        if expiry_ns is None:
            await self._wake.wait()
            return
        wait_s = max(expiry_ns - self._clock.now_ns(), 0) / 1e9
        timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _step(self, batch: Batch) -> None:
        announcement = self._core.begin(batch, self._clock.now_ns())
        self._unannounced_ns = announcement.start_unix_ns
        self._settle(wake=False)
        sampled = await self._run_announced(batch, announcement)
        report = self._core.apply(batch, sampled, self._clock.now_ns())
        self._unannounced_ns = 0
        self._publish(report)

    async def _run_announced(self, batch: Batch, announcement: StepReport) -> dict[int, Sampled]:
        """Run a step that began as `_unannounced_ns` says, and announce it where it is long."""
        timer = asyncio.get_running_loop().call_later(ANNOUNCE_AFTER_S, self._announce, announcement)
        try:
            return await self._runner.run(batch)
        finally:
            timer.cancel()

    async def _measure(self, tokens: int, done: "asyncio.Future[int | None]") -> None:
        """Run a trial's step, reported as a step that computes prompt tokens."""
        core, capabilities, _, _ = self._parts
        self._trial = None
        blocks = core.lend_blocks(tokens, self._clock.now_ns())
        if blocks is None:
            if not done.done():
                done.set_result(None)
            return
        try:
            batch = trial_batch(tokens, blocks, capabilities)
            work, load, start_ns = batch.work, core.load(), self._clock.now_ns()
            announcement = StepReport(
                start_unix_ns=start_ns,
                end_unix_ns=0,
                prefill_tokens=work.prefill_tokens,
                prefill_sequences=work.prefill_sequences,
                prefill_context_tokens=work.prefill_context_tokens,
                decode_sequences=0,
                decode_kv_tokens=0,
                waiting=load.waiting,
                waiting_prefill_tokens=load.waiting_prefill_tokens,
                prefill_squared_tokens=work.prefill_squared_tokens,
            )
            core.measuring(True, start_ns)
            self._unannounced_ns = start_ns
            await self._run_announced(batch, announcement)
        finally:
            self._unannounced_ns = 0
            end_ns = self._clock.now_ns()
            core.measuring(False, end_ns)
            core.give_back(blocks, end_ns)
        self._publish(replace(announcement, end_unix_ns=end_ns))
        if not done.done():
            done.set_result(end_ns - start_ns)

    def _announce(self, announcement: StepReport) -> None:
        self._events.put(EngineEvent(step=announcement))
        self._unannounced_ns = 0

    def _settle(self, *, wake: bool = True) -> None:
        """Act on what the core has decided: start fetches, publish what happened, run the loop."""
        for sequence in self._core.take_fetches():
            writer = self._parts[3].writer()
            self._fetches[sequence.sequence_id] = self._tasks.spawn("KV fetch", self._fetch(sequence, writer)), writer
        self._publish()
        if wake:
            self._wake.set()

    def _publish(self, step: StepReport | None = None) -> None:
        self._filled.set()
        waiting, self._kv_waiting = self._kv_waiting, set()
        for news in waiting:
            news()
        event = self._core.take_event(step)
        if event is not None:
            self._events.put(event)

    async def _sum(self, core: Core, copies: BlockCopies) -> None:
        """Take the checksums of what is ready for others while other steps run, so that no receiver waits for them."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while (part := core.offers.to_sum(copies.slice_blocks)) is not None:
                held, first, end = part
                held.checksums[first:end] = await copies.checksums(held.blocks[first:end])

    async def _fetch(self, sequence: Sequence, writer: BlockWriter) -> None:
        core, capabilities, fetcher, _ = self._parts
        handle = sequence.request.kv
        assert handle is not None
        async with self._fetch_slots:
            started_ns = self._clock.now_ns()
            core.kv_asked(sequence)
            self._settle()
            try:
                received = await receive_blocks(
                    self._runner,
                    writer,
                    capabilities,
                    fetcher,
                    handle,
                    blocks=sequence.blocks,
                    found=sequence.found_blocks,
                    on_ready=lambda ready: core.kv_is_ready(sequence, ready, self._clock.now_ns()),
                )
            except FulcrumError as error:
                reason = FinishReason.KV_LOST if isinstance(error, KvLost) else FinishReason.FAILED
                core.kv_failed(sequence, reason, f"{error.code}: {error.message}", self._clock.now_ns())
            else:
                core.kv_arrived(sequence, received, started_ns, self._clock.now_ns())
        del self._fetches[sequence.sequence_id]
        self._settle()
