"""A Redis as the contracts of its ports see it: what connects to it, and its server. Over Redis, embedded or real, and
in memory."""

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
        """Its process, or what stands for one."""
        ...

    def registry(self, cluster: str) -> Registry:
        """A connection of its own, as each of these is."""
        ...

    def kv_index(self, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> KvIndex:
        """The same."""
        ...

    def step_times(self, cluster: str) -> StepTimeStore:
        """The same."""
        ...

    def catalogue(self, cluster: str) -> ModelCatalogue:
        """The same."""
        ...


class RedisDatabase:
    """Over a process."""

    def __init__(self, redis: RedisServer) -> None:
        self._url = redis.url
        self.server = redis.server

    def registry(self, cluster: str) -> RedisRegistry:
        """Not connected yet, as all of these."""
        return RedisRegistry(self._url, cluster)

    def kv_index(self, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> RedisKvIndex:
        """The same."""
        return RedisKvIndex(self._url, cluster, lookup_timeout_s=lookup_timeout_s)

    def step_times(self, cluster: str) -> RedisStepTimes:
        """The same."""
        return RedisStepTimes(self._url, cluster)

    def catalogue(self, cluster: str) -> RedisCatalogue:
        """The same."""
        return RedisCatalogue(self._url, cluster)


class MemoryDatabase:
    """In memory."""

    def __init__(self) -> None:
        self.server = self._store = MemoryStore()

    def registry(self, cluster: str) -> MemoryRegistry:
        """A client of the store, as all of these."""
        return MemoryRegistry(self._store, cluster)

    def kv_index(self, cluster: str, *, lookup_timeout_s: float = LOOKUP_TIMEOUT_S) -> MemoryKvIndex:
        """The same."""
        return MemoryKvIndex(self._store, cluster, lookup_timeout_s=lookup_timeout_s)

    def step_times(self, cluster: str) -> MemoryStepTimes:
        """The same."""
        return MemoryStepTimes(self._store, cluster)

    def catalogue(self, cluster: str) -> MemoryCatalogue:
        """The same."""
        return MemoryCatalogue(self._store, cluster)
