"""The worker's assignment. libs/policy decides on changes; this module holds the state and words the errors."""

from libs.contracts.errors import FulcrumError, InvalidRequest, StaleRole
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.policy import roles
from libs.policy.worker.assignment import (
    FIRST_EPOCH,
    NotTaken,
    Wanted,
    first_assignment,
    leaves_decode,
    next_assignment,
)

_ROLES = {
    roles.Role.PREFILL: common.ROLE_PREFILL,
    roles.Role.MIXED: common.ROLE_MIXED,
    roles.Role.STANDBY: common.ROLE_STANDBY,
}
_STALE = (NotTaken.DRAINING, NotTaken.STALE_EPOCH)
_SENTENCES = {
    NotTaken.DRAINING: "the worker is draining: it takes no other role, choose another worker",
    NotTaken.STALE_EPOCH: (
        "expected epoch {expected_epoch}, the worker is at {epoch}: look at what it does by now, then ask again"
    ),
    NotTaken.OTHER_MODEL: "this worker holds model {held!r}, not {asked!r}",
    NotTaken.UNKNOWN_ROLE: "role must be prefill, mixed or standby",
    NotTaken.BUDGET_WITHOUT_MIXED: "only role mixed has a prompt budget",
    NotTaken.BUDGET_TOO_LARGE: f"a prompt budget is at most {roles.MAX_BUDGET_TOKENS} tokens",
}
_PARAMS = {
    NotTaken.UNKNOWN_ROLE: "role",
    NotTaken.BUDGET_WITHOUT_MIXED: "budget_tokens",
    NotTaken.BUDGET_TOO_LARGE: "budget_tokens",
}


class AssignmentState:
    """The current assignment. Epochs only grow, and a draining worker accepts no change."""

    def __init__(self, model: str, role: int, budget_tokens: int, *, epoch: int = FIRST_EPOCH) -> None:
        """Start at `epoch`, which continues that of earlier models. Raise InvalidRequest for an invalid assignment."""
        first = first_assignment(model, role, budget_tokens, epoch)
        if isinstance(first, NotTaken):
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
        """Change the role. Raise StaleRole unless `expected_epoch` is current, and InvalidRequest for an invalid
        role.
        """
        wanted = Wanted(role, budget_tokens, expected_epoch, model)
        new = next_assignment(self._current, wanted, draining=self.draining)
        if isinstance(new, NotTaken):
            raise _error(
                new, expected_epoch=expected_epoch, epoch=self._current.epoch, asked=model, held=self._current.model
            )
        self._current = new
        return self.message

    @property
    def leaves_decode(self) -> bool:
        """Whether running decodes belong to a role that has been left."""
        return leaves_decode(self._current, draining=self.draining)


def _error(reason: NotTaken, **facts: int | str) -> FulcrumError:
    sentence = _SENTENCES[reason].format(**facts)
    return StaleRole(sentence) if reason in _STALE else InvalidRequest(sentence, param=_PARAMS.get(reason))
