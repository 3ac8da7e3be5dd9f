"""A worker that follows a test's script, behind real gRPC.

Its tokens depend only on their position, so a choice's text shows whether a token was lost or repeated, whichever
worker served it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from string import ascii_lowercase
from typing import Any

import grpc.aio

from libs.contracts.packing import pack_f32, pack_u32, unpack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.roles import role_from_name
from libs.runtime.net.rpc import make_server
from libs.runtime.settings import CommonSettings
from libs.worker.gateways import BEAT_S

_incarnations = count(1)


def expected_text(tokens: int, start: int = 0) -> str:
    """Return the answer of a scripted worker: "abcdef..."."""
    return "".join(ascii_lowercase[place % 26] for place in range(start, start + tokens))


@dataclass(frozen=True, slots=True)
class Plan:
    """The handling of one submit: send `tokens` (None for all that are requested), then end it in some way."""

    tokens: int | None = None
    refuse: pb.RefusalCode | None = None
    fail: pb.FailureCode | None = None
    abort: bool = False
    """True to end with FINISH_REASON_ABORTED, without a request for it."""
    cut: bool = False
    """True to break the stream."""
    hang: bool = False
    """True to send nothing more."""
    leaves: bool = False
    """True to become a prefill worker after `tokens` and offer the sequence for hand-over. If nobody takes it, it ends
    with `finish_leaving`.
    """
    opens: bool = False
    """True to offer a prompt's blocks first, and go on once `gate` is set."""


VECTOR = pack_f32([3.0, 4.0])
"""The vector of every prompt for which one is requested."""


@dataclass
class ScriptedWorker:
    """A worker that accepts everything. It uses up `plans` in order, and then serves every submit normally."""

    worker: common.Worker
    prefill_credits: int
    decode_credits: int
    plans: deque[Plan] = field(default_factory=deque)
    fails: Callable[[pb.Submit], bool] = lambda _: False
    """Return whether the engine fails at this submit, whatever the plans are."""
    dies: Callable[[pb.Submit], bool] = lambda _: False
    """Return whether this submit kills the worker: its connections break, and its address refuses others."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[pb.Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    demands: list[pb.Demand] = field(default_factory=list)
    proceeds: list[pb.Proceed] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Held prompts continue while this event is set. It is set initially."""
    in_step: bool = False
    """True during a step; sequences that are handed over meanwhile leave with `end_step`."""
    voice: asyncio.Event = field(default_factory=asyncio.Event)
    """The worker sends nothing while this is not set; it is set at first."""
    streams: int = 0
    """The number of gateways that have attached so far."""
    hand_overs: list[int] = field(default_factory=list)
    pulled: list[bytes] = field(default_factory=list)
    """The handles of accepted submits, which it may have begun to read."""
    epochs: list[int] = field(default_factory=list)
    """The epochs by which gateways have reported to route."""
    script: list[int] = field(default_factory=list)
    """Token ids by position, in place of the usual ones; the output ends after them."""
    pools: bool = True
    """False for a worker of an earlier release, which samples a token where a vector is requested."""
    stops: bool = False
    """True if answers end with a stop token, rather than at their length."""
    _streamed: dict[int, pb.Submit] = field(default_factory=dict)
    _leaving: dict[int, pb.Submit] = field(default_factory=dict)
    _outboxes: list["asyncio.Queue[pb.WorkerFrame | None]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self.voice.set()

    def assign(self, role: str) -> None:
        """Change the role as a planner would, and send it to the gateways."""
        number, budget_tokens = role_from_name(role, 64)
        self.worker.assignment.role = number
        self.worker.assignment.budget_tokens = budget_tokens
        self.worker.assignment.epoch += 1
        self.send(pb.WorkerFrame(worker=self.worker))

    def send(self, frame: pb.WorkerFrame) -> None:
        """Send a frame to every gateway."""
        for outbox in self._outboxes:
            outbox.put_nowait(frame)

    def cut(self) -> None:
        """Break every stream."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    async def serve(self, context: Any) -> None:
        """Serve one gateway's stream."""
        outbox: asyncio.Queue[pb.WorkerFrame | None] = asyncio.Queue()
        self._outboxes.append(outbox)
        self.streams += 1
        credit = pb.Credit(prefill_grant=self.prefill_credits, decode_grant=self.decode_credits)
        outbox.put_nowait(pb.WorkerFrame(worker=self.worker, credit=credit))
        tasks = [asyncio.create_task(self._read(context, outbox)), asyncio.create_task(_beat(outbox))]
        try:
            while (frame := await outbox.get()) is not None:
                await self.voice.wait()
                await context.write(frame)
        finally:
            self._outboxes.remove(outbox)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")

    async def _read(self, context: Any, outbox: "asyncio.Queue[pb.WorkerFrame | None]") -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            self.aborts += unpack_u32(frame.aborts)
            self.epochs += [frame.epoch] if frame.epoch else []
            for number in unpack_u32(frame.hand_overs):
                self._hand_over(number, outbox)
            if frame.HasField("demand"):
                self.demands.append(frame.demand)
            for submit in frame.submits:
                self.submits.append(submit)
                if self.dies(submit):
                    self.dead.set()
                    return
                plan = self.plans.popleft() if self.plans else Plan()
                if self.fails(submit):
                    plan = Plan(tokens=0, fail=pb.FAILURE_CODE_ENGINE)
                if plan.opens:
                    event = pb.SequenceEvent(sequence=submit.sequence)
                    event.kv_opened.kv.CopyFrom(self._source(submit, streamed=True))
                    outbox.put_nowait(pb.WorkerFrame(events=[event]))
                    await self.gate.wait()
                if submit.kv.named:  # the first token comes with the blocks
                    start = len(unpack_u32(submit.token_ids)) - submit.prompt_tokens
                    submit.token_ids += pack_u32(list(expected_text(1, start).encode()))
                if submit.kv.streamed and not submit.kv.named and plan == Plan():
                    self._streamed[submit.sequence] = submit
                else:
                    self._act(submit, plan, outbox)
            for proceed in frame.proceeds:
                self.proceeds.append(proceed)
                held = self._streamed.pop(proceed.sequence, None)
                if held is not None:
                    held.token_ids += proceed.token_ids
                    self._act(held, Plan(), outbox)
        outbox.put_nowait(None)

    def _hand_over(self, number: int, outbox: "asyncio.Queue[pb.WorkerFrame | None]") -> None:
        self.hand_overs.append(number)
        if number in self._leaving and not self.in_step:
            outbox.put_nowait(self._moved(number))

    def _moved(self, number: int) -> pb.WorkerFrame:
        event = pb.SequenceEvent(sequence=number)
        event.moved.kv.CopyFrom(self._source(self._leaving.pop(number), streamed=False))
        return pb.WorkerFrame(events=[event])

    def leave_again(self, role: str) -> None:
        """Change to a role without decode, and offer the KV of each running decode again, as a worker does."""
        self.assign(role)
        self.send(
            pb.WorkerFrame(events=[pb.SequenceEvent(sequence=each, leaving=pb.Leaving()) for each in self._leaving])
        )

    def end_step(self) -> None:
        """End the step, after which sequences that were handed over leave."""
        self.in_step = False
        for number in self._leaving.keys() & set(self.hand_overs):
            self.send(self._moved(number))

    def finish_leaving(self) -> None:
        """Finish the sequences that no other worker took."""
        for submit in self._leaving.values():
            for outbox in self._outboxes:
                self._act(submit, Plan(), outbox)
        self._leaving.clear()

    def _act(self, submit: pb.Submit, plan: Plan, outbox: "asyncio.Queue[pb.WorkerFrame | None]") -> None:
        frame = pb.WorkerFrame()
        used = pb.Credit(prefill_grant=1) if submit.phase == pb.PHASE_PREFILL else pb.Credit(decode_grant=1)
        event = pb.SequenceEvent(sequence=submit.sequence)
        if plan.refuse is not None:
            event.refused.code = plan.refuse
            event.refused.detail = "by plan"
        else:
            if submit.phase == pb.PHASE_DECODE:
                self.pulled.append(submit.kv.handle)
            start = len(unpack_u32(submit.token_ids)) - submit.prompt_tokens
            count = 1 if submit.phase == pb.PHASE_PREFILL else submit.max_output_tokens - start
            if self.script:
                count = min(count, len(self.script) - start)
            tokens = count if plan.tokens is None else plan.tokens
            if submit.pooling and self.pools:
                tokens = 0
            frame.token_sequences = pack_u32([submit.sequence] * tokens)
            usual = expected_text(tokens, start).encode()
            frame.token_ids = pack_u32(self.script[start : start + tokens] or list(usual))
            self._conclude(submit, plan, event)
            if plan.leaves:
                self.assign("prefill")
                submit.token_ids += frame.token_ids
                self._leaving[submit.sequence] = submit
        if event.WhichOneof("event"):
            frame.events.append(event)
            frame.credit.CopyFrom(used)
        outbox.put_nowait(frame)
        if plan.cut:
            outbox.put_nowait(None)

    def _source(self, submit: pb.Submit, *, streamed: bool) -> pb.KvSource:
        handle = f"blocks of {submit.request_id} as {submit.sequence} at {self.worker.id}".encode()
        return pb.KvSource(
            worker_id=self.worker.id, address=self.worker.address, handle=handle, blocks=1, streamed=streamed
        )

    def _conclude(self, submit: pb.Submit, plan: Plan, event: pb.SequenceEvent) -> None:
        if plan.fail is not None:
            event.failed.code = plan.fail
        elif plan.abort:
            event.finished.reason = pb.FINISH_REASON_ABORTED
        elif plan.leaves:
            event.leaving.CopyFrom(pb.Leaving())
        elif plan.hang or plan.cut:
            return
        elif submit.pooling and self.pools:
            event.finished.CopyFrom(pb.Finished(reason=pb.FINISH_REASON_STOP, pooled=VECTOR))
        elif submit.phase == pb.PHASE_PREFILL:
            kv = self._source(submit, streamed=False)
            event.prefilled.CopyFrom(pb.Prefilled(kv=kv, computed_tokens=submit.prompt_tokens))
        else:
            event.finished.reason = pb.FINISH_REASON_STOP if self.stops else pb.FINISH_REASON_LENGTH


async def _die(worker: ScriptedWorker, server: grpc.aio.Server) -> None:
    await worker.dead.wait()
    await server.stop(None)


async def _beat(outbox: "asyncio.Queue[pb.WorkerFrame | None]") -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        outbox.put_nowait(pb.WorkerFrame())


class _Servicer(pb_grpc.WorkerServiceServicer):
    def __init__(self, serve: Callable[[Any], Any]) -> None:
        self._serve = serve

    async def Serve(self, _frames: Any, context: Any) -> None:  # noqa: N802 - the service's name in proto
        assert (await context.read()).HasField("hello")
        await self._serve(context)


@asynccontextmanager
async def scripted_worker(
    worker_id: str,
    role: str,
    *,
    slots: int = 4,
    plans: tuple[Plan, ...] = (),
    kv_layout: str = "scripted",
    kv_once: bool = False,
    named_kv: bool = False,
) -> AsyncIterator[ScriptedWorker]:
    """Run a worker on loopback for model "sim"; leaving the context kills it."""
    number, budget_tokens = role_from_name(role, 64)
    server, port = make_server(CommonSettings(), "127.0.0.1:0")
    worker = common.Worker(
        id=worker_id,
        incarnation=next(_incarnations),
        address=f"127.0.0.1:{port}",
        assignment=common.Assignment(model="sim", role=number, budget_tokens=budget_tokens, epoch=1),
        capabilities=common.Capabilities(
            block_size_tokens=16,
            max_context_tokens=8192,
            kv_layout=kv_layout,
            streams_kv=True,
            kv_once=kv_once,
            named_kv=named_kv,
            chunk_tokens=64 if named_kv else 0,
        ),
        state=common.WORKER_STATE_READY,
    )
    prefills = slots if role == "prefill" else 0
    scripted = ScriptedWorker(worker, prefills, slots - prefills, deque(plans))
    pb_grpc.add_WorkerServiceServicer_to_server(_Servicer(scripted.serve), server)  # type: ignore[no-untyped-call]
    await server.start()
    dying = asyncio.create_task(_die(scripted, server))
    try:
        yield scripted
    finally:
        dying.cancel()
        await server.stop(None)
