"""The engine port over vLLM. Sequences run in its EngineCore process; what each step brought comes as one event.

KV goes from engine to engine by vLLM's own connector: a handle's opaque bytes are its parameters, and `export` has
nothing to give. The decode side samples the first token, from the last prompt token that it computes again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from libs.contracts.errors import InvalidRequest, KvLost, QueueFull
from libs.engine.config import EngineConfig
from libs.engine.events import EventQueue
from libs.engine.port import (
    BlockEvents,
    Capabilities,
    EngineEvent,
    EngineIdentity,
    EngineIntegrity,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvExport,
    KvFetcher,
    KvTransferReport,
    Phase,
    Progress,
    SequenceOutput,
    StepReport,
)
from libs.engine.sequence import Sequence
from libs.engine.validation import check_request
from libs.engine.vllm.core import CoreProcess, Ready
from libs.engine.vllm.live import Live, Sequences
from libs.engine.vllm.report import Command, Report
from libs.model.info import load_model_info
from libs.perfmodel import StepTimeModel
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

if TYPE_CHECKING:
    from libs.engine.vllm import wire

RETRY_AFTER_S = 1.0
LEASE_MARGIN_NS = 2_000_000_000
"""A handle is refused so long before its lease ends: from then on its blocks could be another's when they are read."""
NOTHING = Report(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
Send = Callable[[], Awaitable[None]]


class VllmEngine:
    """Runs sequences in one EngineCore."""

    def __init__(self, config: EngineConfig, clock: Clock, core: CoreProcess) -> None:
        self._config = config
        self._clock = clock
        self._core = core
        self._sequences = Sequences()
        self._events = EventQueue()
        self._tasks = TaskOwner(on_failure=self._events.end)
        self._outbox: deque[Send] = deque()
        self._wake = asyncio.Event()
        self._started: tuple[Ready, EngineIdentity] | None = None
        self._report = NOTHING
        self._submitted = 0
        """Sequences that EngineCore has been given or is about to be."""
        self._busy_since_ns = 0
        """Since when a step may run; 0: nothing lives here."""
        self._trial: asyncio.Future[int | None] | None = None
        self._eos_token_ids: frozenset[int] = frozenset()
        self._commands = 0
        self._closed = False

    # ------------------------------------------------------------------ what it is

    @property
    def name(self) -> str:
        """ "vllm"."""
        return "vllm"

    @property
    def device(self) -> str:
        """ "cpu", or "cuda:" and the GPU's name."""
        return self._parts[0].device

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `start`."""
        return self._parts[0].capabilities

    @property
    def _parts(self) -> tuple[Ready, EngineIdentity]:
        if self._started is None:
            raise RuntimeError("the engine has not been started")
        return self._started

    @property
    def _wire(self) -> Any:
        from libs.engine.vllm import wire  # noqa: PLC0415 - it imports vLLM, which takes seconds

        return wire

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start EngineCore. The fetcher is not used. Raises StartupError."""
        assert self._config.model_path is not None
        self._eos_token_ids = load_model_info(self._config.model_path).eos_token_ids
        ready = await self._core.start(self._config, identity, progress)
        self._started, self._submitted = (ready, identity), self._core.sent
        self._report = msgspec.structs.replace(NOTHING, taken=self._submitted, free_blocks=ready.capabilities.kv_blocks)
        self._tasks.spawn("vllm requests", self._send())
        self._tasks.spawn("vllm outputs", self._receive())

    # ------------------------------------------------------------------ sequences

    def submit(self, request: EngineRequest) -> None:
        """Take a sequence. Raises InvalidRequest when it can never run here, QueueFull when the bound is reached."""
        capabilities, wire = self.capabilities, self._wire
        if self._sequences.by_key(request.key) is not None:
            raise InvalidRequest(f"sequence key {request.key} is in use")
        sequence = Sequence(
            request,
            block_size_tokens=capabilities.block_size_tokens,
            max_context_tokens=capabilities.max_context_tokens,
        )
        check_request(sequence, capabilities)
        if len(self._sequences) >= self._config.max_sequences + self._config.max_waiting:
            raise QueueFull("the engine's queue is full", retry_after_s=RETRY_AFTER_S)
        handover = None
        if request.kv is not None:
            if request.kv.kv_layout == capabilities.kv_layout and request.kv.tokens != sequence.length:
                raise InvalidRequest(
                    f"the KV handle covers {request.kv.tokens} tokens, the sequence has {sequence.length}: a vllm"
                    " engine goes on from exactly what was prefilled"
                )
            handover = self._handover(request)
            if handover is None:
                return
        live = self._sequences.add(request)
        self._busy_since_ns = self._busy_since_ns or self._clock.now_ns()
        self._submitted += 1
        message = wire.core_request(
            request, live.name, sequence.max_length - sequence.length, self._eos_token_ids, handover
        )
        self._post(lambda: self._core.send(message))

    def _handover(self, request: EngineRequest) -> "wire.Handover | None":
        """What the handle says; None where the sequence has ended with it."""
        assert request.kv is not None
        layout = self.capabilities.kv_layout
        if request.kv.kv_layout != layout:
            detail = f"kv_mismatch: the blocks have KV layout {request.kv.kv_layout!r}, this engine has {layout!r}"
            self._refuse(request, FinishReason.FAILED, detail)
            return None
        handover: wire.Handover | None = self._wire.unpack_handover(request.kv.opaque)
        if handover is None:
            self._refuse(request, FinishReason.FAILED, "kv_mismatch: the handle is no vllm engine's")
            return None
        if handover.engine_id == self._parts[0].engine_id:
            self._refuse(request, FinishReason.KV_LOST, "kv_lost: vLLM does not pull blocks from itself")
            return None
        if self._clock.now_ns() > handover.expires_unix_ns - LEASE_MARGIN_NS:
            self._refuse(request, FinishReason.KV_LOST, "kv_lost: the lease of the blocks is over")
            return None
        return handover

    def _refuse(self, request: EngineRequest, reason: FinishReason, detail: str) -> None:
        pulling = SequenceOutput(request.key, pulling=True)
        self._events.put(EngineEvent((pulling, SequenceOutput(request.key, finish=reason, detail=detail))))

    def abort(self, key: int) -> None:
        """End a sequence soon, or the lease of its blocks; unknown keys are ignored."""
        live = self._sequences.by_key(key)
        if live is None:
            names = self._sequences.leased_by(key)
            if names:
                self._command(Command(release=names))
        elif not live.aborting:
            live.aborting = True
            self._post(lambda: self._core.abort([live.name]))

    def proceed(self, key: int, token_ids: tuple[int, ...]) -> None:
        """Nothing is streamed here."""

    def hand_over(self, key: int) -> None:
        """vLLM's connectors move what prefill has left, not what decodes: the sequence ends where it is."""

    def set_prefill_budget(self, tokens: int) -> None:
        """Prompt tokens that one step may compute beside decodes; takes effect with the next step."""
        self._command(Command(prefill_budget=max(tokens, 0)))

    def set_prefill_chunk(self, tokens: int) -> None:
        """Prompt tokens that one step computes at most, whatever the budget; takes effect with the next step."""
        self._command(Command(prefill_chunk=max(tokens, 1)))

    def set_step_time(self, model: StepTimeModel) -> None:
        """Steps are not held to TPOT targets here yet: the prompt budget alone bounds them."""

    async def measure_prefill(self, tokens: int) -> int | None:
        """Not measured: vLLM runs trial prompts only as requests, beside others."""
        return None

    def export(
        self, opaque: bytes, kv_layout: str, from_block: int, *, news: Callable[[], None], in_place: bool = False
    ) -> KvExport:
        """Raises KvLost: vLLM's own connector moves the blocks, to vLLM engines only."""
        raise KvLost("these blocks are moved by vLLM's KV connector, not by the worker")

    def release(self, opaque: bytes) -> None:
        """The blocks are needed no more; unknown handles are ignored."""
        handover = self._wire.unpack_handover(opaque)
        if handover is not None and self._sequences.leased(handover.request_id):
            self._command(Command(release=[handover.request_id]))

    # ------------------------------------------------------------------ what it says

    async def events(self) -> AsyncIterator[EngineEvent]:
        """Events until the engine is closed; raises what made it fail. Iterating again goes on where it was left."""
        while (event := await self._events.get()) is not None:
            yield event

    def load(self) -> EngineLoad:
        """Depths as of the last report, with what was sent since."""
        report = self._report
        unseen = max(self._submitted - report.taken, 0)
        late = self._sequences.all()[len(self._sequences) - unseen :] if unseen else []
        tokens = [len(live.request.token_ids) for live in late if live.request.phase is not Phase.DECODE]
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
            waiting_prefill_squares=report.waiting_prefill_squares + sum(each * each for each in tokens),
        )

    def _reported_to_ns(self) -> int:
        """Until the last report, or until something came to be computed where nothing was; 0: now."""
        return max(self._report.now_ns, self._busy_since_ns) if self._busy_since_ns else 0

    def integrity(self) -> EngineIntegrity:
        """Counters that must be zero when nothing runs."""
        referenced = self.capabilities.kv_blocks - self._report.free_blocks if self._started else 0
        return EngineIntegrity(len(self._sequences), referenced, self._sequences.leases)

    async def close(self) -> None:
        """Abort what runs, end EngineCore. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        await self._core.close()
        outputs = []
        for live in self._sequences.all():
            self._sequences.remove(live)
            outputs.append(live.end(FinishReason.ABORTED))
        self._sequences = Sequences()
        if self._started is not None:
            self._report = msgspec.structs.replace(NOTHING, free_blocks=self.capabilities.kv_blocks)
        if outputs:
            self._events.put(EngineEvent(tuple(outputs)))
        self._events.end()

    # ------------------------------------------------------------------ inner parts

    def _command(self, command: Command) -> None:
        self._commands += 1
        message = self._wire.command_request(command, f"command-{self._commands}")
        self._post(lambda: self._core.command(message))

    def _post(self, send: Send) -> None:
        self._outbox.append(send)
        self._wake.set()

    async def _send(self) -> None:
        """In order."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await self._outbox.popleft()()

    async def _receive(self) -> None:
        while True:
            outputs = await self._core.receive()
            self._take(outputs)
            await self._events.room()

    def _take(self, outputs: Any) -> None:
        """One message: what a step brought, and how things stand after it."""
        wire = self._wire
        told: list[SequenceOutput] = []
        report: Report | None = wire.report_of(outputs)
        if report is not None:
            pulling = (self._sequences.by_name(name) for name in report.pulling)
            told += [SequenceOutput(live.key, pulling=True) for live in pulling if live is not None]
        transfers = self._transfers(report) if report is not None else ()
        told += [output for each in outputs.outputs if (output := self._output(each)) is not None]
        if report is not None:
            self._report = report
            aborted = [live for name in report.aborted if (live := self._sequences.by_name(name)) is not None]
            told += [self._end(live, FinishReason.ABORTED) for live in aborted]
            for name in report.released:
                self._sequences.lease_over(name)
        if not self._sequences:
            self._busy_since_ns = 0
        event = EngineEvent(
            tuple(told),
            _step(report),
            tuple((start, end) for start, end in report.kv_waits) if report else (),
            transfers,
            BlockEvents(tuple(report.stored), tuple(report.removed)) if report else BlockEvents(),
        )
        if event != EngineEvent():
            self._events.put(event)

    def _output(self, output: Any) -> SequenceOutput | None:
        live = self._sequences.by_name(output.request_id)
        if live is None:
            return None
        wire = self._wire
        if output.prefill_stats is not None:
            live.cached_tokens = output.prefill_stats.num_local_cached_tokens
        token_ids, logprobs = tuple(output.new_token_ids), wire.logprobs_of(output)
        if output.finish_reason is None:
            return live.tokens(token_ids, logprobs)
        finish = wire.FINISHED.get(output.finish_reason)
        if finish is None:
            lost = live.request.kv is not None
            detail = "kv_lost: the blocks did not come" if lost else f"vLLM ended it: {output.finish_reason}"
            return self._end(live, FinishReason.KV_LOST if lost else FinishReason.FAILED, detail=detail)
        if live.request.phase is Phase.PREFILL:
            return self._prefilled(live, output.kv_transfer_params)
        return self._end(live, finish, token_ids=token_ids, logprobs=logprobs)

    def _prefilled(self, live: Live, parameters: dict[str, Any] | None) -> SequenceOutput:
        """The token that vLLM has sampled is not told: the decode side samples it."""
        if parameters is None:
            return self._end(live, FinishReason.FAILED, detail="vLLM's KV connector gave no parameters")
        ready, identity = self._parts
        expires_ns = self._clock.now_ns() + max(self._config.kv_lease_ms // 1000, 1) * 1_000_000_000
        opaque = self._wire.pack_handover(self._wire.Handover(parameters, expires_ns))
        capabilities = ready.capabilities
        handle = live.handle(identity, opaque, capabilities.kv_layout, capabilities.block_size_tokens)
        self._sequences.lease(live)
        return self._end(live, FinishReason.PREFILLED, handle=handle)

    def _end(self, live: Live, finish: FinishReason, **how: Any) -> SequenceOutput:
        self._sequences.remove(live)
        return live.end(finish, **how)

    def _transfers(self, report: Report) -> tuple[KvTransferReport, ...]:
        capabilities = self.capabilities
        transfers = []
        for pulled in report.pulled:
            live = self._sequences.by_name(pulled.request_id)
            if live is None or live.request.kv is None:
                continue
            blocks = -(-pulled.tokens // capabilities.block_size_tokens)
            live.kv_bytes = blocks * capabilities.kv_block_bytes
            transfers.append(
                KvTransferReport(
                    request_id=live.request.request_id,
                    from_worker_id=live.request.kv.worker_id,
                    blocks=blocks,
                    data_bytes=live.kv_bytes,
                    start_unix_ns=pulled.start_ns,
                    end_unix_ns=pulled.end_ns,
                    prompt_tokens=live.request.prompt_tokens,
                    prompt_tokens_computed=live.prompt_tokens_computed,
                )
            )
        return tuple(transfers)


def _step(report: Report | None) -> StepReport | None:
    step = report.step if report is not None else None
    if report is None or step is None:
        return None
    return StepReport(
        start_unix_ns=step.start_ns,
        end_unix_ns=step.end_ns,
        prefill_tokens=step.prefill_tokens,
        prefill_sequences=step.prefill_sequences,
        prefill_context_tokens=step.prefill_context_tokens,
        decode_sequences=step.decode_sequences,
        decode_kv_tokens=step.decode_kv_tokens,
        waiting=report.waiting,
        waiting_prefill_tokens=report.waiting_prefill_tokens,
        prefill_squared_tokens=step.prefill_squared_tokens,
    )
