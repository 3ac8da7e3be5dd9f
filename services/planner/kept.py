"""The planner's persistent state (mode, limits, leader lease), the port to its store, and the planner's view of the
lease.
"""

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal, Protocol

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_ADVISORY, MODE_AUTO, MODE_OFF, Mode

ModeWord = Literal["off", "advisory", "auto"]
MODES: Final = MappingProxyType({"off": MODE_OFF, "advisory": MODE_ADVISORY, "auto": MODE_AUTO})
# The time after the leader's last renewal at which another planner may take over.
LEASE_MS: Final = 1_200


def mode_word(mode: Mode) -> str:
    """Return a mode as users write it: off, advisory or auto."""
    return Mode.Name(mode).removeprefix("MODE_").lower()


class Lead(Enum):
    """The holder of the leader lease, as far as this planner knows."""

    OURS = "ours"
    ANOTHERS = "anothers"
    # The store does not answer.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StoredPlannerSettings:
    """The stored mode and limits. A setting that was never stored is None."""

    mode: Mode | None
    limits: str | None
    """The limits as JSON text that has not been validated."""


class PlannerStore(Protocol):
    """The port to the planner's persistent state.

    Without a store, mode and limits last until a restart, and the planner always leads.
    """

    async def load(self) -> StoredPlannerSettings | None:
        """Return the stored mode and limits, or None if the store does not answer."""
        ...

    async def keep(self, mode: Mode) -> bool:
        """Store a mode and return whether that succeeded."""
        ...

    async def keep_limits(self, written: str) -> bool:
        """Store limits and return whether that succeeded."""
        ...

    async def recall(self, what: str) -> str | None:
        """Return the text stored under a name. Return None if there is none or the store does not answer."""
        ...

    async def remember(self, what: str, written: str) -> bool:
        """Store text under a name and return whether that succeeded."""
        ...

    @property
    def lead_fault(self) -> str:
        """The cause of the last UNKNOWN that `lead` returned, and its remedy; empty after another result."""
        ...

    @property
    def term(self) -> int:
        """The number of the lead that this planner acquired last. Later leads have higher numbers."""
        ...

    async def lead(self, who: str) -> Lead:
        """Acquire or renew the lead for `LEASE_MS`, unless another planner holds it."""
        ...

    async def follow(self, who: str) -> None:
        """Release the lead if this planner holds it."""
        ...


class LeaderLease:
    """The planner's view of the leader lease. The lead is lost if it cannot be renewed in time."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._until_s = float("inf")
        self.outrun = False
        """True if a worker has seen a later lead, so that this planner must acquire a new one."""
        self.fault = ""
        """The reason why the leader is unknown; empty while it is known."""

    def take(self, found: Lead, requested_s: float, fault: str = "") -> None:
        """Record an answer of the store. After UNKNOWN, the previous answer applies until the lease expires."""
        self.fault = fault
        if found is not Lead.UNKNOWN:
            self._lead, self._until_s = found, requested_s + LEASE_MS / 1000

    def was_outrun(self) -> None:
        """Record that a worker has seen a later lead than this planner's."""
        self.outrun = True

    def at(self, now_s: float) -> Lead:
        """Return the holder of the lead at `now_s`, as far as it is known."""
        lost = self._lead is Lead.OURS and now_s >= self._until_s
        return Lead.UNKNOWN if lost else self._lead
