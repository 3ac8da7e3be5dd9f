"""How long a request waits for workers. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class Expiry(Enum):
    """Why a request waits no longer."""

    NO_WORKERS = auto()
    """None serves its model."""
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """Bounds of the wait."""

    max_wait_ms: int
    no_workers_wait_ms: int
    """Of one whose model no worker serves."""

    def ends(self, waited_ns: int, served: Callable[[], bool]) -> Expiry | None:
        """Whether a request has waited too long; `served`: whether workers serve its model now."""
        if waited_ns >= self.no_workers_wait_ms * 1_000_000 and not served():
            return Expiry.NO_WORKERS
        return Expiry.NO_ROOM if waited_ns >= self.max_wait_ms * 1_000_000 else None
