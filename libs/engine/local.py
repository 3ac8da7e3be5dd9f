"""The engine port over the pure core and a runner: one loop of steps, one task per KV fetch, one queue of events.

`make_engine` creates engines by name. They import heavy packages only at start, so a sim worker needs no torch.
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
# A step that takes longer is announced, so that telemetry shows it before it ends.
ANNOUNCE_AFTER_S = 0.1
# The number of steps between two checks of the pool's reference counts. An idle pool is checked as well.
POOL_CHECK_STEPS = 1000
# The upper bound of concurrent KV fetches; others wait in order. Most of them wait for a prompt, not for bytes.
MAX_FETCHES = 64


class PoolFault(RuntimeError):
    """A mismatch of the block pool's reference counts with the blocks in use. Answers after it cannot be trusted."""


class LocalEngine:
    """An engine that runs its sequences on one runner in this process."""

    def __init__(
        self, runner: Runner, config: EngineConfig, clock: Clock, *, random_bytes: RandomBytes = token_bytes
    ) -> None:
        # `random_bytes` makes KV handles. Only simulations replace the system's source, so that they can be repeated.
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
        """Set when blocks without a checksum may have become ready."""
        self._kv_waiting: dict[Callable[[], None], None] = {}
        """Callbacks for when blocks have become ready for other workers, or never will. They are in order of addition,
        so that a simulation can be repeated.
        """
        self._unannounced_ns = 0
        """The start of the running step until it is announced, then 0."""
        self._trial: tuple[int, asyncio.Future[int | None]] | None = None
        """The pending measurement, as its tokens and the future of its result."""
        self._encoded: set[bytes] = set()
        """The digests of images that were encoded since the last step."""
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
        self._begin(await self._runner.load(identity, progress), identity, fetcher)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        assert keep_weights, "capabilities say so"
        if not self._closed:
            await self._stop()
            await self._runner.sleep()

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
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
        self._core.submit(request, self._clock.now_ns())
        self._settle()

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._fetches:  # must stop writing before the blocks are freed
            fetch, writer = self._fetches.pop(sequence_id)
            writer.stop()
            fetch.cancel()
        self._core.abort(sequence_id, self._clock.now_ns())
        self._settle()

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        self._core.proceed(sequence_id, token_ids, self._clock.now_ns())
        self._settle()

    def hand_over(self, sequence_id: int) -> None:
        self._core.hand_over(sequence_id, self._clock.now_ns())
        self._settle()

    def set_prefill_budget(self, tokens: int) -> None:
        self._core.set_prefill_budget(tokens)
        self._wake.set()

    def set_prefill_chunk(self, tokens: int) -> None:
        self._core.set_prefill_chunk(tokens)
        self._wake.set()

    def set_step_time(self, model: StepTimeModel) -> None:
        self._core.set_step_time(model)

    async def measure_prefill(self, tokens: int) -> int | None:
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
        """Iterate over events until the engine is closed. A second call continues where the first stopped.

        Raise the error that ended the engine.
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
                self._wake.set()  # the handle's lease may end sooner than the loop expects

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
        self._core.release(opaque, self._clock.now_ns())
        self._settle()

    def abandon(self, opaque: bytes) -> None:
        self._core.offers.leave_unread(opaque, self._clock.now_ns())
        self._settle()

    def load(self) -> EngineLoad:
        """Return current depths, and the time up to which the events read so far cover this engine."""
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
        return replace(self._core.integrity(), pool_faults=self._pool_faults)

    async def close(self) -> None:
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
                    continue  # plan again, since sequences may have come or ended meanwhile
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
        """Wait for work, but not beyond the end of the next lease."""
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
        """Encode the batch's images without cached embeddings in a step of their own. Return False if there are none.

        The next step encodes images whose embeddings were evicted since, so that the loop makes progress.
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
        """Await the work of a step that has begun, and announce the step after `ANNOUNCE_AFTER_S`."""
        timer = asyncio.get_running_loop().call_later(ANNOUNCE_AFTER_S, self._announce, announcement)
        try:
            return await work
        finally:
            timer.cancel()

    async def _measure(self, tokens: int, done: "asyncio.Future[int | None]") -> None:
        """Run a trial step, and report it as one that computes prompt tokens."""
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
        """Perform what the core decided: start fetches, publish events, wake the loop."""
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
        """Compute checksums of ready blocks while steps run, so that receivers need not wait for them."""
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


# The runners that work under the engine core. vllm has its own core.
RUNNERS: Final[Mapping[str, Callable[[EngineConfig], Runner]]] = MappingProxyType(
    {"torch": TorchRunner, "sim": SimRunner}
)


# The modules that an engine imports at start, if the import takes seconds.
HEAVY: Final[Mapping[str, str]] = MappingProxyType(
    {"torch": "libs.engine.torch.step", "vllm": "libs.engine.vllm.launch"}
)


def import_heavy(name: str) -> None:
    """Import an engine's heavy modules early, so that loading a model does not include their import.

    A missing package raises no error here; the engine's `start` reports it.
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

    The engine's `start` reports missing packages. `random_bytes` makes the KV handles of all engines but vllm, which
    makes its own. Sim engines with the same `sim_gpu` share it.
    """
    if name == "vllm":
        return VllmEngine(config, clock, VllmCore())
    if name == "sim" and sim_gpu is not None:
        return LocalEngine(SimRunner(config, sim_gpu), config, clock, random_bytes=random_bytes)
    make_runner = RUNNERS.get(name)
    if make_runner is None:
        raise StartupError(f"engine {name!r} is not one of {', '.join(RUNNERS)}, vllm")
    return LocalEngine(make_runner(config), config, clock, random_bytes=random_bytes)
