"""The port that changes roles in a fleet that Fulcrum does not run. Decisions about moves are in libs/policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker of the fleet from the point of view of its control plane."""

    name: str
    """The name of the worker's `ObservedTarget`."""
    role: str
    """One of prefill, decode and mixed; a mixed one does both phases."""
    ready: bool = True
    """True if the server accepts requests."""
    fixed_because: str = ""
    """The reason why the server's role cannot be changed; empty if it can."""
    version: str = ""
    """The version at the time of reading. A change based on an older version is refused."""


ROLES: Final = ("prefill", "decode")
"""The roles that a worker can be moved to."""


class FleetAway(Exception):
    """The control plane did not answer, or its answer has no roles. The call changed no role."""


class MoveRefused(Exception):
    """A worker's role was not changed, or not completely. The message names the worker and what to do."""


class FleetRoles(Protocol):
    """A fleet's control plane, in its function of assigning roles. `workers` reflects every earlier change, whoever
    made it.
    """

    kind: str
    """The name of the mechanism that changes roles, for display."""

    async def workers(self) -> Sequence[FleetWorker]:
        """Return the present workers by name, each with the reason why it cannot move. Raise FleetAway."""
        ...

    async def set_role(self, worker: FleetWorker, role: str, why: str) -> None:
        """Change a recently read worker to prefill or decode, and return once that is in effect.

        `why` is recorded with the role if the fleet supports it. Raise MoveRefused or FleetAway.
        """
        ...

    async def close(self) -> None:
        """Disconnect, leaving roles as they are. Idempotent."""
        ...


class ActingLease(Protocol):
    """The right to change roles in one fleet, which at most one process holds."""

    async def hold(self) -> str:
        """Acquire or renew the lease; return its holder's name if that is another process, else "".

        A process that holds it may make one change within the next seconds. Raise FleetAway if the holder is unknown.
        """
        ...

    async def close(self) -> None:
        """Release the lease. Idempotent."""
        ...


def check_move(worker: FleetWorker, role: str) -> None:
    """Raise MoveRefused for a change that no fleet can make."""
    if worker.fixed_because:
        raise MoveRefused(f"{worker.name} stays {worker.role}: {worker.fixed_because}")
    if role not in ROLES:
        raise MoveRefused(f"{worker.name} cannot become {role!r}: a role is prefill or decode")
