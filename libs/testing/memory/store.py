"""The contents of one Redis behind several ports, with leases by the running loop's clock."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.perfmodel.learner import FittedModel, StepKind
from libs.policy.worker.saturation import PrefillCurve
from libs.stores.catalogue import Catalogued, LoadTimes, ModelEntry, ModelOutlook, ModelUse, Uses
from libs.testing.memory.server import Bell, MemoryServer, Travel, at_once


@dataclass(slots=True)
class _Tables:
    entries: dict[str, ModelEntry] = field(default_factory=dict)
    times: dict[str, LoadTimes] = field(default_factory=dict)
    outlooks: Mapping[str, ModelOutlook] = field(default_factory=dict)
    outlooks_until_s: float = 0.0
    edits: int = 0
    uses: dict[str, tuple[float, Mapping[str, ModelUse]]] = field(default_factory=dict)


class ModelTables:
    """The catalogue's tables by cluster. `news` is rung for changes that are pushed."""

    def __init__(self, news: Bell) -> None:
        self._news = news
        self._clusters: dict[str, _Tables] = {}

    def clear(self) -> None:
        self._clusters.clear()

    def put(self, cluster: str, entries: Sequence[ModelEntry]) -> None:
        tables = self._of(cluster)
        tables.entries |= {entry.name: entry for entry in entries}
        tables.edits += 1
        self._news.ring()

    def remove(self, cluster: str, name: str) -> bool:
        """Remove a model and return whether it existed."""
        tables = self._of(cluster)
        tables.times.pop(name, None)
        tables.edits += 1
        self._news.ring()
        return tables.entries.pop(name, None) is not None

    def measured(self, cluster: str, name: str, times: LoadTimes) -> None:
        """Record a model's measured load time."""
        self._of(cluster).times[name] = times
        self._news.ring()

    def read(self, cluster: str) -> Catalogued:
        """Return a copy of the catalogue."""
        tables = self._of(cluster)
        outlooks = tables.outlooks if tables.outlooks_until_s > _now_s() else {}
        entries, times = dict(sorted(tables.entries.items())), dict(sorted(tables.times.items()))
        return Catalogued(entries, times, dict(outlooks), tables.edits)

    def publish_outlooks(self, cluster: str, outlooks: Mapping[str, ModelOutlook], lease_ms: int) -> None:
        """Store the planner's expectations until the lease ends."""
        tables = self._of(cluster)
        differs = tables.outlooks != outlooks
        tables.outlooks, tables.outlooks_until_s = dict(outlooks), _now_s() + lease_ms / 1000
        if differs:
            self._news.ring()

    def use(self, cluster: str, gateway_id: str, uses: Mapping[str, ModelUse], lease_ms: int) -> None:
        """Store one gateway's use until the lease ends."""
        self._of(cluster).uses[gateway_id] = (_now_s() + lease_ms / 1000, dict(uses))
        self._news.ring()

    def uses(self, cluster: str) -> Uses:
        """Return the use of gateways whose lease holds."""
        tables, now_s = self._of(cluster), _now_s()
        tables.uses = {name: held for name, held in tables.uses.items() if held[0] > now_s}
        return {name: uses for name, (_, uses) in sorted(tables.uses.items())}

    def _of(self, cluster: str) -> _Tables:
        return self._clusters.setdefault(cluster, _Tables())


Key = tuple[str, ...]
"""A key, which begins with the cluster's name."""


@dataclass(frozen=True, slots=True)
class StoredLease:
    value: bytes
    incarnation: int
    until_s: float


@dataclass(slots=True)
class BlockSet:
    """The blocks of one worker and model."""

    until_s: float
    blocks: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class MeasuringClaim:
    """The holder of the right to measure for a key of step times."""

    holder: object
    until_s: float


NOBODY: Final[Mapping[str, StoredLease]] = {}


class MemoryStore(MemoryServer):
    """The store that all clients of a test share. A kill empties it, as it empties a Redis without persistence."""

    def __init__(self, *, travel: Travel = at_once, news_travel: Travel | None = None) -> None:
        """`news_travel` delivers changes that are pushed."""
        super().__init__(travel)
        self.news_travel = news_travel or travel
        self._workers: dict[str, dict[str, StoredLease]] = {}
        self._roles: dict[Key, tuple[bytes, float]] = {}
        self._blocks: dict[Key, BlockSet] = {}
        self.fits: dict[Key, dict[StepKind, FittedModel]] = {}
        self.curves: dict[Key, PrefillCurve] = {}
        self._claims: dict[Key, MeasuringClaim] = {}
        self.models = ModelTables(self.news)

    def kill(self) -> None:
        """Stop without notice, and lose the contents."""
        super().kill()
        self._workers.clear()
        self._roles.clear()
        self._blocks.clear()
        self.fits.clear()
        self.curves.clear()
        self._claims.clear()
        self.models.clear()

    # ------------------------------------------------------------ workers

    def announced(self, cluster: str, worker_id: str, value: bytes, *, incarnation: int, lease_ms: int) -> None:
        """Register or renew a worker unless a newer incarnation is registered; push a changed value."""
        held = self._live(cluster).get(worker_id)
        if held is not None and held.incarnation > incarnation:
            return
        registration = StoredLease(value, incarnation, _now_s() + lease_ms / 1000)
        self._workers.setdefault(cluster, {})[worker_id] = registration
        if held is None or held.value != value:
            self.news.ring()

    def withdrawn(self, cluster: str, worker_id: str, incarnation: int) -> None:
        """Remove a worker unless a newer incarnation is registered."""
        held = self._live(cluster).get(worker_id)
        if held is not None and held.incarnation <= incarnation:
            del self._workers[cluster][worker_id]
            self.news.ring()

    def role_kept(self, cluster: str, worker_id: str, value: bytes, keep_ms: int) -> None:
        """Store a value for a time; 0 deletes it."""
        self._roles[cluster, worker_id] = value, _now_s() + keep_ms / 1000

    def kept_role(self, cluster: str, worker_id: str) -> bytes | None:
        """Return the value if its time is not over."""
        value, until_s = self._roles.get((cluster, worker_id), (None, 0.0))
        return value if until_s > _now_s() else None

    def workers(self, cluster: str) -> dict[str, bytes]:
        """Return the values of workers whose lease holds, sorted by id."""
        return {worker_id: held.value for worker_id, held in sorted(self._live(cluster).items())}

    def _live(self, cluster: str) -> Mapping[str, StoredLease]:
        registered, now_s = self._workers.get(cluster), _now_s()
        if registered is None:
            return NOBODY
        for worker_id in [each for each, held in registered.items() if held.until_s <= now_s]:
            del registered[worker_id]
        return registered

    # ------------------------------------------------------------ blocks

    def held(self, key: Key) -> set[bytes]:
        """Return the blocks under a key whose lease holds."""
        found = self._blocks.get(key)
        if found is None or found.until_s <= _now_s():
            self._blocks.pop(key, None)
            return set()
        return found.blocks

    def changed(self, key: Key, stored: list[bytes], removed: list[bytes], lease_ms: int) -> int:
        """Apply a change, and return how many blocks are listed afterwards."""
        blocks = self.held(key)
        blocks.update(stored)
        blocks.difference_update(removed)
        self.replaced(key, blocks, lease_ms)
        return len(blocks)

    def replaced(self, key: Key, blocks: set[bytes], lease_ms: int) -> None:
        """Replace the blocks until the lease ends; an empty set deletes the key."""
        self._blocks.pop(key, None)
        if blocks:
            self._blocks[key] = BlockSet(_now_s() + lease_ms / 1000, blocks)

    def forgotten(self, key: Key) -> None:
        self._blocks.pop(key, None)

    # ------------------------------------------------------------ claims

    def claimed(self, key: Key, holder: object, lease_s: float) -> bool:
        """Return whether the caller newly acquired the claim."""
        held, now_s = self._claims.get(key), _now_s()
        if held is not None and held.until_s > now_s:
            return False
        self._claims[key] = MeasuringClaim(holder, now_s + lease_s)
        return True

    def released(self, key: Key, holder: object) -> None:
        """Release the claim if the caller holds it."""
        held = self._claims.get(key)
        if held is not None and held.holder is holder:
            del self._claims[key]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
