"""The registry port, which lists the existing workers. A worker exists as long as it renews its lease."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """Counters of registry entries that could not be used."""

    skipped: int = 0
    """The number of distinct entries so far that are no worker others can connect to."""
    unusable: int = 0
    """The number of such entries in the last list."""


class Registry(Protocol):
    """The directory in which workers register and others find them. Methods raise RegistryDown while it is away."""

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Register a worker or renew its lease, notifying `watch` if anything but the lease differs.

        Does nothing while a newer incarnation is registered.
        """
        ...

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation has taken its place."""
        ...

    async def workers(self) -> list[Worker]:
        """Return the workers whose lease is valid, sorted by id."""
        ...

    def watch(self, *, poll_ms: int = 1000) -> AsyncIterator[list[Worker]]:
        """Yield the list now, after every pushed change, and at least every `poll_ms`. Continues through outages."""
        ...

    def stats(self) -> RegistryStats: ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


class RegistryDown(Exception):
    """The store does not respond; callers continue with what they have."""
