"""The model catalogue port: which models there are, how gateways use them, and what the planner expects of them.

Entries are written by the planner that leads, uses by each gateway for itself, outlooks by the planner again.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from libs.stores.catalogue.entry import LoadTimes, ModelEntry, ModelOutlook, ModelUse

Uses = Mapping[str, Mapping[str, ModelUse]]
"""By gateway, then model."""


@dataclass(frozen=True, slots=True)
class Catalogued:
    """The catalogue at one moment."""

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    """By name."""
    times: Mapping[str, LoadTimes] = field(default_factory=dict)
    """Of models that have been loaded, by name."""
    outlooks: Mapping[str, ModelOutlook] = field(default_factory=dict)
    """By name; empty where no planner has said anything of late."""


class CatalogueDown(Exception):
    """The store does not answer; callers go on with what they know."""


class ModelCatalogue(Protocol):
    """Every method but `watch` and `watch_uses` raises CatalogueDown when the store is away."""

    async def put(self, entry: ModelEntry) -> None:
        """Add a model, or change it."""
        ...

    async def remove(self, name: str) -> bool:
        """Forget a model and how long it took to load; whether it was there."""
        ...

    async def measured(self, name: str, times: LoadTimes) -> None:
        """How long loading took."""
        ...

    async def read(self) -> Catalogued:
        """All of it; what cannot be understood is left out."""
        ...

    def watch(self, *, poll_ms: int = 2_000) -> AsyncIterator[Catalogued]:
        """The catalogue now, then after every change of entries or outlooks and at least every `poll_ms`; outages are
        waited out."""
        ...

    async def tell(self, outlooks: Mapping[str, ModelOutlook], *, lease_ms: int) -> None:
        """What the planner expects; it holds until the lease ends, and is pushed where it differs."""
        ...

    async def use(self, gateway_id: str, uses: Mapping[str, ModelUse], *, lease_ms: int) -> None:
        """What one gateway has of its models, in place of what it said before; it holds until the lease ends."""
        ...

    async def uses(self) -> Uses:
        """Uses that gateways report whose lease holds."""
        ...

    def watch_uses(self, *, poll_ms: int = 1_000) -> AsyncIterator[Uses]:
        """The same now, after every `use` and at least every `poll_ms`; outages are waited out."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
