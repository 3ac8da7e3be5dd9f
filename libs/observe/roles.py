"""The port that changes roles in a fleet that Fulcrum does not run. Decisions about moves are in libs/policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker of the fleet as its control plane knows it."""

    name: str
    """Its name in figures, which is that of its `ObservedTarget`."""
    role: str
    """One of prefill, decode and mixed; a mixed one does both phases."""
    ready: bool = True
    """True if it takes requests."""
    fixed_because: str = ""
    """The reason why its role cannot be changed; empty if it can."""
    version: str = ""
    """The state that was read. A change made from an older state is refused."""


class FleetAway(Exception):
    """The control plane does not answer, or does not say what the roles are. No role has been changed by this call."""


class MoveRefused(Exception):
    """The role of one worker was not changed, or not to the end; the message names the worker and what to do."""


class FleetRoles(Protocol):
    """The roles of a fleet's workers. `workers` reflects every earlier change, whoever made it."""

    kind: str
    """The name of the means by which roles are changed, for people."""

    async def workers(self) -> Sequence[FleetWorker]:
        """Return the present workers by name, each with the reason why it cannot move. Raise FleetAway."""
        ...

    async def set_role(self, worker: FleetWorker, role: str, why: str) -> None:
        """Change a worker that was read lately to prefill or decode, and return once that is in effect.

        `why` is recorded beside the role where the fleet has a place for it. Raise MoveRefused or FleetAway.
        """
        ...

    async def close(self) -> None:
        """Disconnect, leaving roles as they are. Idempotent."""
        ...


def check_move(worker: FleetWorker, role: str) -> None:
    """Raise MoveRefused for a change that no fleet can make."""
    if worker.fixed_because:
        raise MoveRefused(f"{worker.name} stays {worker.role}: {worker.fixed_because}")
    if role not in ("prefill", "decode"):
        raise MoveRefused(f"{worker.name} cannot become {role!r}: a role is prefill or decode")
