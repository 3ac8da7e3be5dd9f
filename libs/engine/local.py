"""The engine port over the pure core and a runner: one loop of steps, one task per KV fetch, one queue of events.

Engines are created by name. Heavy packages are imported only at start, so a sim worker needs no torch.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from secrets import token_bytes
from types import MappingProxyType
from typing import Final, TypeVar

from libs.contracts.errors import FulcrumError, KvLost, KvMismatch, QueueFull, StartupError
from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.kv_blocks import Offer, RandomBytes
from libs.engine.kv_port import KvExport, KvFetcher
from libs.engine.kv_transfer import BlockCopies, BlockExport, BlockWriter, receive_blocks
from libs.engine.offers import MAX_UNKNOWN_MS
from libs.engine.port import Capabilities, DeviceMemory, Engine, EngineIdentity, EngineRequest, Progress
from libs.engine.reports import EngineEvent, EngineIntegrity, EngineLoad, EventQueue, FinishReason, StepReport
from libs.engine.runner import Batch, Runner, trial_batch
from libs.engine.sequence import Sequence
from libs.engine.sim import SimGpu, SimRunner
from libs.engine.torch.runner import TorchRunner
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.policy.step_time import StepTimeModel
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

T = TypeVar("T")
# The duration from which a step is announced, so that telemetry can show it before it ends.
ANNOUNCE_AFTER_S = 0.1
# Steps between two checks of the pool's reference counts. They are also checked whenever nothing holds blocks.
POOL_CHECK_STEPS = 1000
# The number of KV fetches at a time; others wait in order. Most of them wait for a prompt, not for bytes.
MAX_FETCHES = 64


class PoolFault(RuntimeError):
    """The block pool's reference counts differ from the blocks held. After such a defect, answers cannot be trusted."""


class LocalEngine:
    """An engine that runs its sequences on one runner in this process."""

    def __init__(
        self, runner: Runner, config: EngineConfig, clock: Clock, *, random_bytes: RandomBytes = token_bytes
    ) -> None:
        # `random_bytes` makes KV handles. Only a simulation, which must be repeatable, replaces the system's.
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
        """Set when blocks may have become ready whose checksums can be computed."""
        self._kv_waiting: dict[Callable[[], None], None] = {}
        """Callbacks for when blocks have become ready for other workers, or never will, in the order of their addition
        so that a simulation repeats."""
        self._unannounced_ns = 0
        """The start of the running step while it is not announced; otherwise 0."""
        self._trial: tuple[int, asyncio.Future[int | None]] | None = None
        """A pending measurement: its tokens and the future of its result."""
        self._encoded: set[bytes] = set()
        """Digests of images that were encoded since the last step."""
        self._encode_ns = 0
        self._pool_faults = 0
        self._closed = False

    @property
    def name(self) -> str:
        return self._runner.name

    @property
    def device(self) -> str:
        return self._runner.device

    @property
    def capabilities(self) -> Capabilities:
        """Features and limits, valid after `start` has returned."""
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
        """Load the runner and start the loop. Raise StartupError if that fails."""
        self._begin(await self._runner.load(identity, progress), identity, fetcher)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Abort running sequences, end the events and move the weights to host memory. Idempotent."""
        assert keep_weights, "capabilities say so"
        if not self._closed:
            await self._stop()
            await self._runner.sleep()

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start again from host memory with an empty pool. Raise StartupError if that fails."""
        capabilities = await self._runner.wake(identity, progress)
        self._events = EventQueue()
        self._tasks = TaskOwner(on_failure=self._events.end)
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._fetches, self._kv_waiting, self._trial, self._unannounced_ns = {}, {}, None, 0
        self._closed = False
        self._begin(capabilities, identity, fetcher)

    async def device_memory(self) -> DeviceMemory | None:
        # A sleeping model leaves nothing on the device.
        return None

    def _begin(self, capabilities: Capabilities, identity: EngineIdentity, fetcher: KvFetcher) -> None:
        eos_token_ids = self._runner.eos_token_ids
        core = Core(self._config, capabilities, eos_token_ids, identity, random_bytes=self._random_bytes)
        copies = BlockCopies(self._runner, capabilities.kv_block_bytes)
        self._started = (core, capabilities, fetcher, copies)
        self._tasks.spawn("engine loop", self._run())
        if capabilities.kv_nonce:  # blocks on another device would have to be copied to the host first
            self._tasks.spawn("KV checksums", self._sum(core, copies))

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Raise InvalidRequest if it can never run here, QueueFull if the queue is at its bound."""
        self._core.submit(request, self._clock.now_ns())
        self._settle()

    def abort(self, sequence_id: int) -> None:
        """End a sequence, or the lease of its blocks. Unknown ids are ignored."""
        if sequence_id in self._fetches:  # the fetch must stop writing before its blocks are freed
            fetch, writer = self._fetches.pop(sequence_id)
            writer.stop()
            fetch.cancel()
        self._core.abort(sequence_id, self._clock.now_ns())
        self._settle()

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        """Continue a streamed sequence from tokens sampled by the prefill worker. Raise InvalidRequest if it cannot
        continue from them.
        """
        self._core.proceed(sequence_id, token_ids, self._clock.now_ns())
        self._settle()

    def hand_over(self, sequence_id: int) -> None:
        """Hand a sequence over with its KV at its next step boundary. Unknown ids are ignored."""
        self._core.hand_over(sequence_id, self._clock.now_ns())
        self._settle()

    def set_prefill_budget(self, tokens: int) -> None:
        """Set the prompt tokens that a step may compute, at most `prefill_chunk_tokens`. At 0, prompts wait."""
        self._core.set_prefill_budget(tokens)
        self._wake.set()

    def set_prefill_chunk(self, tokens: int) -> None:
        """Set the upper bound of prompt tokens per step, regardless of the budget. It is configured at first."""
        self._core.set_prefill_chunk(tokens)
        self._wake.set()

    def set_step_time(self, model: StepTimeModel) -> None:
        """Set the model by which prompt chunks and new decodes are limited to meet running TPOT targets."""
        self._core.set_step_time(model)

    async def measure_prefill(self, tokens: int) -> int | None:
        """Return the nanoseconds of one step of made-up prompts, run between other steps.

        Return None without room, or if the step would hold up decoding sequences. Raise QueueFull.
        """
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
        """Iterate over events until the engine is closed. Iterating again continues where the last iteration stopped.

        Raise the error that made the engine fail.
        """
        while (event := await self._events.get()) is not None:
            yield event

    def export(
        self,
        opaque: bytes,
        kv_layout: str,
        from_block: int,
        *,
        news: Callable[[], None],
        in_place: bool = False,
        named: bool = False,
    ) -> KvExport:
        """Open the blocks behind a handle as they fill; each chunk renews the lease. Raise KvLost or KvMismatch."""
        core, capabilities, _, _ = self._parts
        if kv_layout != capabilities.kv_layout:
            raise KvMismatch(f"KV layout {kv_layout!r} was asked for, this engine has {capabilities.kv_layout!r}")
        pulled: Offer | None = None if named else core.offers.pull(opaque, self._clock.now_ns())
        unknown_until_ns = self._clock.now_ns() + MAX_UNKNOWN_MS * 1_000_000

        def offer() -> Offer | None:
            nonlocal pulled, unknown_until_ns
            now_ns = self._clock.now_ns()
            if pulled is not None:
                return core.offers.find(opaque, now_ns)
            if core.offers.expects(opaque):
                unknown_until_ns = 0
            elif opaque in core.offers or now_ns >= unknown_until_ns:
                pulled = core.offers.pull(opaque, now_ns)
            return pulled

        def left() -> None:
            if pulled is not None:
                core.offers.leave(pulled, self._clock.now_ns())
                self._wake.set()  # its lease may end sooner than the loop expects

        return BlockExport(
            self._runner,
            capabilities,
            from_block,
            in_place=in_place,
            offer=offer,
            waits=lambda: self._kv_waiting.setdefault(news),
            left=left,
            now_ns=self._clock.now_ns if named else None,
        )

    def release(self, opaque: bytes) -> None:
        """Free the blocks behind a handle once the receiver has them. Unknown handles are ignored."""
        self._core.release(opaque, self._clock.now_ns())
        self._settle()

    def abandon(self, opaque: bytes) -> None:
        """Shorten the lease of blocks that may no longer have a receiver."""
        self._core.offers.leave_unread(opaque, self._clock.now_ns())
        self._settle()

    def load(self) -> EngineLoad:
        """Return current depths, and the time up to which the events read so far account for this engine."""
        starts = (self._unannounced_ns, self._events.oldest_start_ns())
        reported_to_ns = min((ns for ns in starts if ns), default=0)
        load = self._core.load(reported_to_ns=reported_to_ns, pool_faults=self._pool_faults)
        if not self.capabilities.images:
            return load
        used, encoded, cache_bytes = self._runner.image_counts
        unencoded = self._runner.unencoded(self._core.waiting_images) if encoded else ()
        return replace(
            load,
            waiting_encode_ns=self._encode_ns * len(unencoded) // max(encoded, 1),
            images_used=used,
            images_encoded=encoded,
            image_cache_bytes=cache_bytes,
            image_encode_ns=self._encode_ns,
        )

    def integrity(self) -> EngineIntegrity:
        """Return the counters that must be zero when nothing runs."""
        return replace(self._core.integrity(), pool_faults=self._pool_faults)

    async def close(self) -> None:
        """Abort running sequences, end the events and free the device. Idempotent."""
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
            if self.capabilities.images:
                if batch is not None and await self._encode_for(batch):
                    continue  # plan the next step anew, whatever has happened in the meantime
                self._encoded.clear()
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
        """Raise PoolFault, which ends the engine, if the pool's reference counts differ from the blocks held."""
        if fault := self._core.pool_fault():
            self._pool_faults = 1
            raise PoolFault(f"the KV block pool's books are wrong, so that answers could mix: {fault}")

    async def _idle(self) -> None:
        """Wait for work, at most until the next lease ends."""
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
        sampled = await self._announced(self._runner.run(batch), announcement)
        report = self._core.apply(batch, sampled, self._clock.now_ns())
        self._unannounced_ns = 0
        self._publish(report)

    async def _encode_for(self, batch: Batch) -> bool:
        """Encode the batch's images whose embeddings are not kept, as a separate step. Return False if there are none.

        Embeddings that the cache has dropped since the last step are left to the step itself, which guarantees
        progress.
        """
        unencoded = self._runner.unencoded(batch.images)
        missing = [each for each in unencoded if each.span.digest not in self._encoded]
        if not missing:
            return False
        core = self._core
        announcement = core.begin_encode(len(missing), self._clock.now_ns())
        self._unannounced_ns = announcement.start_unix_ns
        self._settle(wake=False)
        faults = await self._announced(self._runner.encode(missing), announcement)
        self._encoded.update(each.span.digest for each in missing)
        end_ns = self._clock.now_ns()
        core.end_encode(faults, end_ns)
        self._encode_ns += end_ns - announcement.start_unix_ns
        self._unannounced_ns = 0
        self._publish(replace(announcement, end_unix_ns=end_ns))
        return True

    async def _announced(self, work: Awaitable[T], announcement: StepReport) -> T:
        """Await the work of a step that has begun, and announce the step if it takes long."""
        timer = asyncio.get_running_loop().call_later(ANNOUNCE_AFTER_S, self._announce, announcement)
        try:
            return await work
        finally:
            timer.cancel()

    async def _measure(self, tokens: int, done: "asyncio.Future[int | None]") -> None:
        """Run a measured step and report it as one that computes prompt tokens."""
        core, capabilities, _, _ = self._parts
        self._trial = None
        blocks = core.lend_blocks(tokens, self._clock.now_ns())
        if blocks is None:
            if not done.done():
                done.set_result(None)
            return
        try:
            batch = trial_batch(tokens, blocks, capabilities)
            work, start_ns = batch.work, self._clock.now_ns()
            announcement = core.begin_trial(work, start_ns)
            self._unannounced_ns = start_ns
            await self._announced(self._runner.run(batch), announcement)
        finally:
            self._unannounced_ns = 0
            end_ns = self._clock.now_ns()
            core.give_back(blocks, end_ns)
        self._publish(replace(announcement, end_unix_ns=end_ns))
        if not done.done():
            done.set_result(end_ns - start_ns)

    def _announce(self, announcement: StepReport) -> None:
        self._events.put(EngineEvent(step=announcement))
        self._unannounced_ns = 0

    def _settle(self, *, wake: bool = True) -> None:
        """Carry out the core's decisions: start fetches, publish events, wake the loop."""
        for sequence in self._core.take_fetches():
            writer = self._parts[3].writer()
            self._fetches[sequence.sequence_id] = self._tasks.spawn("KV fetch", self._fetch(sequence, writer)), writer
        self._publish()
        if wake:
            self._wake.set()

    def _publish(self, step: StepReport | None = None) -> None:
        self._filled.set()
        waiting, self._kv_waiting = self._kv_waiting, {}
        for news in waiting:
            news()
        event = self._core.take_event(step)
        if event is not None:
            self._events.put(event)

    async def _sum(self, core: Core, copies: BlockCopies) -> None:
        """Compute checksums of ready blocks while steps run, so that no receiver waits for them."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while (part := core.offers.to_sum(copies.slice_blocks)) is not None:
                offer, first, end = part
                offer.checksums[first:end] = await copies.checksums(offer.blocks[first:end])

    async def _fetch(self, sequence: Sequence, writer: BlockWriter) -> None:
        core, capabilities, fetcher, _ = self._parts
        handle = sequence.request.kv
        assert handle is not None
        async with self._fetch_slots:
            started_ns = self._clock.now_ns()
            core.kv_requested(sequence)
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


# Runners under the engine core; vllm has its own core.
RUNNERS: Final[Mapping[str, Callable[[EngineConfig], Runner]]] = MappingProxyType(
    {"torch": TorchRunner, "sim": SimRunner}
)


# Modules that an engine imports at start, if that takes seconds.
HEAVY: Final[Mapping[str, str]] = MappingProxyType(
    {"torch": "libs.engine.torch.step", "vllm": "libs.engine.vllm.launch"}
)


def import_heavy(name: str) -> None:
    """Import the modules that the engine needs at start, so that no model's load includes that time.

    A missing package is left to `start`, which says what to install.
    """
    if name in HEAVY:
        with suppress(ImportError):
            import_module(HEAVY[name])


def make_engine(
    name: str,
    config: EngineConfig,
    clock: Clock,
    *,
    random_bytes: RandomBytes = token_bytes,
    sim_gpu: SimGpu | None = None,
) -> Engine:
    """Return an engine that has not been started. Raise StartupError for an unknown name.

    Missing packages are reported by `start`. `random_bytes` makes the KV handles of all engines but vllm, which makes
    its own. Sim engines with the same `sim_gpu` share it.
    """
    if name == "vllm":
        return VllmEngine(config, clock, VllmCore())
    if name == "sim" and sim_gpu is not None:
        return LocalEngine(SimRunner(config, sim_gpu), config, clock, random_bytes=random_bytes)
    make_runner = RUNNERS.get(name)
    if make_runner is None:
        raise StartupError(f"engine {name!r} is not one of {', '.join(RUNNERS)}, vllm")
    return LocalEngine(make_runner(config), config, clock, random_bytes=random_bytes)
