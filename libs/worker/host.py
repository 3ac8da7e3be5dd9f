"""The worker host, between the streams of gateways and one engine: admission, sequences, and the drain.

It does no I/O and is synchronous except where it waits. Its decisions are in libs/policy.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import assert_never

import structlog

from libs.contracts.errors import InvalidRequest, QueueFull, StaleRole
from libs.contracts.hashing import chain_root
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import Engine, EngineRequest
from libs.engine.reports import EngineEvent, FinishReason, SequenceOutput
from libs.policy.roles import Refusal
from libs.policy.worker.assignment import Invalid, LatestLead, WorkerReadiness, invalid, refusal
from libs.policy.worker.credits import PromptLength, SlotFacts, engine_budget, role_budget, slots
from libs.policy.worker.saturation import trial_work
from libs.runtime.clock import Clock
from libs.worker.gateways import AttachedGateway, AttachedGateways, WorkerSpeed
from libs.worker.roles import AssignmentState, HandOverCosts, HostedSequence, LastChange, refuse_stale_lead
from libs.worker.wire import engine_request, numbers, sequence_event, sequence_of

log = structlog.get_logger()

_CODES = {
    Refusal.STALE_ROLE: pb.REFUSAL_CODE_STALE_ROLE,
    Refusal.NO_CAPACITY: pb.REFUSAL_CODE_NO_CAPACITY,
    Refusal.DRAINING: pb.REFUSAL_CODE_DRAINING,
    Refusal.INVALID: pb.REFUSAL_CODE_INVALID,
    Refusal.KV_MISMATCH: pb.REFUSAL_CODE_KV_MISMATCH,
}


def admit(
    submit: pb.Submit,
    *,
    assignment: AssignmentState,
    has_credit: bool,
    sequence_id: int,
    model_revision: str,
    kv_layout: str,
    adapters: Collection[str] = (),
    loads_adapters: bool = False,
) -> EngineRequest | pb.Refused:
    """Return the engine's request for `submit`, or the refusal.

    With `loads_adapters`, the engine also loads adapters beyond `adapters` if a sequence names their folder.
    """
    model = assignment.current.model
    wrong = invalid(
        submit.phase,
        submit.model,
        submit.adapter,
        worker_model=model,
        adapters=adapters,
        loadable=loads_adapters and bool(submit.adapter_source),
    )
    if wrong is not None:
        return refusal_message(Refusal.INVALID, _invalid_detail(wrong, model, submit))
    root = chain_root(
        model_revision=model_revision,
        kv_layout=kv_layout,
        adapter=submit.adapter,
        tenant_salt=submit.context.cache_salt or submit.context.tenant,
    )
    try:
        request = engine_request(submit, sequence_id, root)
    except InvalidRequest as error:
        return refusal_message(Refusal.INVALID, error.message)
    blocks_layout = request.kv.kv_layout if request.kv else None
    code = refusal(
        submit.phase,
        blocks_layout,
        WorkerReadiness(assignment.current, assignment.draining, kv_layout, has_credit),
    )
    return request if code is None else refusal_message(code, _detail(code, blocks_layout, kv_layout))


def refusal_message(code: Refusal, detail: str) -> pb.Refused:
    return pb.Refused(code=_CODES[code], detail=detail)


def _invalid_detail(wrong: Invalid, model: str, submit: pb.Submit) -> str:
    match wrong:
        case Invalid.PHASE_MISSING:
            return "phase is missing"
        case Invalid.OTHER_MODEL:
            return f"this worker has model {model!r}"
        case Invalid.ADAPTER:
            why = ": its engine loads none while it runs" if submit.adapter_source else ""
            return f"this worker has no adapter {submit.adapter!r}{why}: name it in FULCRUM_WORKER_ADAPTERS"
        case _:
            assert_never(wrong)


def _detail(code: Refusal, blocks_layout: str | None, kv_layout: str) -> str:
    if code is Refusal.KV_MISMATCH:
        return f"the blocks have KV layout {blocks_layout!r}, this engine has {kv_layout!r}"
    if code is Refusal.NO_CAPACITY:
        return "no credit was held"
    return "the phase does not fit the worker's assignment"


_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class WorkerHost:
    """A host that passes gateways' work to the engine and its output back, within credits and the assignment."""

    def __init__(
        self,
        *,
        engine: Engine,
        identity: common.Worker,
        assignment: AssignmentState,
        cluster: str,
        clock: Clock,
        adapters: Collection[str] = (),
    ) -> None:
        """Create the host. `adapters` contains the names that sequences may use."""
        self.engine = engine
        self._adapters = adapters
        self.speed = WorkerSpeed(engine, identity.gpus)
        self.assignment = assignment
        self.hand_over_costs = HandOverCosts(engine.capabilities)
        self.last_change = LastChange()
        self._clock = clock
        self._identity = identity
        self.gateways = AttachedGateways(engine, self.speed, cluster, self.worker)
        self._lead = LatestLead()
        self._sequences: dict[int, HostedSequence] = {}
        self._budget = 0
        """The prompt budget that the engine has."""
        self._role_budget = 0
        """The role's prompt budget. It may be below the engine's while prompts admitted under a larger budget remain.
        """
        self._prompts = PromptLength()
        self._left_ns = 0
        """The time at which the worker left a decoding role, in Unix nanoseconds; 0 while its role decodes."""
        self._progress = asyncio.Event()
        self._observers: list[Callable[[], None]] = []
        self._apply_assignment()

    # ------------------------------------------------------------ description

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call `observer` whenever the result of `worker()` changes."""
        self._observers.append(observer)

    def worker(self) -> common.Worker:
        worker = common.Worker()
        worker.CopyFrom(self._identity)
        worker.assignment.CopyFrom(self.assignment.message)
        worker.state = common.WORKER_STATE_DRAINING if self.assignment.draining else common.WORKER_STATE_READY
        if self.last_change.message is not None:
            worker.role_change.CopyFrom(self.last_change.message)
        return worker

    def integrity(self) -> pb.Integrity:
        """Return the counters that are zero when nothing runs and no gateway is attached."""
        integrity = self.engine.integrity()
        return pb.Integrity(
            live_sequences=max(integrity.live_sequences, len(self._sequences)),
            referenced_blocks=integrity.referenced_blocks,
            leased_handles=integrity.leased_handles,
            attached_gateways=len(self.gateways),
            pool_faults=integrity.pool_faults,
        )

    def set_role(self, request: pb.SetRoleRequest) -> common.Assignment:
        """Change the assignment. Raise StaleRole or InvalidRequest.

        Running decodes continue until another worker has room for them, or to their natural end.
        """
        if request.incarnation and request.incarnation != self._identity.incarnation:
            raise StaleRole("the worker has been restarted since: check its state, then try again")
        refuse_stale_lead(self._lead, request.lead_term)
        assignment = self.assignment.set_role(
            expected_epoch=request.expected_epoch,
            role=request.role,
            budget_tokens=request.budget_tokens,
            model=request.model,
        )
        self.last_change.took(assignment, request, self._clock.now_ns())
        self._apply_assignment()
        return assignment

    def start_draining(self) -> None:
        """Refuse further work, notify gateways and recall credits. Idempotent."""
        if not self.assignment.draining:
            self.assignment.draining = True
            self._apply_assignment()

    def _apply_assignment(self) -> None:
        self._resize()
        self._apply_budget()
        self.gateways.send_assignment()
        leaves = self.assignment.leaves_decode
        self._left_ns = (self._left_ns or self._clock.now_ns()) if leaves else 0
        for sequence in self._sequences.values():
            sequence.weighed = False
            self._weigh(sequence)
        self.gateways.settle()
        for observer in self._observers:
            observer()

    def _resize(self) -> None:
        """Set the number of credits to the sequences that the role can run at once."""
        speed, decoding = self.speed.speed, self.gateways.credits.decode.in_use
        step_s = max(speed.step_time.prefill_ns(trial_work(speed.chunk_tokens)), 1.0) / 1e9
        most = self.engine.capabilities.max_sequences
        facts = SlotFacts(most, self._prompts.mean_tokens, speed.chunk_tokens, step_s, decoding)
        prefill, decode = (0, 0) if self.assignment.draining else slots(self.assignment.current.role, facts)
        self.gateways.credits.resize(prefill, decode)

    def _apply_budget(self) -> None:
        self._role_budget = role_budget(self.assignment.current)
        budget = engine_budget(self._role_budget, self._sequences.values())
        if budget != self._budget:
            self._budget = budget
            self.engine.set_prefill_budget(budget)

    def chunked(self, tokens: int) -> None:
        """Limit steps to `tokens` prompt tokens, report the limit to gateways, and adjust the credits."""
        self.speed.chunked(tokens)
        self._resize()
        self.gateways.settle()

    # ------------------------------------------------------------ gateways

    def detach(self, gateway: AttachedGateway) -> None:
        self.gateways.detach(gateway)
        for sequence_id in gateway.living:
            self.engine.abort(sequence_id)
        for opaque in gateway.drop_all():  # only a worker named by this gateway could still pull them
            self.engine.abandon(opaque)
        self._progress.set()
        self.gateways.settle()

    def receive(self, gateway: AttachedGateway, frame: pb.GatewayFrame) -> None:
        """Process a gateway's frame. Raise InvalidRequest if it breaks the protocol; a bad submit is only refused."""
        self.gateways.returned(gateway, frame)
        if frame.submits and not gateway.living:
            self.gateways.begin_work(gateway)
        for submit in frame.submits:
            gateway.submits += 1
            self._submit(gateway, submit)
        for proceed in frame.proceeds:
            self._proceed(gateway, proceed)
        for sequence_id in map(gateway.sequence_id, numbers(frame.hand_overs, "hand_overs")):
            if sequence_id in gateway.living:
                self._hand_over(sequence_id)
        self._abort(gateway, frame.aborts)
        if frame.epoch:
            self.gateways.report_epoch(gateway, frame.epoch)
        self.gateways.close_if_unread(gateway)
        self.gateways.settle()

    def refresh_load(self) -> None:
        """Send changed loads to gateways, and check the drain again, since the end of a KV lease raises no event."""
        self._progress.set()
        self.gateways.send_load()

    # ------------------------------------------------------------ sequences

    def _submit(self, gateway: AttachedGateway, submit: pb.Submit) -> None:
        sequence_id = gateway.sequence_id(submit.sequence)
        if sequence_id in gateway.living:
            raise InvalidRequest(f"sequence {submit.sequence} already runs")
        # The gateway reuses the number. A later abort must not release the blocks of the earlier sequence.
        gateway.drop(sequence_id)
        pool = self.gateways.pool(submit.phase)
        has_credit = pool.use(gateway.id)
        refused = self._start(gateway, submit, has_credit=has_credit)
        if refused is not None:
            if has_credit:
                pool.free()
            refused.epoch = self.assignment.current.epoch
            self._send_event(gateway, pb.SequenceEvent(sequence=submit.sequence, refused=refused))

    def _start(self, gateway: AttachedGateway, submit: pb.Submit, *, has_credit: bool) -> pb.Refused | None:
        """Submit a sequence to the engine. Return the refusal if it is not accepted."""
        request = admit(
            submit,
            assignment=self.assignment,
            has_credit=has_credit,
            sequence_id=gateway.sequence_id(submit.sequence),
            model_revision=self._identity.model_revision,
            kv_layout=self.engine.capabilities.kv_layout,
            adapters=self._adapters,
            loads_adapters=self.engine.capabilities.loads_adapters,
        )
        if isinstance(request, pb.Refused):
            return request
        try:
            self.engine.submit(request)
        except InvalidRequest as error:
            return refusal_message(Refusal.INVALID, error.message)
        except QueueFull as error:
            return refusal_message(Refusal.NO_CAPACITY, error.message)
        self._sequences[request.sequence_id] = HostedSequence(gateway, submit.phase, request, self._role_budget)
        gateway.living.add(request.sequence_id)
        if submit.phase == pb.PHASE_PREFILL:
            self._prompts.came(submit.prompt_tokens)
            self._resize()
        return None

    def _proceed(self, gateway: AttachedGateway, proceed: pb.Proceed) -> None:
        sequence_id = gateway.sequence_id(proceed.sequence)
        if sequence_id not in gateway.living:
            return  # it has ended, but the gateway has not received its end yet
        self.engine.proceed(sequence_id, tuple(numbers(proceed.token_ids, "token_ids")))

    def _send_event(self, gateway: AttachedGateway, event: pb.SequenceEvent) -> None:
        gateway.outbox.add_event(event)
        gateway.wake.set()

    def _abort(self, gateway: AttachedGateway, packed: bytes) -> None:
        for sequence_id in map(gateway.sequence_id, numbers(packed, "aborts")):
            if sequence_id in gateway.living:
                self.engine.abort(sequence_id)
            elif (opaque := gateway.drop(sequence_id)) is not None:
                self.release(opaque)

    def acknowledged(self, opaque: bytes) -> None:
        """Free the blocks behind a KV handle, which their receiver has acknowledged."""
        self.hand_over_costs.taken_over(opaque, self._clock.now_ns())
        self.release(opaque)

    def release(self, opaque: bytes) -> None:
        """Free the blocks behind a KV handle that is no longer needed."""
        self.engine.release(opaque)
        self._progress.set()

    def on_event(self, event: EngineEvent) -> None:
        """Pass an engine event on to the gateways of its sequences."""
        self.hand_over_costs.stepped(event)
        self.last_change.stepped(event)
        ended, leaves = False, self.assignment.leaves_decode
        for output in event.outputs:
            sequence = self._sequences.get(output.sequence_id)
            if sequence is not None:
                sequence.new_tokens += len(output.token_ids)
                if output.finish is not None:
                    ended = True
                    self._end(sequence, output)
                if not sequence.gateway.closed.is_set():
                    self._deliver(sequence, output)
                    if leaves and output.only_tokens:
                        self._weigh(sequence)
        if self._budget != self._role_budget:
            self._apply_budget()
        if ended:
            self._resize()
            self.gateways.settle()
            self._progress.set()
        for gateway in self.gateways:
            self.gateways.close_if_unread(gateway)

    def _deliver(self, sequence: HostedSequence, output: SequenceOutput) -> None:
        gateway = sequence.gateway
        gateway.outbox.add_tokens(output)
        if not output.pulling:  # a pull is not urgent, so it is sent with the next frame
            gateway.wake.set()
        if output.only_tokens:
            return
        event = sequence_event(output)
        if event is not None:
            if event.HasField("finished"):
                event.finished.output_tokens = sequence.output_tokens
            gateway.outbox.add_event(event)

    def _weigh(self, sequence: HostedSequence) -> None:
        """Offer a running sequence to its gateway for a hand-over, if its role was left and the hand-over pays."""
        if not self.assignment.leaves_decode:
            return
        waited_s = (self._clock.now_ns() - self._left_ns) / 1e9
        if self.hand_over_costs.worth(sequence, self.speed.speed, waited_s):
            number = sequence_of(sequence.request.sequence_id)
            self._send_event(sequence.gateway, pb.SequenceEvent(sequence=number, leaving=pb.Leaving()))

    def _hand_over(self, sequence_id: int) -> None:
        """Move a sequence to the slot reserved on another worker, with its KV if the engine supports that."""
        if self.engine.capabilities.hands_over_running_kv:
            self.engine.hand_over(sequence_id)
        elif self._sequences[sequence_id].decodes:
            self.engine.abort(sequence_id)

    def _end(self, sequence: HostedSequence, output: SequenceOutput) -> None:
        del self._sequences[output.sequence_id]
        sequence.gateway.living.discard(output.sequence_id)
        self.gateways.pool(sequence.phase).free()
        if output.finish in _ENDED and not output.pooled:
            self.hand_over_costs.ended(sequence.output_tokens)
        if output.handle is not None:
            if output.finish is FinishReason.HANDED_OVER:
                self.hand_over_costs.handed_over(output.handle, self._clock.now_ns())
            if sequence.gateway.closed.is_set():
                self.release(output.handle.opaque)  # no gateway is left that could have the blocks pulled
            else:
                sequence.gateway.hold(output.sequence_id, output.handle.opaque)

    # ----------------------------------------------------------- draining

    @property
    def running(self) -> int:
        """The number of sequences in the engine, including waiting ones."""
        return len(self._sequences)

    async def wait_idle(self) -> None:
        """Wait until no sequence runs and no KV handle waits for its receiver."""
        while self._sequences or self.engine.integrity().leased_handles:
            self._progress.clear()
            await self._progress.wait()

    async def wait_empty(self) -> None:
        while self._sequences:
            self._progress.clear()
            await self._progress.wait()

    def abort_all(self) -> int:
        """Abort every sequence, and return their number."""
        for sequence_id in self._sequences:
            self.engine.abort(sequence_id)
        return len(self._sequences)


async def pump(engine: Engine, listeners: Iterable[Callable[[EngineEvent], None]]) -> None:
    """Pass every event of an engine to each listener. Raise RuntimeError once the engine ends."""
    async for event in engine.events():
        for listener in listeners:
            listener(event)
    raise RuntimeError("the engine has ended")


# The upper bound of the wait for aborted sequences to leave the engine.
ABORT_S = 2.0


@dataclass(frozen=True, slots=True)
class Drained:
    """The outcome for the sequences that ran when the drain began."""

    finished: int
    aborted: int


async def drain(host: WorkerHost, deadline_s: float) -> Drained:
    """Refuse new work, let sequences finish and held KV be pulled, then abort the rest at the deadline.

    Gateways are notified first, so that they can reroute in the meantime. The call returns after at most `deadline_s`
    plus `ABORT_S`.
    """
    running = host.running
    host.start_draining()
    try:
        async with asyncio.timeout(deadline_s):
            await host.wait_idle()
    except TimeoutError:
        log.warning("drain deadline reached", running=host.running)
    aborted = host.abort_all()
    try:
        async with asyncio.timeout(ABORT_S):
            await host.wait_empty()
    except TimeoutError:
        log.warning("engine still holds aborted sequences", running=host.running)
    return Drained(finished=max(running - aborted, 0), aborted=aborted)
