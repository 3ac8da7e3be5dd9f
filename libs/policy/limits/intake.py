"""Whose request a gateway reads, checks and cuts into choices next. Pure.

All of a gateway's work shares one processor: while requests are taken in, frames of workers wait, and with them
everybody's tokens and credits. So requests are taken in a few at a time, and between two such rounds whatever has come
from workers is handled. A round serves tenants by start-time fair queueing (see libs/policy/queue/fairness.py), by
what a request costs here rather than by how many there are: one that asks for 128 choices counts as nine that ask for
one.
"""

from heapq import heapify, heappop, heappush
from typing import Final

from libs.policy.queue.fairness import FairTurns, Flow

ROUND_UNITS: Final = 4
"""Units of one round. A unit is about 0.3 ms: what it takes to read and refuse one request."""
CHOICES_PER_UNIT: Final = 16
TURN_UNITS: Final = 1000
"""A unit moves a turn by this much. Turns are whole numbers, and a weight divides this finely enough."""
MOST_WAITING: Final = 8192
"""Requests that wait here, as many as a gateway has connections at most."""
_FORGET_LEFT: Final = 64
"""Those that have left early are cleared away once there are more of them than of those that wait, and than this."""


def units_of(choices: int) -> int:
    """What it takes to make the choices of one request ready to wait for workers."""
    return -(-choices // CHOICES_PER_UNIT)


class IntakeLine:
    """Requests that wait to be taken in."""

    def __init__(self) -> None:
        self._left = ROUND_UNITS
        self._turns = FairTurns()
        self._line: list[tuple[int, int]] = []
        """A heap of (turn, ticket); those that have left may still be in it."""
        self._waiting: dict[int, tuple[Flow, int, int]] = {}
        """By ticket: flow, turn, units."""
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of this round is used, and nobody waits: no other round is needed."""
        return self._left == ROUND_UNITS and not self._waiting

    def enter(self, tenant: str, units: int, weight: int = 1) -> int | None:
        """A request of a tenant's that costs `units` has come: a ticket by which it waits, or None where it may go on
        at once."""
        if self._left > 0 and not self._waiting:
            self._left -= units
            return None
        self._tickets += 1
        flow, turn = self._turns.came((tenant, ""), units * TURN_UNITS, weight)
        self._waiting[self._tickets] = flow, turn, units
        heappush(self._line, (turn, self._tickets))
        return self._tickets

    def leave(self, ticket: int) -> None:
        """It waits no more, though its turn has not come."""
        found = self._waiting.pop(ticket, None)
        if found is not None:
            self._turns.left(found[0], found[1], bound=False)
            if len(self._line) > max(2 * len(self._waiting), _FORGET_LEFT):
                self._line = [(turn, each) for each, (_, turn, _) in self._waiting.items()]
                heapify(self._line)

    def next_round(self) -> list[int]:
        """Tickets of those that go on now. What the last round used beyond its units is missing in this one."""
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
