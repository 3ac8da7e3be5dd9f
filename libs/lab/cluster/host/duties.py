"""A worker's role with its credits and prompt budget, the sequences that leave the worker, and its outbox."""

from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.dispatch.generation import ApiFinishReason as Ended
from libs.dispatch.ports import (
    AttemptEvent,
    Failed,
    HandOverWanted,
    KvOpened,
    Prefilled,
    QueuedDemand,
    SequenceFinished,
    SequenceHandedOver,
    SequenceRefused,
)
from libs.engine.kv_port import KvHandle
from libs.engine.port import EnginePhase
from libs.engine.reports import FinishReason, SequenceOutput
from libs.lab.cluster.host.device import Device
from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.sequence import PHASES, CountedRequest, ToWorker
from libs.policy.gateway.placement import Blocks
from libs.policy.roles import Assignment, Refusal, Role
from libs.policy.step_time import StepTimeModel
from libs.policy.worker import assignment as assignments
from libs.policy.worker.assignment import HandOverTime, Staying, sooner_handed_over
from libs.policy.worker.credits import (
    CreditPool,
    Credits,
    GatewayDemand,
    PromptLength,
    SlotFacts,
    engine_budget,
    role_budget,
    slots,
)
from libs.policy.worker.saturation import trial_work


class LabOutbox:
    """The changes of one worker since its last frame."""

    def __init__(self, worker_id: str, shape: WorkerShape) -> None:
        self._worker_id = worker_id
        self._kv_kind = shape.kv_kind
        self.restart()

    def restart(self) -> None:
        """Reset to the full report of a new process."""
        self.tokens: list[int] = []
        self.events: list[AttemptEvent] = []
        self.load = False
        self.assignment = True
        self.speed = True

    @property
    def due(self) -> bool:
        """Return whether there is anything beyond a new speed, which can wait for the next frame."""
        return bool(self.tokens or self.events or self.load or self.assignment)

    def sent(self) -> None:
        """Clear everything that was sent in a frame."""
        self.tokens, self.events = [], []
        self.load = self.assignment = self.speed = False

    def add(self, output: SequenceOutput) -> None:
        self.tokens.extend(output.sequence_id for _ in output.token_ids)
        if not output.only_tokens and (event := self._event(output)) is not None:
            self.events.append(event)

    def _event(self, output: SequenceOutput) -> AttemptEvent | None:
        sequence_id, finish = output.sequence_id, output.finish
        if output.streamed_handle is not None:
            return KvOpened(sequence_id, self._blocks(output.streamed_handle))
        if finish is FinishReason.STOP or finish is FinishReason.LENGTH:
            return SequenceFinished(sequence_id, Ended(finish.value), output.cached_tokens)
        if finish is FinishReason.PREFILLED and output.handle is not None:
            return Prefilled(sequence_id, self._blocks(output.handle), output.cached_tokens)
        if finish is FinishReason.HANDED_OVER and output.handle is not None:
            return SequenceHandedOver(sequence_id, self._blocks(output.handle), output.cached_tokens)
        if finish in (FinishReason.KV_LOST, FinishReason.FAILED):
            return Failed(sequence_id, finish.value, output.detail, blocks_lost=finish is FinishReason.KV_LOST)
        return None

    def _blocks(self, handle: KvHandle) -> Blocks:
        return Blocks(handle, self._worker_id, self._kv_kind, once=False)


GATEWAY: Final = 1
"""The number of the only gateway in a worker's credits."""


@dataclass(slots=True)
class LabSequence:
    """A sequence on a worker with its progress."""

    request: CountedRequest
    budget_tokens: int = 0
    """The role's prompt budget when the sequence was accepted."""
    new_tokens: int = 0
    """Output tokens produced since the sequence arrived at this worker."""
    weighed: bool = False
    """True if moving the sequence has been considered under the present role."""

    @property
    def tokens(self) -> int:
        """The tokens of the prompt and the output so far."""
        return len(self.request.token_ids) + self.new_tokens

    @property
    def most_tokens_left(self) -> int:
        """The maximum number of output tokens still to come."""
        return self.request.max_output_tokens - (self.tokens - self.request.prompt_tokens)

    @property
    def yields(self) -> bool:
        """Return whether the sequence's prompt gives way to others that can be computed."""
        return self.request.yields

    @property
    def awaits_prompt(self) -> bool:
        """Return whether the sequence's prompt is computed here and is still incomplete."""
        return self.request.phase is not EnginePhase.DECODE and not self.new_tokens

    @property
    def decodes(self) -> bool:
        """Return whether the sequence is past its prompt and continues here token by token."""
        return self.request.phase is not EnginePhase.PREFILL and self.new_tokens > 0


class Duties:
    """The assignment, credits and sequences of one worker."""

    def __init__(self, shape: WorkerShape, assignment: Assignment, device: Device, outbox: LabOutbox) -> None:
        self.assignment = assignment
        self.draining = False
        self.credits = Credits()
        self.hosted: dict[int, LabSequence] = {}
        self.left: dict[int, bytes] = {}
        """KV handles of departed sequences by sequence id."""
        self._shape = shape
        self._step_s = _chunk_s(shape.step_time, shape.chunk_tokens)
        self._device = device
        self._outbox = outbox
        self._prompts = PromptLength()
        self._waiting = GatewayDemand("gateway")
        # Without the time of a step, which comes from the device.
        self._staying = Staying()
        self._hand_over_time = HandOverTime()
        self._sealed: dict[bytes, tuple[int, int]] = {}
        """Pairs (bytes, time) by handle of sequences that are moving."""
        self._budget = self._role_budget = 0
        self._unsettled = True
        """True if credits have changed hands or may do so."""

    # ------------------------------------------------------------ the role

    def taken(self, role: Role, budget_tokens: int) -> Assignment | None:
        """Return the assignment that a change of role would lead to, or None if it is refused."""
        wanted = assignments.WantedAssignment(role, budget_tokens, self.assignment.epoch)
        taken = assignments.next_assignment(self.assignment, wanted, draining=self.draining)
        return None if isinstance(taken, assignments.AssignmentRefusal) else taken

    def take(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.apply()

    def begin_as(self, role: Role, budget_tokens: int) -> None:
        """Assume the role of a process that is being started; it drains until then."""
        self.draining = True
        self.assignment = Assignment(self._shape.model, role, budget_tokens, self.assignment.epoch + 1)
        self.apply()

    def attach(self) -> None:
        self.credits.attach(GATEWAY)

    def apply(self) -> None:
        """Apply the role to slots, budget and running sequences."""
        self._resize()
        self._apply_budget()
        self._outbox.assignment = True
        for hosted in self.hosted.values():
            hosted.weighed = False
            self._weigh(hosted)

    def _resize(self) -> None:
        facts = SlotFacts(
            self._shape.max_sequences,
            self._prompts.mean_tokens,
            self._shape.chunk_tokens,
            self._step_s,
            self.credits.decode.in_use,
        )
        self._unsettled = True
        self.credits.resize(*((0, 0) if self.draining else slots(self.assignment.role, facts)))

    def _apply_budget(self) -> None:
        self._role_budget = role_budget(self.assignment)
        budget = engine_budget(self._role_budget, self.hosted.values())
        if budget != self._budget:
            self._budget = budget
            self._device.core.set_prefill_budget(budget)

    def _weigh(self, hosted: LabSequence) -> None:
        """Request another place for a decode that no longer fits the role, if a move ends sooner than the sequence."""
        leaves = assignments.leaves_decode(self.assignment, draining=self.draining)
        if not leaves or not hosted.decodes or hosted.weighed:
            return
        hosted.weighed = True
        kv_bytes = -(-hosted.tokens // self._shape.block_tokens) * self._shape.kv_block_bytes
        staying = replace(self._staying, tpot_s=self._device.recent.mean_s())
        if sooner_handed_over(hosted.most_tokens_left, kv_bytes, staying, self._hand_over_time):
            self._outbox.events.append(HandOverWanted(hosted.request.sequence_id))

    # ------------------------------------------------------------ credits

    def received(self, frame: ToWorker) -> None:
        """Record the gateway's queue and its returned and spent credits."""
        if frame.demand is not None:
            self._set_demand(frame.demand)
        pools, self._unsettled = self.credits, True
        pools.prefill.returned(GATEWAY, frame.returned_prefill)
        pools.decode.returned(GATEWAY, frame.returned_decode)
        pools.prefill.spent(GATEWAY, frame.spent_prefill)
        pools.decode.spent(GATEWAY, frame.spent_decode)

    def _set_demand(self, demand: QueuedDemand) -> None:
        waiting, _, deadline_ns = demand
        self._waiting = GatewayDemand(self._waiting.gateway_id, waiting, deadline_ns)

    def has_credit(self) -> bool:
        """Settle credits if needed, and return whether there are changes to report."""
        if self._unsettled:
            self._unsettled = False
            self.credits.settle({GATEWAY: self._waiting})
        return self.credits.has_news(GATEWAY)

    def _pool(self, phase: EnginePhase) -> CreditPool:
        return self.credits.prefill if phase is EnginePhase.PREFILL else self.credits.decode

    # ------------------------------------------------------------ sequences

    def submit(self, request: CountedRequest, now_ns: int) -> None:
        """Accept a sequence, or report its refusal."""
        pool = self._pool(request.phase)
        has_credit = pool.use(GATEWAY) if self._shape.credits else True
        refused = self._refusal(request, has_credit=has_credit)
        if refused is None:
            try:
                self._device.core.submit(request, now_ns)
            except (InvalidRequest, QueueFull) as error:
                refused = SequenceRefused(request.sequence_id, Refusal.INVALID, error.message)
        if refused is not None:
            if has_credit and self._shape.credits:
                pool.free()
            self._outbox.events.append(refused)
            return
        self.hosted[request.sequence_id] = LabSequence(request, self._role_budget)
        if request.phase is EnginePhase.PREFILL:
            self._prompts.came(request.prompt_tokens)
            self._resize()

    def _refusal(self, request: CountedRequest, *, has_credit: bool) -> SequenceRefused | None:
        code = assignments.role_refusal(self.assignment, PHASES[request.phase], draining=self.draining)
        if code is None and not has_credit:
            code = Refusal.NO_CAPACITY
        return None if code is None else SequenceRefused(request.sequence_id, code, code.name.lower())

    def record_outputs(self, outputs: tuple[SequenceOutput, ...], now_ns: int) -> None:
        """Count the outputs of sequences and add them to the next frame."""
        ended = False
        leaves = assignments.leaves_decode(self.assignment, draining=self.draining)
        for output in outputs:
            hosted = self.hosted.get(output.sequence_id)
            if hosted is None:
                continue
            hosted.new_tokens += len(output.token_ids)
            if output.finish is not None:
                ended = True
                self._end(hosted, output, now_ns)
            self._outbox.add(output)
            if leaves and output.only_tokens:
                self._weigh(hosted)
        if self._budget != self._role_budget:
            self._apply_budget()
        if ended:
            self._resize()

    def _end(self, hosted: LabSequence, output: SequenceOutput, now_ns: int) -> None:
        del self.hosted[output.sequence_id]
        if self._shape.credits:
            self._pool(hosted.request.phase).free()
        if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._staying = self._staying.ended(hosted.tokens - hosted.request.prompt_tokens)
        if output.handle is not None:
            if output.finish is FinishReason.HANDED_OVER:
                kv_bytes = output.handle.blocks * self._shape.kv_block_bytes
                self._sealed[output.handle.opaque] = kv_bytes, now_ns
            self.left[output.sequence_id] = output.handle.opaque

    def taken_over(self, opaque: bytes, now_ns: int) -> None:
        """Record that a handle's blocks were read. Its sequence may continue elsewhere."""
        kv_bytes, sealed_ns = self._sealed.pop(opaque, (0, 0))
        if kv_bytes:
            self._hand_over_time.observe(kv_bytes, max(now_ns - sealed_ns, 0) / 1e9)

    # ------------------------------------------------------------ the end of a process

    def give_up(self) -> None:
        """Drop all sequences, and reset the core's budget."""
        self.hosted.clear()
        self.left.clear()
        self._budget = -1

    def forget(self) -> None:
        """Reset credits and everything learned about requests and transfers."""
        self.credits = Credits()
        self._prompts, self._staying, self._hand_over_time = PromptLength(), Staying(), HandOverTime()
        self._waiting = GatewayDemand(self._waiting.gateway_id)
        self._sealed.clear()
        self._unsettled = True


def _chunk_s(step_time: StepTimeModel, chunk_tokens: int) -> float:
    """Return the seconds that a full prefill step takes."""
    return max(step_time.prefill_ns(trial_work(chunk_tokens)), 1.0) / 1e9
