"""Stores under the contracts of the ports over Redis: their clients, and their server.

The implementations are Redis, embedded or real, and a store in memory.
"""

from typing import Protocol

from libs.stores.catalogue import ModelCatalogue, RedisCatalogue
from libs.stores.kvindex import LOOKUP_TIMEOUT_S, KvIndex, RedisKvIndex
from libs.stores.registry import RedisRegistry, Registry
from libs.stores.steps import RedisStepTimes, StepTimeStore
from libs.testing.memory.kvindex import MemoryKvIndex
from libs.testing.memory.models import MemoryCatalogue
from libs.testing.memory.registry import MemoryRegistry
from libs.testing.memory.server import KillableServer
from libs.testing.memory.steptimes import MemoryStepTimes
from libs.testing.memory.store import MemoryStore
from libs.testing.servers.stores import RedisServer


class Database(Protocol):
    """One store and its server."""

    @property
    def server(self) -> KillableServer:
        """The store's process, or its stand-in."""
        ...

    def registry(self, cluster: str) -> Registry:
        """Return a registry with a connection of its own."""
        ...

    def kv_index(self, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> KvIndex:
        """Return a KV index with a connection of its own."""
        ...

    def step_times(self, cluster: str) -> StepTimeStore:
        """Return step times with a connection of their own."""
        ...

    def catalogue(self, cluster: str) -> ModelCatalogue:
        """Return a catalogue with a connection of its own."""
        ...


class RedisDatabase:
    """A Redis process, whose clients are not connected yet."""

    def __init__(self, redis: RedisServer) -> None:
        self._url = redis.url
        self.server = redis.server

    def registry(self, cluster: str) -> RedisRegistry:
        return RedisRegistry(self._url, cluster)

    def kv_index(self, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> RedisKvIndex:
        return RedisKvIndex(self._url, cluster, lookup_timeout_s=lookup_timeout_s)

    def step_times(self, cluster: str) -> RedisStepTimes:
        return RedisStepTimes(self._url, cluster)

    def catalogue(self, cluster: str) -> RedisCatalogue:
        return RedisCatalogue(self._url, cluster)


class MemoryDatabase:
    """A store in memory."""

    def __init__(self) -> None:
        self.server = self._store = MemoryStore()

    def registry(self, cluster: str) -> MemoryRegistry:
        return MemoryRegistry(self._store, cluster)

    def kv_index(self, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> MemoryKvIndex:
        return MemoryKvIndex(self._store, cluster, lookup_timeout_s=lookup_timeout_s)

    def step_times(self, cluster: str) -> MemoryStepTimes:
        return MemoryStepTimes(self._store, cluster)

    def catalogue(self, cluster: str) -> MemoryCatalogue:
        return MemoryCatalogue(self._store, cluster)
