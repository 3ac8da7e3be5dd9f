"""A worker's last change of role: actor, reason and time to take effect. Synchronous; callers pass the time."""

from collections import deque

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Assignment, RoleChange
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SetRoleRequest
from libs.engine.reports import EngineEvent, StepReport
from libs.policy.roles import MAX_BUDGET_TOKENS

# Changes whose times are kept; fewer happen while one step runs and is reported.
MAX_CHANGES = 16


class LastChange:
    """The last change of role in its published form; there is no message before the first."""

    def __init__(self) -> None:
        self.message: RoleChange | None = None
        self.first_step_ns: int | None = None
        """Time from the change to the end of the first engine step of the new role's kind; None until there is one.

        Any such step counts: the next chunk of an earlier prompt, a running decode, and a measurement too. The
        figure shows how soon the engine goes on, not how soon new work arrives.
        """
        self._assignment = Assignment()
        self._changed_ns: deque[int] = deque(maxlen=MAX_CHANGES)

    def took(self, assignment: Assignment, request: SetRoleRequest, now_ns: int) -> None:
        """Record that the worker takes an assignment at `now_ns`."""
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
        """Return the epoch that held at `at_ns`, given the present one."""
        return epoch - sum(changed_ns > at_ns for changed_ns in self._changed_ns)

    def stepped(self, event: EngineEvent) -> None:
        """Check whether a step is the first of the new role. Steps that began before the change do not count."""
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
