"""The KV index port: which worker holds which KV block. Losing it costs reuse, never a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """Prompts of one model, as their block hashes in order, and the workers that might hold them."""

    model: str
    prompts: Sequence[Sequence[bytes]]
    worker_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class KvIndexStats:
    """Counters since start."""

    lookups: int
    """Round trips for prefixes, or attempts at one."""
    lookup_errors: int
    """Those answered with nothing because the store was away."""
    change_errors: int
    """Changes and renewals that the store did not take; the next one makes up for them."""


class KvIndex(Protocol):
    """Block locations by chained hash (libs/contracts/hashing.py). Nothing here raises for a store that is away."""

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Blocks that `worker_id` now holds, and those it has evicted, in that order."""
        ...

    async def renew(self, model: str, worker_id: str, *, lease_ms: int) -> None:
        """Keep a worker's blocks listed: they go when its lease ends, all at once."""
        ...

    async def forget(self, model: str, worker_id: str) -> None:
        """Drop all of a worker's blocks (it starts anew, or leaves)."""
        ...

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        """For each prompt of each query, how many of its leading blocks each worker holds; one round trip for all.

        Workers that hold none are left out, so a store that is away looks like one that holds nothing.
        """
        ...

    def stats(self) -> KvIndexStats:
        """Counters for metrics."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
