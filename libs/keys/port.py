"""The port to where keys are stored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from libs.keys.book import KeyBook


@dataclass(frozen=True, slots=True)
class Stored:
    """A book and the version by which it is known whether there is a newer one."""

    version: str
    book: KeyBook


class KeyStore(Protocol):
    """One book of keys. Raises StoreUnavailable while it does not answer, or holds something else."""

    async def load(self, known: str = "") -> Stored | None:
        """The book; None where its version is still the `known` one. Where none was ever stored it is empty."""
        ...

    async def change(self, edit: Callable[[KeyBook], KeyBook]) -> KeyBook:
        """Store what `edit` makes of the book; of two that change it at once both changes stay."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
