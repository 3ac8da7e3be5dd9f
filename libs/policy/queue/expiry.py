from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class Expiry(Enum):
    """The reason a request stops waiting for workers."""

    # No worker serves its model.
    NO_WORKERS = auto()
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """The bounds of a request's time in the queue."""

    max_wait_ms: int
    no_workers_wait_ms: int
    """The bound while no worker serves the request's model."""

    def ends(self, waited_ns: int, served: Callable[[], bool]) -> Expiry | None:
        """Return why a request has waited too long, or None if it may go on.

        `served` returns whether workers serve its model now; it is called only after `no_workers_wait_ms`.
        """
        if waited_ns >= self.no_workers_wait_ms * 1_000_000 and not served():
            return Expiry.NO_WORKERS
        return Expiry.NO_ROOM if waited_ns >= self.max_wait_ms * 1_000_000 else None
