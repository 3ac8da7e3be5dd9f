"""A worker's last change of role: who asked for it and why, and how soon it worked. Sync; time is passed in."""

from collections import deque

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Assignment, RoleChange
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SetRoleRequest
from libs.engine.reports import EngineEvent, StepReport
from libs.policy.roles import MAX_BUDGET_TOKENS

MAX_CHANGES = 16
"""Changes whose times are kept: more than happen while one step runs and is reported."""


class LastChange:
    """The last change of role as it is published; no message before the first."""

    def __init__(self) -> None:
        self.message: RoleChange | None = None
        self.first_step_ns: int | None = None
        """From the change until the first engine step ended that did what the new role does; None until one has.

        Whose work it was is not asked: the next chunk of a prompt taken before, a decode that was running, and a step
        that measures count too. It says how soon the engine goes on, not how soon new work comes.
        """
        self._assignment = Assignment()
        self._changed_ns: deque[int] = deque(maxlen=MAX_CHANGES)

    def took(self, assignment: Assignment, request: SetRoleRequest, now_ns: int) -> None:
        """The worker takes an assignment now, as it was asked to."""
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
        """The epoch that held then, where `epoch` holds now."""
        return epoch - sum(changed_ns > at_ns for changed_ns in self._changed_ns)

    def stepped(self, event: EngineEvent) -> None:
        """Look at a step; one that began before the change says nothing."""
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
