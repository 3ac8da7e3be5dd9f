"""Which tenant gets the next of a few slots, and who may wait for one. Pure.

A slot is held for a bounded time: an upload, a check of a schema, the tokenising of a prompt. The line serves tenants
by start-time fair queueing (see libs/policy/queue/fairness.py), so a tenant waits behind its own requests.
"""

from collections import Counter
from typing import Final

from libs.policy.gateway.places import queue_room
from libs.policy.limits.intake import TURN_UNITS
from libs.policy.queue.fairness import FairTurns, Flow

ANYBODY: Final = ""
"""The tenant of every request where tenants are not told apart; it is held to no share."""


def may_take(slots: int, held: int, own: int, weight: int = 1) -> bool:
    """Whether a tenant that holds `own` of the `held` slots may take one more.

    A dynamic threshold, as in `queue_room`: with one more it may hold no more than its weight times what it leaves
    beside a last slot, which is for a tenant that holds none. Of 8 slots one tenant gets 4, a second 2.
    """
    free = slots - held
    return free > 0 and (own == 0 or own + 1 <= weight * (free - 1))


class SlotLine:
    """Requests that hold a slot or wait for one, by tenant."""

    def __init__(self, slots: int, max_waiting: int, *, shared: bool) -> None:
        """shared: whether `may_take` bounds what a tenant holds. Otherwise it may hold all, which suits slots that come
        free within moments."""
        self._slots = slots
        self._max_waiting = max_waiting
        self._shared = shared
        self._held: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._turns = FairTurns()
        self._line: dict[int, tuple[int, str, Flow, int]] = {}
        """Turn, tenant, flow and weight of those that wait, by ticket."""
        self._tickets = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    @property
    def held(self) -> int:
        """Slots that are taken."""
        return self._held.total()

    def has_room(self, tenant: str, weight: int = 1) -> bool:
        """Whether one more request of the tenant may wait; some room is left to every other tenant."""
        if tenant == ANYBODY:
            return len(self._line) < self._max_waiting
        return queue_room(self._max_waiting, len(self._line), self._waits[tenant], weight) > 0

    def take(self, tenant: str, weight: int = 1) -> bool:
        """Take a slot at once, if there is one for the tenant and none of its requests waits for it."""
        taken = not self._waits[tenant] and self._may_hold(tenant, weight)
        self._held[tenant] += taken
        return taken

    def wait(self, tenant: str, cost: int = 1, weight: int = 1) -> int:
        """Return the ticket by which a request waits. cost: what it moves the tenant's next turn by."""
        self._tickets += 1
        flow, turn = self._turns.came((tenant, ""), cost * TURN_UNITS, weight)
        self._line[self._tickets] = turn, tenant, flow, weight
        self._waits[tenant] += 1
        return self._tickets

    def leave(self, ticket: int) -> None:
        """Forget a request that waits no more."""
        self._remove(ticket, served=False)

    def done(self, tenant: str) -> None:
        """Take back a slot of the tenant's."""
        self._held[tenant] -= 1
        self._held += Counter()  # drops zeros

    def next(self) -> list[int]:
        """Return the tickets that have a slot from now on, in the order of their turns."""
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
