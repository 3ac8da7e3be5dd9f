"""The roles of a worker: its sequences, its assignment and last change, and the costs of a hand-over.

All code is synchronous. libs/policy decides, and callers pass the time.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from libs.contracts.errors import FulcrumError, InvalidRequest, StaleLead, StaleRole
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Assignment, RoleChange
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SetRoleRequest
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineRequest
from libs.engine.reports import EngineEvent, StepReport
from libs.policy import roles
from libs.policy.newest import put_newest
from libs.policy.roles import MAX_BUDGET_TOKENS
from libs.policy.speed import Speed
from libs.policy.worker.assignment import (
    FIRST_EPOCH,
    AssignmentRefusal,
    HandOverTime,
    LatestLead,
    Staying,
    WantedAssignment,
    first_assignment,
    leaves_decode,
    next_assignment,
    sooner_handed_over,
    sooner_recomputed,
)
from libs.worker.gateways import AttachedGateway

PROMPT_PHASES = (pb.PHASE_PREFILL, pb.PHASE_BOTH)


@dataclass(slots=True)
class HostedSequence:
    """A gateway's sequence in the engine, with its progress."""

    gateway: AttachedGateway
    phase: pb.Phase
    request: EngineRequest
    budget_tokens: int = 0
    """The prompt budget when the sequence was admitted. The engine computes its prompt at least at that pace."""
    new_tokens: int = 0
    weighed: bool = False
    """True if a hand-over has been considered in the present role."""

    @property
    def tokens(self) -> int:
        """The number of prompt and output tokens so far."""
        return len(self.request.token_ids) + self.new_tokens

    @property
    def output_tokens(self) -> int:
        """The number of output tokens so far, here and on other workers."""
        return self.tokens - self.request.prompt_tokens

    @property
    def most_tokens_left(self) -> int:
        """The upper bound of output tokens still to come."""
        return self.request.max_output_tokens - self.output_tokens

    @property
    def yields(self) -> bool:
        """True if the prompt is computed only while no prompt without this flag waits."""
        return self.request.yields

    @property
    def awaits_prompt(self) -> bool:
        """True if the sequence's prompt is computed here and is not finished."""
        return self.phase in PROMPT_PHASES and not self.new_tokens

    @property
    def decodes(self) -> bool:
        """True if the sequence's prompt is complete and the sequence generates tokens here."""
        return self.phase != pb.PHASE_PREFILL and self.new_tokens > 0


_ROLES = {
    roles.Role.PREFILL: common.ROLE_PREFILL,
    roles.Role.MIXED: common.ROLE_MIXED,
    roles.Role.STANDBY: common.ROLE_STANDBY,
}
_STALE = (AssignmentRefusal.DRAINING, AssignmentRefusal.STALE_EPOCH)
_SENTENCES = {
    AssignmentRefusal.DRAINING: "the worker is draining: it takes no other role, choose another worker",
    AssignmentRefusal.STALE_EPOCH: (
        "expected epoch {expected_epoch}, the worker is at {epoch}: check its state, then try again"
    ),
    AssignmentRefusal.OTHER_MODEL: "this worker holds model {held!r}, not {requested!r}",
    AssignmentRefusal.UNKNOWN_ROLE: "role must be prefill, mixed or standby",
    AssignmentRefusal.BUDGET_WITHOUT_MIXED: "only role mixed has a prompt budget",
    AssignmentRefusal.BUDGET_TOO_LARGE: f"a prompt budget is at most {roles.MAX_BUDGET_TOKENS} tokens",
}
_PARAMS = {
    AssignmentRefusal.UNKNOWN_ROLE: "role",
    AssignmentRefusal.BUDGET_WITHOUT_MIXED: "budget_tokens",
    AssignmentRefusal.BUDGET_TOO_LARGE: "budget_tokens",
}


class AssignmentState:
    """The current assignment. Epochs only increase, and a draining worker accepts no change."""

    def __init__(self, model: str, role: int, budget_tokens: int, *, epoch: int = FIRST_EPOCH) -> None:
        """Create the state at `epoch`, which continues the epochs of earlier models. Raise InvalidRequest."""
        first = first_assignment(model, role, budget_tokens, epoch)
        if isinstance(first, AssignmentRefusal):
            raise _error(first)
        self._current = first
        self.draining = False

    @property
    def current(self) -> roles.Assignment:
        return self._current

    @property
    def message(self) -> common.Assignment:
        current = self._current
        return common.Assignment(
            model=current.model,
            role=_ROLES[current.role],
            budget_tokens=current.budget_tokens,
            epoch=current.epoch,
        )

    def set_role(self, *, expected_epoch: int, role: int, budget_tokens: int, model: str = "") -> common.Assignment:
        """Change the role. Raise StaleRole unless `expected_epoch` is current, InvalidRequest for an invalid role."""
        wanted = WantedAssignment(role, budget_tokens, expected_epoch, model)
        new = next_assignment(self._current, wanted, draining=self.draining)
        if isinstance(new, AssignmentRefusal):
            raise _error(
                new, expected_epoch=expected_epoch, epoch=self._current.epoch, requested=model, held=self._current.model
            )
        self._current = new
        return self.message

    @property
    def leaves_decode(self) -> bool:
        """True if running decodes belong to a role that the worker has left."""
        return leaves_decode(self._current, draining=self.draining)


def refuse_stale_lead(latest: LatestLead, term: int) -> None:
    """Raise StaleLead if `term` belongs to a planner that no longer leads."""
    if latest.outruns(term):
        raise StaleLead(
            f"a planner with a later lead ({latest.term}, yours is {term}) has called this worker: only that one may."
            " If none leads, and it came from a Redis with a wrong clock, restart the worker"
        )


def _error(reason: AssignmentRefusal, **facts: int | str) -> FulcrumError:
    sentence = _SENTENCES[reason].format(**facts)
    return StaleRole(sentence) if reason in _STALE else InvalidRequest(sentence, param=_PARAMS.get(reason))


# The upper bound of stored change times. Fewer changes happen while one step runs and is reported.
MAX_CHANGES = 16


class LastChange:
    """The last change of role as it is published, and the first step after it."""

    def __init__(self) -> None:
        self.message: RoleChange | None = None
        self.first_step_ns: int | None = None
        """The time from the change to the end of the first engine step of the new role's kind; None until there is one.

        Such a step may also compute an earlier prompt, a running decode or a measurement. The figure shows how soon the
        engine continues, not how soon new work arrives.
        """
        self._assignment = Assignment()
        self._changed_ns: deque[int] = deque(maxlen=MAX_CHANGES)

    def took_again(self, change: RoleChange, assignment: Assignment) -> None:
        """Restore a change that was made before the worker restarted."""
        self.message = change
        self._assignment = assignment

    def took(self, assignment: Assignment, request: SetRoleRequest, now_ns: int) -> None:
        self.message = RoleChange(
            actor=request.actor,
            reason=request.reason,
            unix_ns=now_ns,
            own_budget_tokens=min(request.own_budget_tokens, MAX_BUDGET_TOKENS),
        )
        self.first_step_ns = None
        self._assignment = assignment
        self._changed_ns.append(now_ns)

    def epoch_at(self, at_ns: int, epoch: int) -> int:
        """Return the epoch at `at_ns`, given the current one."""
        return epoch - sum(changed_ns > at_ns for changed_ns in self._changed_ns)

    def stepped(self, event: EngineEvent) -> None:
        """Record the step if it is the first of the new role. A step that started before the change does not count."""
        step = event.step
        if self.message is None or self.first_step_ns is not None or step is None or not step.end_unix_ns:
            return
        if step.start_unix_ns >= self.message.unix_ns and _is_of(self._assignment, step):
            self.first_step_ns = step.end_unix_ns - self.message.unix_ns


def _is_of(assignment: Assignment, step: StepReport) -> bool:
    if assignment.role == ROLE_PREFILL:
        return step.prefill_tokens > 0
    if assignment.role == ROLE_MIXED:
        return step.decode_sequences > 0 or (assignment.budget_tokens > 0 and step.prefill_tokens > 0)
    return False


# The upper bound of hand-overs that are timed at once. The oldest beyond it are not measured.
MAX_TRACKED = 1024


class HandOverCosts:
    """The costs of keeping sequences and of handing them over, learned on this worker.

    A sequence is offered to its gateway if a hand-over removes it sooner than its own end, at most once for each role
    that the worker leaves. The same rule covers prefill, standby and shutdown. The sequence runs until another worker
    has room, or else to its end. If the engine cannot hand over the KV of running sequences, the other worker
    recomputes it.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._staying = Staying()
        self.time = HandOverTime()
        """The measured durations of hand-overs from this worker."""
        self._gone: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """The bytes and the time of sealing (Unix nanoseconds) of each hand-over in progress, by handle."""
        self.count = 0
        """The number of sequences handed over so far."""

    def worth(self, sequence: HostedSequence, speed: Speed, waited_s: float) -> bool:
        """Return whether to hand over a decoding sequence. The worker left its role `waited_s` ago."""
        if not sequence.decodes or sequence.weighed:
            return False
        capabilities = self._capabilities
        if not capabilities.hands_over_running_kv:  # asked again until it moves: the answer depends on time
            if not (capabilities.seeds_by_position or sequence.request.sampling.follows_from_tokens):
                return False  # another worker would draw other tokens
            recompute_s = speed.prompt_ns(sequence.tokens, sequence.tokens**2) / 1e9
            left = sequence.most_tokens_left
            sequence.weighed = sooner_recomputed(left, recompute_s, waited_s, self._staying)
            return sequence.weighed
        sequence.weighed = True
        kv_bytes = capabilities.kv_bytes(sequence.tokens)
        return sooner_handed_over(sequence.most_tokens_left, kv_bytes, self._staying, self.time)

    def stepped(self, event: EngineEvent) -> None:
        """Learn the duration of decode steps from an engine event."""
        step = event.step
        if step is not None and step.end_unix_ns and step.decode_sequences:
            self._staying = self._staying.stepped((step.end_unix_ns - step.start_unix_ns) / 1e9)

    def ended(self, output_tokens: int) -> None:
        """Learn the length of an answer that ended here."""
        self._staying = self._staying.ended(output_tokens)

    def handed_over(self, handle: KvHandle, now_ns: int) -> None:
        """Start timing a hand-over, whose blocks now wait for their receiver."""
        self.count += 1
        put_newest(self._gone, handle.opaque, (self._capabilities.kv_bytes(handle.tokens), now_ns), MAX_TRACKED)

    def taken_over(self, opaque: bytes, now_ns: int) -> None:
        """Stop timing a hand-over. Blocks that never arrive are not measured."""
        kv_bytes, sealed_ns = self._gone.pop(opaque, (0, 0))
        if kv_bytes:
            self.time.observe(kv_bytes, max(now_ns - sealed_ns, 0) / 1e9)
