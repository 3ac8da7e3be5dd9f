"""The KV index port: which worker holds which KV block. Losing it costs reuse, never a request."""

from collections.abc import Mapping, Sequence
from typing import Protocol


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

    async def longest_prefix(
        self, model: str, hashes: Sequence[Sequence[bytes]], worker_ids: Sequence[str]
    ) -> list[Mapping[str, int]]:
        """For each prompt (its block hashes in order), how many leading blocks each worker holds; one round trip.

        Workers that hold none are left out, so a store that is away looks like one that holds nothing.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
