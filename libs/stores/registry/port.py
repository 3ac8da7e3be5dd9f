"""The registry port: which workers exist. A worker is there as long as it renews its lease."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker


@dataclass(frozen=True, slots=True)
class RegistryStats:
    """What was read and could not be used."""

    skipped: int = 0
    """Different entries so far that are no worker others can connect to."""
    unusable: int = 0
    """Those in the last list."""


class Registry(Protocol):
    """Where workers announce themselves and others find them. Every method raises RegistryDown when it is away."""

    async def announce(self, worker: Worker, *, lease_ms: int) -> None:
        """Register or renew; the change is pushed to `watch` when anything but the lease differs.

        Does nothing while a newer incarnation is registered.
        """
        ...

    async def withdraw(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation has taken its place."""
        ...

    async def workers(self) -> list[Worker]:
        """Those whose lease holds, by id."""
        ...

    def watch(self, *, poll_ms: int = 1000) -> AsyncIterator[list[Worker]]:
        """The list now, then after every pushed change and at least every `poll_ms`; outages are waited out."""
        ...

    def stats(self) -> RegistryStats:
        """Counters for metrics."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


class RegistryDown(Exception):
    """The store does not answer; callers go on with what they know."""
