"""The share of a gateway's capacity that batch lines may use."""

from dataclasses import dataclass

# Lines in flight even where workers show no room, so that the demand for more capacity stays visible.
LOOK_AHEAD = 4
MAX_LINES_WAITING = 32
"""The most batch lines in the gateway's queue.

It is enough for one round of binding. No more lines are read while workers accept none.
"""


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """A gateway's view of its workers' load at one moment."""

    free: int
    """The number of sequences that could be bound now."""
    bound: int
    """The number of bound sequences, interactive and batch."""
    people_waiting: int
    """The queued requests that are not batch lines."""
    lines_waiting: int


def allowed(load: GatewayLoad, share: float, max_in_flight: int) -> int:
    """Return how many batch lines may be in flight.

    None may be added while interactive requests wait. Otherwise the number leaves room for an interactive request,
    but is never below a few lines that wait for workers.
    """
    if load.people_waiting or load.lines_waiting >= MAX_LINES_WAITING:
        return 0
    return min(max_in_flight, max(int(share * (load.free + load.bound)), LOOK_AHEAD))
