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


W = TypeVar("W", bound=Waiting)


def order(waiting: Iterable[W]) -> list[W]:
    """First come, first served; a request whose client has already seen it start comes before all others."""
    return sorted(waiting, key=lambda item: (not item.resumed, item.arrival_unix_ns))
