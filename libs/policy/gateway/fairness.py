"""Fair turns of tenants: for workers, for the gateway's own processor, and for a few slots.

Start-time fair queueing (Goyal et al., SIGCOMM 1996). A request's turn is the end of its tenant's earlier requests, or
the current position of service if there are none. A tenant alone is served first come, first served. If several wait, a
tenant that requests more than its share waits behind its own requests, and no tenant starves. The classes of a tenant
divide its share evenly.
"""

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from libs.policy.gateway.places import queue_room

MOST_CLASSES: Final = 16
"""The maximum number of classes of one tenant waiting at once; further ones are treated as one class."""

Flow = tuple[str, str]
_OTHERS: Final = "\0others"


@dataclass(slots=True)
class _ClassQueue:
    waiting: int = 0
    turn: int = 0


@dataclass(slots=True)
class _TenantQueue:
    classes: dict[str, _ClassQueue] = field(default_factory=dict)


class FairTurns:
    """The turns for one model, in prompt tokens. Only tenants with waiting requests are remembered."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantQueue] = {}
        self._served = 0
        """The highest turn bound so far, in prompt tokens of one tenant's share."""

    def __len__(self) -> int:
        """Return the number of tenants with waiting requests."""
        return len(self._tenants)

    def came(self, flow: Flow, tokens: int, weight: int = 1) -> tuple[Flow, int]:
        """Enqueue a request and return its turn with the flow to pass to `left`.

        A tenant of weight 2 gets twice the tokens of one of weight 1 while both wait.
        """
        name, service_class = flow
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue()
        if service_class not in tenant.classes and len(tenant.classes) >= MOST_CLASSES:
            service_class = _OTHERS
        if service_class not in tenant.classes:
            tenant.classes[service_class] = _ClassQueue()
        each = tenant.classes[service_class]
        turn = max(self._served, each.turn)
        each.waiting += 1
        each.turn = turn - (-tokens * len(tenant.classes) // weight)
        return (name, service_class), turn

    def left(self, flow: Flow, turn: int, *, bound: bool) -> None:
        """Remove a request. If it is `bound` to workers, that advances the service position."""
        name, service_class = flow
        tenant = self._tenants[name]
        each = tenant.classes[service_class]
        each.waiting -= 1
        if not each.waiting:
            del tenant.classes[service_class]
        if not tenant.classes:
            del self._tenants[name]
        if bound:
            self._served = max(self._served, turn)


ROUND_UNITS: Final = 4
"""The units of one round. A unit is about 0.3 ms, the time to read and refuse one request."""
CHOICES_PER_UNIT: Final = 16
TURN_UNITS: Final = 1000
"""The amount by which one unit moves a turn. Turns are integers, and weights divide this finely enough."""
MOST_WAITING: Final = 8192
"""The maximum number of requests waiting for intake, equal to a gateway's maximum number of connections."""
# Entries of requests that left early are removed once they outnumber the waiting requests and this.
_FORGET_LEFT: Final = 64


def units_of(choices: int) -> int:
    """Return the units that preparing a request with this many choices costs."""
    return -(-choices // CHOICES_PER_UNIT)


class IntakeLine:
    """The requests waiting to be read, validated and split into choices, ordered by their tenants' turns.

    All of a gateway's work shares one processor. While requests are taken in, frames from workers wait, and with them
    everybody's tokens and credits. So requests are taken in a few at a time, and frames are handled between two such
    rounds. A request with 128 choices counts as much as eight with one.
    """

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
        """Return whether this round is unused and nobody waits, so that no further round is needed."""
        return self._left == ROUND_UNITS and not self._waiting

    def enter(self, tenant: str, units: int, weight: int = 1) -> int | None:
        """Admit a request that costs `units`. Return None if it may proceed now, or else a ticket to wait with."""
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
    """The requests that hold a slot or wait for one, by tenant.

    A slot is held for a bounded time: an upload, a schema check, the tokenization of a prompt.
    """

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
