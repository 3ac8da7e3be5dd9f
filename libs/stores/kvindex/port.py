"""The KV index port, which finds the workers that hold a KV block. Losing the index costs reuse, never a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """Prompts of one model as ordered block hashes, and the workers to look up."""

    model: str
    prompts: Sequence[Sequence[bytes]]
    worker_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class KvIndexStats:
    """The counters of the index since start."""

    lookups: int
    """The number of attempted round trips for prefixes."""
    lookup_errors: int
    """The number of look-ups that found nothing because the store was away."""
    change_errors: int
    """The number of changes and renewals that the store did not accept. The next one makes up for them."""


class KvIndex(Protocol):
    """Block locations by chained hash (libs/contracts/hashing.py). No method raises while the store is away."""

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Add the blocks that a worker has stored, then remove those that it has evicted."""
        ...

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        """Extend the lease of a worker's blocks, which all disappear when it ends."""
        ...

    async def forget(self, model: str, worker_id: str) -> None:
        """Drop all blocks of a worker that restarts or leaves."""
        ...

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        """Return for each prompt of each query how many of its leading blocks each worker holds, in one round trip.

        Workers that hold none are left out, so a store that is away looks like one that holds nothing.
        """
        ...

    def stats(self) -> KvIndexStats: ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...
