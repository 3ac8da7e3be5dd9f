"""Which of the tenants waiting for one model is next.

Start-time fair queueing (Goyal et al., SIGCOMM 1996) over prompt tokens. A request's turn is the end of its
tenant's earlier requests, or the current position of service if there are none. A tenant alone is served first
come, first served. Of several, one that requests more than its share waits behind its own requests, and nobody
starves. The classes of a tenant divide its share evenly.
"""

from dataclasses import dataclass, field
from typing import Final

MOST_CLASSES: Final = 16
"""The most classes of one tenant waiting at once; further ones are treated as one class."""

Flow = tuple[str, str]
"""A tenant and one of its classes."""
_OTHERS: Final = "\0others"


@dataclass(slots=True)
class _ClassQueue:
    waiting: int = 0
    turn: int = 0


@dataclass(slots=True)
class _TenantQueue:
    classes: dict[str, _ClassQueue] = field(default_factory=dict)


class FairTurns:
    """The turns for one model. Only tenants with waiting requests are remembered."""

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
        """Remove a request. `bound`: it goes to workers, which advances the service position."""
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
