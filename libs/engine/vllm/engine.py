"""The engine port over vLLM. Sequences run in its EngineCore process, and the results of each step arrive as one event.

vLLM's own connector moves KV between engines. A handle's opaque bytes are the connector's parameters, and `export`
always fails. The decode side computes the last prompt token again and samples the first token from it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from libs.contracts.errors import InvalidRequest, KvLost, QueueFull, SleepFailed, one_line
from libs.engine.config import EngineConfig
from libs.engine.kv_port import KvExport, KvFetcher
from libs.engine.port import Capabilities, DeviceMemory, EngineIdentity, EnginePhase, EngineRequest, Progress
from libs.engine.reports import EngineEvent, EngineIntegrity, EngineLoad, EventQueue, FinishReason, SequenceOutput
from libs.engine.sequence import Sequence, check_request
from libs.engine.vllm.connectors import KvRoute
from libs.engine.vllm.core import MAX_REASON_CHARS, CoreProcess
from libs.engine.vllm.handover import check_last_token, lease_margin_ns, lease_ns, refusal
from libs.engine.vllm.pacing import trial_tokens
from libs.engine.vllm.sequences import ImageTotals, LiveSequence, OutputReader, Sequences, announcement
from libs.engine.vllm.starting import StartedCore
from libs.engine.vllm.step_reports import Command, EngineReport, Running
from libs.model.info import load_model_info
from libs.model.pictures import BrokenImage
from libs.policy.step_time import StepTimeModel
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

# The end of a lease that never ends.
NEVER_NS = 1 << 62


RETRY_AFTER_S = 1.0
# The upper bound of the time for running sequences to leave EngineCore before it sleeps.
SETTLE_S = 10.0
# The interval between two checks for a long step and for ended dummy steps.
LOOK_S = 0.05
# A step that takes longer is announced, so that telemetry shows it before it ends.
ANNOUNCE_AFTER_NS = 100_000_000
NOTHING = EngineReport(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
Send = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that exist once EngineCore serves."""

    ready: StartedCore
    reading: OutputReader


class VllmEngine:
    """An engine that runs its sequences in one EngineCore."""

    def __init__(self, config: EngineConfig, clock: Clock, core: CoreProcess) -> None:
        self._config = config
        self._clock = clock
        self._core = core
        self._sequences = Sequences()
        self._events = EventQueue()
        self._tasks = TaskOwner(on_failure=self._events.end)
        self._outbox: deque[Send] = deque()
        self._unread: deque[tuple[LiveSequence, Any]] = deque()
        """The sequences whose images have not been read yet, with their requests.

        The bound on all sequences also limits them.
        """
        self._wake, self._took, self._wake_reader = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._started: _Parts | None = None
        self._report = NOTHING
        self._submitted = 0
        """The number of sequences that were sent to EngineCore or will be."""
        self._busy_since_ns = 0
        """The time since which a step may have been running; 0 if there are no sequences."""
        self._announced = 0
        """The number of the step that was announced last."""
        self._images = ImageTotals()
        self._trial: asyncio.Future[int | None] | None = None
        self._eos_token_ids: frozenset[int] = frozenset()
        self._commands = 0
        self._closed = self._asleep = False

    @property
    def name(self) -> str:
        return "vllm"

    @property
    def device(self) -> str:
        return self._parts.ready.device

    @property
    def capabilities(self) -> Capabilities:
        return self._parts.ready.capabilities

    @property
    def _parts(self) -> _Parts:
        if self._started is None:
            raise RuntimeError("the engine has not been started")
        return self._started

    @property
    def _wire(self) -> Any:
        from libs.engine.vllm import wire  # noqa: PLC0415 - it imports vLLM, which takes seconds

        return wire

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start EngineCore. Raise StartupError. The fetcher is unused, since vLLM's connector moves KV."""
        assert self._config.model_path is not None
        self._eos_token_ids = load_model_info(self._config.model_path).eos_token_ids
        ready = await self._core.start(self._config, identity, progress)
        self._submitted = self._core.sent
        self._serve(ready, identity)

    def _serve(self, ready: StartedCore, identity: EngineIdentity) -> None:
        reading = OutputReader(
            self._sequences,
            ready.capabilities,
            identity,
            ready.handing,
            lease_ns=lease_ns(self._config.kv_lease_ms) if ready.handing.connector.holds else NEVER_NS,
            release=self._release,
            images=self._images,
        )
        self._started = _Parts(ready, reading)
        self._report = msgspec.structs.replace(
            NOTHING, taken=self._submitted, steps=self._report.steps, free_blocks=ready.capabilities.kv_blocks
        )
        self._tasks.spawn("vllm requests", self._send())
        self._tasks.spawn("vllm images", self._read_images())
        self._tasks.spawn("vllm outputs", self._receive())
        self._tasks.spawn("vllm long and dummy steps", self._look(ready))

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Abort sequences and end leases, since KV does not survive sleep, then put EngineCore to sleep."""
        if self._asleep:
            return
        self._asleep = True
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._settle()
            await self._core.sleep(keep_weights=keep_weights)
        except Exception as error:  # any error that vLLM raises; EngineCore ends after it
            raise SleepFailed(f"the vllm engine does not sleep: {one_line(error, MAX_REASON_CHARS)}") from error
        await self._tasks.close()
        self._busy_since_ns = 0  # so that `load` does not read the board
        self._events.end()

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Resume the same EngineCore under a new identity, with the initial chunk and budget."""
        progress("waking EngineCore", 0.0)
        await self._core.wake()
        self._events = EventQueue()
        self._tasks = TaskOwner(on_failure=self._events.end)
        self._outbox.clear()
        self._asleep = False
        self._serve(self._parts.ready, identity)
        chunk = self._config.prefill_chunk_tokens
        self._command(Command(prefill_budget=chunk, prefill_chunk=chunk))

    async def _settle(self) -> None:
        """Abort running sequences and release leases, then wait until EngineCore has reported both."""
        for live in self._sequences.all():
            self.abort(live.sequence_id)
        for name in self._sequences.leases_held():
            self._release(name)
        if self._trial is not None:
            await asyncio.wait([self._trial])
        while self.integrity() != EngineIntegrity(0, 0, 0):
            self._took.clear()
            await self._took.wait()

    async def device_memory(self) -> DeviceMemory | None:
        return await self._core.device_memory() if self.capabilities.sleeps else None

    def submit(self, request: EngineRequest) -> None:
        capabilities, wire = self.capabilities, self._wire
        if self._asleep:
            raise QueueFull("the engine goes to sleep", retry_after_s=RETRY_AFTER_S)
        if self._sequences.by_id(request.sequence_id) is not None:
            raise InvalidRequest(f"sequence {request.sequence_id} is in use")
        sequence = Sequence(
            request,
            block_size_tokens=capabilities.block_size_tokens,
            max_context_tokens=capabilities.max_context_tokens,
        )
        check_request(sequence, capabilities)
        check_last_token(request)
        if len(self._sequences) >= self._config.max_sequences + self._config.max_waiting:
            raise QueueFull("the engine's queue is full", retry_after_s=RETRY_AFTER_S)
        handover = None
        if request.kv is not None:
            handover, handing = wire.unpack_handover(request.kv.opaque), self._parts.ready.handing
            refused = refusal(
                request,
                handover,
                capabilities,
                engine_id=handing.engine_id,
                pulls=handing.connector.way is KvRoute.REPLY,
                margin_ns=lease_margin_ns(self._config.kv_lease_ms),
                now_ns=self._clock.now_ns(),
            )
            if refused is not None:
                end = SequenceOutput(request.sequence_id, finish=refused.finish, detail=refused.detail)
                self._events.put(EngineEvent((SequenceOutput(request.sequence_id, pulling=True), end)))
                return
        name = self._sequences.new_name(request)
        message = wire.core_request(
            request,
            name,
            handover,
            max_tokens=sequence.max_length - sequence.length,
            eos_token_ids=self._eos_token_ids,
            handing=self._parts.ready.handing,
            adapters=self._config.adapters,
        )
        live = self._sequences.add(request, name, stored=handover is not None and handover.stored)
        self._busy_since_ns = self._busy_since_ns or self._clock.now_ns()
        self._submitted += 1
        if any(image.data for image in request.images):
            live.unsent = True
            self._unread.append((live, message))
            self._wake_reader.set()
        else:
            self._post(lambda: self._core.send(message))

    def abort(self, sequence_id: int) -> None:
        live = self._sequences.by_id(sequence_id)
        if live is None:
            for name in self._sequences.leased_by(sequence_id):
                self._release(name)
        elif not live.aborting:
            live.aborting = True
            if not live.unsent:
                self._post(lambda: self._core.abort([live.name]))

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        # vLLM's connectors do not stream prompts, so no sequence waits for tokens.
        ...

    def hand_over(self, sequence_id: int) -> None:
        # vLLM's connectors move the KV of finished prompts, but not of running decodes. The worker lets another worker
        # recompute those.
        ...

    def set_prefill_budget(self, tokens: int) -> None:
        self._command(Command(prefill_budget=max(tokens, 0)))

    def set_prefill_chunk(self, tokens: int) -> None:
        self._command(Command(prefill_chunk=max(tokens, 1)))

    def set_step_time(self, model: StepTimeModel) -> None:
        self._command(Command(step_time=model))

    async def measure_prefill(self, tokens: int) -> int | None:
        if self._trial is not None:
            raise QueueFull("another measurement waits")
        capabilities = self.capabilities
        if tokens > capabilities.kv_blocks * capabilities.block_size_tokens:
            return None
        prompts = trial_tokens(max(tokens, 1), capabilities.vocab_size)
        if max(map(len, prompts)) >= capabilities.max_context_tokens:
            return None
        self._trial = asyncio.get_running_loop().create_future()
        self._busy_since_ns = self._busy_since_ns or self._clock.now_ns()
        self._commands += 1
        for message in self._wire.trial_requests(prompts, f"trial-{self._commands}", pools=not capabilities.generates):
            self._post(partial(self._core.command, message))
        return await asyncio.shield(self._trial) or None  # an abandoned measurement ends by itself

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
        """Raise KvLost. vLLM's own connector moves the blocks, and only to vLLM engines."""
        raise KvLost("these blocks are moved by vLLM's KV connector, not by the worker")

    def release(self, opaque: bytes) -> None:
        handover = self._wire.unpack_handover(opaque)
        if handover is not None and self._sequences.leased(handover.request_id):
            self._release(handover.request_id)

    def abandon(self, opaque: bytes) -> None:
        # The blocks stay until their lease ends. NIXL reads without notice, so a receiver may be reading them.
        ...

    async def events(self) -> AsyncIterator[EngineEvent]:
        """Iterate over events until the engine is closed. A second call continues where the first stopped.

        Raise the error that ended the engine.
        """
        while (event := await self._events.get()) is not None:
            yield event

    def load(self) -> EngineLoad:
        """Return the depths of the last report, plus the sequences sent since."""
        report = self._report
        unseen = max(self._submitted - report.taken, 0)
        late = self._sequences.all()[len(self._sequences) - unseen :] if unseen else []
        tokens = [len(live.request.token_ids) for live in late if live.request.phase is not EnginePhase.DECODE]
        waiting = report.waiting + len(tokens)
        unread_ns = self._events.oldest_start_ns()
        return EngineLoad(
            running=report.running,
            waiting=waiting,
            waiting_prefill_tokens=report.waiting_prefill_tokens + sum(tokens),
            awaiting_kv=report.awaiting_kv + len(late) - len(tokens),
            free_kv_blocks=report.free_blocks,
            kv_wait_since_unix_ns=report.kv_wait_since_ns,
            reported_to_unix_ns=min((ns for ns in (unread_ns, self._reported_to_ns()) if ns), default=0),
            preemptions=report.preemptions,
            recomputed_tokens=report.recomputed_tokens,
            images_used=self._images.used,
            images_encoded=self._images.encoded,
            image_encode_ns=self._images.encode_ns,
            image_cache_bytes=report.image_cache_bytes,
            waiting_encode_ns=self._images.waiting_ns(self._sequences.all()),
            waiting_prefill_squares=report.waiting_prefill_squares + sum(each * each for each in tokens),
        )

    def _reported_to_ns(self) -> int:
        """Return the time up to which steps are reported; 0 means now.

        This is the time of the last report, or the start of the step that was running then. Once a later step has been
        announced, it is a time within that step.
        """
        if not self._busy_since_ns:
            return 0
        reported_ns = max(self._report.running_since_ns or self._report.now_ns, self._busy_since_ns)
        now_ns, running = self._clock.now_ns(), self._parts.ready.board.read()
        if running is None or running.number != self._announced or running.number != self._report.steps + 1:
            return reported_ns
        return max(reported_ns, min(now_ns, running.pending_wait_ns or now_ns))

    def integrity(self) -> EngineIntegrity:
        referenced = self.capabilities.kv_blocks - self._report.free_blocks if self._started else 0
        return EngineIntegrity(len(self._sequences), referenced, self._sequences.leases)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        if self._trial is not None:
            self._trial.cancel()
        await self._core.close()
        outputs = [live.end(FinishReason.ABORTED) for live in self._sequences.all()]
        self._sequences = Sequences()
        if self._started is not None:
            self._report = msgspec.structs.replace(NOTHING, free_blocks=self.capabilities.kv_blocks)
            self._busy_since_ns = 0  # so that `load` does not read the board
        if outputs:
            self._events.put(EngineEvent(tuple(outputs)))
        self._events.end()

    # ------------------------------------------------------------------ inner parts

    def _release(self, name: str) -> None:
        self._command(Command(release=[name]))

    def _command(self, command: Command) -> None:
        self._commands += 1
        message = self._wire.command_request(command, f"command-{self._commands}")
        self._post(lambda: self._core.command(message))

    def _post(self, send: Send) -> None:
        self._outbox.append(send)
        self._wake.set()

    async def _send(self) -> None:
        """Send what `_post` has queued, in order."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await self._outbox.popleft()()

    async def _read_images(self) -> None:
        """Send sequences with images in order. vLLM's processor reads the images on a thread.

        Sequences without images do not wait for it.
        """
        while True:
            await self._wake_reader.wait()
            self._wake_reader.clear()
            while self._unread:
                live, message = self._unread.popleft()
                fault = "" if live.aborting else await asyncio.to_thread(self._read, live, message)
                if live.aborting:
                    self._drop(live, FinishReason.ABORTED)
                elif fault:
                    self._drop(live, FinishReason.FAILED, fault)
                else:
                    live.unsent = False
                    self._post(partial(self._core.send, message))

    def _read(self, live: LiveSequence, message: Any) -> str:
        """Put the images' pixels into the request.

        Return the fault of an image that cannot be read; empty if there is none.
        """
        reader = self._parts.ready.images
        assert reader is not None, "requests with images are refused"
        try:
            reader.read(message, live.request.images)
        except BrokenImage as error:
            return str(error)
        return ""

    def _drop(self, live: LiveSequence, finish: FinishReason, detail: str = "") -> None:
        """End a sequence that EngineCore never receives."""
        self._submitted -= 1
        self._sequences.remove(live)
        self._events.put(EngineEvent((live.end(finish, detail=detail),)))
        self._note_idle()
        self._took.set()

    async def _receive(self) -> None:
        while True:
            outputs = await self._core.receive()
            self._take(outputs)
            await self._events.room()

    def _take(self, outputs: Any) -> None:
        report: EngineReport | None = self._wire.report_of(outputs)
        reading = self._parts.reading
        encoding, event = reading.encoding(report), reading.event(outputs, report)
        if report is not None:
            self._report = report
            if report.trial_ns is not None and self._trial is not None:
                self._trial.set_result(report.trial_ns)
                self._trial = None
        self._note_idle()
        for each in (encoding, event):
            if each != EngineEvent():
                self._events.put(each)
        self._took.set()

    def _note_idle(self) -> None:
        if not self._sequences and self._trial is None and not self._report.running_since_ns:
            self._busy_since_ns = 0

    async def _look(self, ready: StartedCore) -> None:
        """Announce long steps and report dummy steps."""
        while True:
            await asyncio.sleep(LOOK_S)
            if dummies := ready.dummies.take():
                self._events.put(EngineEvent(dummy_steps=dummies))
            if (running := ready.board.read()) is not None and self._is_long(running):
                self._announced = running.number
                self._events.put(EngineEvent(step=announcement(running, self._report)))

    def _is_long(self, running: Running) -> bool:
        """Return whether a step is long, not announced yet, and the first one after the last report."""
        if running.number in {self._announced, 0} or running.number != self._report.steps + 1:
            return False
        return self._clock.now_ns() >= running.start_unix_ns + ANNOUNCE_AFTER_NS
