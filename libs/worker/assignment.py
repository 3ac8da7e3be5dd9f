"""Which work a worker takes: its assignment, changed by compare-and-set on the epoch. Pure."""

from libs.contracts.errors import InvalidRequest, StaleRole
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    ROLE_PREFILL,
    ROLE_STANDBY,
    Assignment,
    Role,
)
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import (
    PHASE_DECODE,
    REFUSAL_CODE_DRAINING,
    REFUSAL_CODE_STALE_ROLE,
    Phase,
    RefusalCode,
)
from libs.policy.roles import MAX_BUDGET_TOKENS, serves

FIRST_EPOCH = 1


class AssignmentState:
    """The current assignment; epochs only grow, and a draining worker takes no more of either work or roles."""

    def __init__(self, model: str, role: Role, budget_tokens: int) -> None:
        self._current = _assignment(model, role, budget_tokens, FIRST_EPOCH)
        self.draining = False

    @property
    def current(self) -> Assignment:
        """The assignment; not to be changed by the caller."""
        return self._current

    def set_role(self, *, expected_epoch: int, role: Role, budget_tokens: int, model: str = "") -> Assignment:
        """Take a new role; raises StaleRole unless `expected_epoch` is current, InvalidRequest for what cannot be."""
        current = self._current
        if self.draining:
            raise StaleRole("the worker is draining: it takes no other role, choose another worker")
        if expected_epoch != current.epoch:
            raise StaleRole(
                f"expected epoch {expected_epoch}, the worker is at {current.epoch}: look at what it does by now,"
                " then ask again"
            )
        if model and model != current.model:
            raise InvalidRequest(f"this worker holds model {current.model!r}, not {model!r}")
        self._current = _assignment(current.model, role, budget_tokens, current.epoch + 1)
        return self._current

    @property
    def leaves_decode(self) -> bool:
        """Whether sequences that still decode are work of a role that has been left."""
        return self.draining or not serves(self._current, PHASE_DECODE)

    def refusal(self, phase: Phase) -> RefusalCode | None:
        """Why new work of `phase` is not taken, or None.

        The epoch that the gateway routed by does not matter as long as the phase still fits: a change of budget, or a
        move there and back, bounces no work.
        """
        if self.draining:
            return REFUSAL_CODE_DRAINING
        if not serves(self._current, phase):
            return REFUSAL_CODE_STALE_ROLE
        return None


def _assignment(model: str, role: Role, budget_tokens: int, epoch: int) -> Assignment:
    if role not in (ROLE_PREFILL, ROLE_MIXED, ROLE_STANDBY):
        raise InvalidRequest("role must be prefill, mixed or standby", param="role")
    if budget_tokens and role != ROLE_MIXED:
        raise InvalidRequest("only role mixed has a prompt budget", param="budget_tokens")
    if budget_tokens > MAX_BUDGET_TOKENS:
        raise InvalidRequest(f"a prompt budget is at most {MAX_BUDGET_TOKENS} tokens", param="budget_tokens")
    return Assignment(model=model, role=role, budget_tokens=budget_tokens, epoch=epoch)
