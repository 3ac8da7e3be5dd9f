"""What a store in memory holds of model catalogues, with leases by the running loop's clock."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.stores.catalogue import Catalogued, LoadTimes, ModelEntry, ModelOutlook, ModelUse, Uses
from libs.testing.memory.server import Bell


@dataclass(slots=True)
class _Tables:
    entries: dict[str, ModelEntry] = field(default_factory=dict)
    times: dict[str, LoadTimes] = field(default_factory=dict)
    outlooks: Mapping[str, ModelOutlook] = field(default_factory=dict)
    outlooks_until_s: float = 0.0
    uses: dict[str, tuple[float, Mapping[str, ModelUse]]] = field(default_factory=dict)


class ModelTables:
    """By cluster. `news` is rung for what is pushed."""

    def __init__(self, news: Bell) -> None:
        self._news = news
        self._clusters: dict[str, _Tables] = {}

    def clear(self) -> None:
        """Nothing is left."""
        self._clusters.clear()

    def put(self, cluster: str, entry: ModelEntry) -> None:
        """Add a model, or change it."""
        self._of(cluster).entries[entry.name] = entry
        self._news.ring()

    def remove(self, cluster: str, name: str) -> bool:
        """Whether it was there."""
        tables = self._of(cluster)
        tables.times.pop(name, None)
        self._news.ring()
        return tables.entries.pop(name, None) is not None

    def measured(self, cluster: str, name: str, times: LoadTimes) -> None:
        """How long loading took."""
        self._of(cluster).times[name] = times
        self._news.ring()

    def read(self, cluster: str) -> Catalogued:
        """A copy."""
        tables = self._of(cluster)
        outlooks = tables.outlooks if tables.outlooks_until_s > _now_s() else {}
        return Catalogued(dict(sorted(tables.entries.items())), dict(sorted(tables.times.items())), dict(outlooks))

    def tell(self, cluster: str, outlooks: Mapping[str, ModelOutlook], lease_ms: int) -> None:
        """Until the lease ends."""
        tables = self._of(cluster)
        differs = tables.outlooks != outlooks
        tables.outlooks, tables.outlooks_until_s = dict(outlooks), _now_s() + lease_ms / 1000
        if differs:
            self._news.ring()

    def use(self, cluster: str, gateway_id: str, uses: Mapping[str, ModelUse], lease_ms: int) -> None:
        """Until the lease ends."""
        self._of(cluster).uses[gateway_id] = (_now_s() + lease_ms / 1000, dict(uses))
        self._news.ring()

    def uses(self, cluster: str) -> Uses:
        """Of those whose lease holds."""
        tables, now_s = self._of(cluster), _now_s()
        tables.uses = {name: held for name, held in tables.uses.items() if held[0] > now_s}
        return {name: uses for name, (_, uses) in sorted(tables.uses.items())}

    def _of(self, cluster: str) -> _Tables:
        return self._clusters.setdefault(cluster, _Tables())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
