"""Which tenant gets the next of a few slots, and which requests may wait for one.

A slot is held for a bounded time: an upload, a schema check, the tokenization of a prompt. Tenants are served by
start-time fair queueing (see libs/policy/queue/fairness.py), so a tenant waits behind its own requests.
"""

from collections import Counter
from typing import Final

from libs.policy.gateway.places import queue_room
from libs.policy.limits.intake import TURN_UNITS
from libs.policy.queue.fairness import FairTurns, Flow

ANYBODY: Final = ""
"""The tenant of every request where tenants are not distinguished; no share bounds it."""


def may_take(slots: int, held: int, own: int, weight: int = 1) -> bool:
    """Return whether a tenant that holds `own` of the `held` slots may take one more.

    This is a dynamic threshold, as in `queue_room`: a tenant may hold at most its weight times the slots it leaves
    free. The last slot is reserved for a tenant that holds none. Of 8 slots one tenant gets 4, a second 2.
    """
    free = slots - held
    return free > 0 and (own == 0 or own + 1 <= weight * (free - 1))


class SlotLine:
    """The requests that hold a slot or wait for one, by tenant."""

    def __init__(self, slots: int, max_waiting: int, *, shared: bool) -> None:
        """Create a line for `slots` slots.

        `shared` bounds each tenant's slots by `may_take`. Without it one tenant may hold them all, which suits
        slots that are free again within moments.
        """
        self._slots = slots
        self._max_waiting = max_waiting
        self._shared = shared
        self._held: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._turns = FairTurns()
        # By ticket: (turn, tenant, flow, weight) of the waiting requests.
        self._line: dict[int, tuple[int, str, Flow, int]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        """Return the number of waiting requests, without those that hold a slot."""
        return len(self._line)

    @property
    def held(self) -> int:
        return self._held.total()

    def has_room(self, tenant: str, weight: int = 1) -> bool:
        """Return whether one more request of the tenant may wait; every other tenant keeps some room."""
        if tenant == ANYBODY:
            return len(self._line) < self._max_waiting
        return queue_room(self._max_waiting, len(self._line), self._waits[tenant], weight) > 0

    def take(self, tenant: str, weight: int = 1) -> bool:
        """Take a slot if one is free for the tenant and none of its requests waits; return whether it was taken."""
        taken = not self._waits[tenant] and self._may_hold(tenant, weight)
        self._held[tenant] += taken
        return taken

    def wait(self, tenant: str, cost: int = 1, weight: int = 1) -> int:
        """Enqueue a request and return its ticket. `cost` is the amount by which the tenant's next turn moves."""
        self._tickets += 1
        flow, turn = self._turns.came((tenant, ""), cost * TURN_UNITS, weight)
        self._line[self._tickets] = turn, tenant, flow, weight
        self._waits[tenant] += 1
        return self._tickets

    def leave(self, ticket: int) -> None:
        self._remove(ticket, served=False)

    def done(self, tenant: str) -> None:
        self._held[tenant] -= 1
        self._held += Counter()  # drops zeros

    def next(self) -> list[int]:
        """Grant free slots and return the tickets that received one, in the order of their turns."""
        found = []
        for ticket in sorted(self._line, key=lambda each: (self._line[each][0], each)):
            if self.held >= self._slots:
                break
            _, tenant, _, weight = self._line[ticket]
            if self._may_hold(tenant, weight):
                self._held[tenant] += 1
                self._remove(ticket, served=True)
                found.append(ticket)
        return found

    def _may_hold(self, tenant: str, weight: int) -> bool:
        if tenant == ANYBODY or not self._shared:
            return self.held < self._slots
        return may_take(self._slots, self.held, self._held[tenant], weight)

    def _remove(self, ticket: int, *, served: bool) -> None:
        turn, tenant, flow, _ = self._line.pop(ticket)
        self._turns.left(flow, turn, bound=served)
        self._waits[tenant] -= 1
        self._waits += Counter()
