"""Which tenant's request a gateway reads, validates and splits into choices next.

All of a gateway's work shares one processor. While requests are taken in, frames from workers wait, and with them
everybody's tokens and credits. So requests are taken in a few at a time, and frames are handled between two such
rounds. A round serves tenants by start-time fair queueing (see libs/policy/queue/fairness.py) over what a request
costs here. One with 128 choices counts as much as eight with one.
"""

from heapq import heapify, heappop, heappush
from typing import Final

from libs.policy.queue.fairness import FairTurns, Flow

ROUND_UNITS: Final = 4
"""The units of one round. A unit is about 0.3 ms, the time to read and refuse one request."""
CHOICES_PER_UNIT: Final = 16
TURN_UNITS: Final = 1000
"""The amount by which one unit moves a turn. Turns are integers, and weights divide this finely enough."""
MOST_WAITING: Final = 8192
"""The most requests waiting for intake, equal to a gateway's maximum number of connections."""
# Entries of requests that left early are removed once they outnumber the waiting requests and this.
_FORGET_LEFT: Final = 64


def units_of(choices: int) -> int:
    """Return the units that preparing a request with this many choices costs."""
    return -(-choices // CHOICES_PER_UNIT)


class IntakeLine:
    """The requests waiting for intake, ordered by their tenants' turns."""

    def __init__(self) -> None:
        self._left = ROUND_UNITS
        self._turns = FairTurns()
        # A heap of (turn, ticket) that may still hold requests that have left.
        self._line: list[tuple[int, int]] = []
        # By ticket: (flow, turn, units).
        self._waiting: dict[int, tuple[Flow, int, int]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_fresh(self) -> bool:
        """Whether this round is unused and nobody waits, so that no further round is needed."""
        return self._left == ROUND_UNITS and not self._waiting

    def enter(self, tenant: str, units: int, weight: int = 1) -> int | None:
        """Admit a request that costs `units`: return None if it may proceed now, otherwise the ticket it waits by."""
        if self._left > 0 and not self._waiting:
            self._left -= units
            return None
        self._tickets += 1
        flow, turn = self._turns.came((tenant, ""), units * TURN_UNITS, weight)
        self._waiting[self._tickets] = flow, turn, units
        heappush(self._line, (turn, self._tickets))
        return self._tickets

    def leave(self, ticket: int) -> None:
        """Remove a request that stops waiting before its turn."""
        found = self._waiting.pop(ticket, None)
        if found is not None:
            self._turns.left(found[0], found[1], bound=False)
            if len(self._line) > max(2 * len(self._waiting), _FORGET_LEFT):
                self._line = [(turn, each) for each, (_, turn, _) in self._waiting.items()]
                heapify(self._line)

    def next_round(self) -> list[int]:
        """Return the tickets that proceed now. Units overdrawn by the last round are missing from this one."""
        self._left = min(self._left + ROUND_UNITS, ROUND_UNITS)
        found: list[int] = []
        while self._left > 0 and self._line:
            _, ticket = heappop(self._line)
            if ticket in self._waiting:
                flow, turn, units = self._waiting.pop(ticket)
                self._turns.left(flow, turn, bound=True)
                self._left -= units
                found.append(ticket)
        return found
