"""How much of a gateway's capacity the lines of batch jobs may have. Pure."""

from dataclasses import dataclass

LOOK_AHEAD = 4
"""Lines that may be in flight where workers show no room at all, so that they see that more could be done."""
MAX_LINES_WAITING = 32
"""Lines in the gateway's queue: enough for one round of binding, and no more are read while workers take none."""


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """What a gateway sees of its workers at one moment."""

    free: int
    """Sequences that could be bound now."""
    bound: int
    """Sequences that are bound, whoever asked for them."""
    people_waiting: int
    """Requests in the queue that are no batch lines."""
    lines_waiting: int
    """Batch lines in it."""


def allowed(load: GatewayLoad, share: float, max_in_flight: int) -> int:
    """How many batch lines may be in flight: no more while people wait, and otherwise few enough to leave room for a
    person's request, except for a few that wait for workers."""
    if load.people_waiting or load.lines_waiting >= MAX_LINES_WAITING:
        return 0
    return min(max_in_flight, max(int(share * (load.free + load.bound)), LOOK_AHEAD))
