"""The model catalogue port: the models, their use by gateways, and the planner's outlook.

The leading planner writes entries and outlooks. Each gateway writes its own use.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from libs.stores.catalogue.entry import LoadTimes, ModelEntry, ModelOutlook, ModelUse

Uses = Mapping[str, Mapping[str, ModelUse]]
"""Uses by gateway id, then by model name."""


@dataclass(frozen=True, slots=True)
class Catalogued:
    """A snapshot of the catalogue, whose mappings are keyed by model name."""

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    times: Mapping[str, LoadTimes] = field(default_factory=dict)
    """Times of the models that have been loaded."""
    outlooks: Mapping[str, ModelOutlook] = field(default_factory=dict)
    """The planner's outlooks; empty if no planner has published any recently."""


class CatalogueDown(Exception):
    """The store does not respond; callers continue with what they have."""


class ModelCatalogue(Protocol):
    """The catalogue of models. Methods other than `watch` and `watch_uses` raise CatalogueDown while the store is
    away.
    """

    async def put(self, entry: ModelEntry) -> None:
        """Add a model, or replace the one with that name."""
        ...

    async def remove(self, name: str) -> bool:
        """Remove a model with its load times, and return whether it existed."""
        ...

    async def measured(self, name: str, times: LoadTimes) -> None: ...

    async def read(self) -> Catalogued:
        """Return the whole catalogue without malformed values."""
        ...

    def watch(self, *, poll_ms: int = 2_000) -> AsyncIterator[Catalogued]:
        """Yield the catalogue now, after every change of entries or outlooks, and at least every `poll_ms`.

        Continues through outages.
        """
        ...

    async def tell(self, outlooks: Mapping[str, ModelOutlook], *, lease_ms: int) -> None:
        """Publish the planner's outlooks until the lease ends. Watchers are notified of differences."""
        ...

    async def use(self, gateway_id: str, uses: Mapping[str, ModelUse], *, lease_ms: int) -> None:
        """Replace the uses reported by one gateway, until the lease ends."""
        ...

    async def uses(self) -> Uses:
        """Return the uses of all gateways whose lease is valid."""
        ...

    def watch_uses(self, *, poll_ms: int = 1_000) -> AsyncIterator[Uses]:
        """Yield the uses now, after every `use`, and at least every `poll_ms`. Continues through outages."""
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...
