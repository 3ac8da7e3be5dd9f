"""What outlives a planner: its mode, in words, its limits, and who leads; the port to where that is kept."""

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal, Protocol

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_ADVISORY, MODE_AUTO, MODE_OFF, Mode

ModeWord = Literal["off", "advisory", "auto"]
MODES: Final = MappingProxyType({"off": MODE_OFF, "advisory": MODE_ADVISORY, "auto": MODE_AUTO})
LEASE_MS: Final = 1_200
"""Another planner takes over so long after the last sign of the one that leads."""


def mode_word(mode: Mode) -> str:
    """off, advisory, auto, ..."""
    return Mode.Name(mode).removeprefix("MODE_").lower()


class Lead(Enum):
    """Who decides, of planners that share a cluster."""

    OURS = "ours"
    ANOTHERS = "anothers"
    UNKNOWN = "unknown"
    """The store does not answer."""


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """What was last kept; None where nothing was."""

    mode: Mode | None
    limits: str | None
    """As they were written."""


class PlannerStore(Protocol):
    """What a planner remembers. Without it a mode and limits hold until it restarts, and it leads alone."""

    async def load(self) -> KeptSettings | None:
        """What was last kept; None where the store does not answer."""
        ...

    async def keep(self, mode: Mode) -> bool:
        """Remember a mode; whether that worked."""
        ...

    async def keep_limits(self, written: str) -> bool:
        """Remember limits; whether that worked."""
        ...

    async def recall(self, what: str) -> str | None:
        """What was last remembered under a name; None where nothing was, or the store does not answer."""
        ...

    async def remember(self, what: str, written: str) -> bool:
        """Remember something under a name; whether that worked."""
        ...

    @property
    def lead_fault(self) -> str:
        """Why the last `lead` was UNKNOWN, and what to do; empty where it was not."""
        ...

    async def lead(self, who: str) -> Lead:
        """Take the lead for `LEASE_MS`, or go on having it, unless somebody else has it."""
        ...

    async def follow(self, who: str) -> None:
        """Leave the lead to others, where it is ours."""
        ...
