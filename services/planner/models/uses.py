from collections.abc import Iterator
from typing import Final

from libs.policy.reserve.following import ModelCount
from libs.stores.catalogue.entry import ModelUse
from libs.stores.catalogue.port import Uses

# Counts of silent gateways that are remembered.
MAX_SEEN: Final = 100_000


class UseCounts:
    """Requests to each model since the planner started, summed over gateways. A restarted gateway counts from 0
    again.
    """

    def __init__(self) -> None:
        self._uses: Uses = {}
        self._arrivals: dict[str, int] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._last_ms: dict[str, int] = {}

    def take(self, uses: Uses) -> None:
        """Record the present counts of all gateways."""
        self._uses = uses
        seen: dict[tuple[str, str], int] = {}
        for gateway, models in uses.items():
            for name, use in models.items():
                last = self._seen.get((gateway, name), 0)
                new = use.arrivals - last if use.arrivals >= last else use.arrivals
                self._arrivals[name] = self._arrivals.get(name, 0) + new
                self._last_ms[name] = max(self._last_ms.get(name, 0), use.last_unix_ms)
                seen[gateway, name] = use.arrivals
        # A gateway that is quiet for a moment goes on where it was.
        self._seen = seen if len(self._seen) > MAX_SEEN else {**self._seen, **seen}

    def in_flight(self, name: str) -> int:
        """Return the number of requests to a model that have not ended."""
        return sum(use.in_flight for use in self.of(name))

    def waiting(self, name: str) -> int:
        """Return the number of requests to a model that no worker has taken."""
        return sum(use.waiting for use in self.of(name))

    def last_use_ms(self, name: str) -> int:
        """Return the arrival of the last request in Unix ms; 0 if none came since the planner started."""
        return self._last_ms.get(name, 0)

    def count(self, name: str) -> ModelCount:
        return ModelCount(self._arrivals.get(name, 0), self.in_flight(name), self.last_use_ms(name) / 1000)

    def of(self, name: str) -> Iterator[ModelUse]:
        """Yield each gateway's counts of a model."""
        for models in self._uses.values():
            if name in models:
                yield models[name]
