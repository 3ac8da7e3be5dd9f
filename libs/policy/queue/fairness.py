"""Whose turn it is among tenants that wait for one model. Pure.

Start-time fair queueing (Goyal et al., SIGCOMM 1996) over prompt tokens: a request's turn is where its tenant has come
to, or where service has come to if the tenant has nothing before it. One tenant alone is served first come, first
served; of several, whoever asks for more than its share waits behind its own requests, and nobody starves. The
classes of a tenant share what it has alike.
"""

from dataclasses import dataclass, field
from typing import Final

MOST_CLASSES: Final = 16
"""Of one tenant that wait at once; further ones count as one."""

Flow = tuple[str, str]
"""Tenant and class."""
_OTHERS: Final = "\0others"


@dataclass(slots=True)
class _Class:
    waiting: int = 0
    turn: int = 0
    """Of its next request."""


@dataclass(slots=True)
class _Tenant:
    classes: dict[str, _Class] = field(default_factory=dict)


class FairTurns:
    """Turns for one model. It remembers those that wait, and nobody else."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._served = 0
        """The turn up to which requests were bound, in prompt tokens of a tenant's share."""

    def __len__(self) -> int:
        """Tenants that wait."""
        return len(self._tenants)

    def came(self, flow: Flow, tokens: int, weight: int = 1) -> tuple[Flow, int]:
        """(flow to leave by, turn) of a request with these prompt tokens, which waits from now on. weight: of its
        tenant's share; one of weight 2 gets twice what one of 1 gets, while both wait."""
        name, service_class = flow
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        if service_class not in tenant.classes and len(tenant.classes) >= MOST_CLASSES:
            service_class = _OTHERS
        if service_class not in tenant.classes:
            tenant.classes[service_class] = _Class()
        each = tenant.classes[service_class]
        turn = max(self._served, each.turn)
        each.waiting += 1
        each.turn = turn - (-tokens * len(tenant.classes) // weight)
        return (name, service_class), turn

    def left(self, flow: Flow, turn: int, *, bound: bool) -> None:
        """A request waits no more; `bound`: it goes to workers."""
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
