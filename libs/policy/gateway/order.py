"""The order in which waiting requests are bound to workers. Pure."""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """What order is decided by."""

    @property
    def arrival_unix_ns(self) -> int:
        """When the client's request came."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether it ran already and lost its worker."""
        ...

    @property
    def batch(self) -> bool:
        """Whether nobody waits for it in person."""
        ...


W = TypeVar("W", bound=Waiting)


def order(waiting: Iterable[W]) -> list[W]:
    """First come, first served; what its client has already seen start comes before all others, batch lines last."""
    return sorted(waiting, key=lambda item: (item.batch, not item.resumed, item.arrival_unix_ns))
