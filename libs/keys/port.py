from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from libs.keys.book import KeyBook


@dataclass(frozen=True, slots=True)
class Stored:
    """A book and the version by which newer ones are recognized."""

    version: str
    book: KeyBook


class KeyStore(Protocol):
    """A store of one book of keys.

    Methods raise StoreUnavailable while it does not answer, or if it holds something else.
    """

    async def load(self, known: str = "") -> Stored | None:
        """Return the book, or None if its version is still the `known` one. It is empty if none was ever stored."""
        ...

    async def change(self, edit: Callable[[KeyBook], KeyBook]) -> KeyBook:
        """Store and return what `edit` makes of the book. Concurrent changes are both kept."""
        ...

    async def close(self) -> None:
        """Disconnect from the store. Calling it twice is harmless."""
        ...
