"""Whose choices hold places to decode, and who gives way where tenants share them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from libs.dispatch.generation import Generation
from libs.dispatch.ports import Tenancy
from libs.policy.gateway.places import PlaceAllowance, PlaceDemand, places_to_yield

COMING_NS: Final = 1_000_000_000
"""For this long a place that was given up is expected back from its worker, and nobody else gives way for it."""


class _Round(NamedTuple):
    """What tenants ask for of one model."""

    places: int
    """Held, free or coming."""
    free: int
    coming: int
    demands: Mapping[str, PlaceDemand]


class TenantPlaces:
    """Of one gateway, by model and tenant. Where tenants are not told apart nobody is held back."""

    def __init__(self, tenants: Tenancy) -> None:
        self._tenants = tenants
        self._held: dict[str, dict[str, dict[Generation, None]]] = {}
        """Choices with a place, by model and tenant, in the order in which they got it; those with none are not in
        it."""
        self._seen: dict[str, tuple[int, int]] = {}
        """By model: places that there were when sequences gave way last, and until when that counts."""
        self.given_up = 0
        """How often a choice gave way since the start."""

    def bound(self, generation: Generation) -> None:
        """It has a place from now on."""
        tenants = self._held.setdefault(generation.model, {})
        tenants.setdefault(generation.context.tenant, {})[generation] = None

    def left(self, generation: Generation) -> None:
        """It has none any more, if it had one."""
        model, tenant = generation.model, generation.context.tenant
        held = self._held.get(model, {}).get(tenant)
        if held is None or held.pop(generation, self) is self or held:
            return
        del self._held[model][tenant]
        if not self._held[model]:
            del self._held[model]

    def contested(self, waiting: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
        """Of those that wait by model and tenant, the models that another tenant asks for too."""
        if not self._tenants.told_apart:
            return {}
        return {model: tenants for model, tenants in waiting.items() if self._shared(model, tenants)}

    def within(
        self, model: str, ready: Iterable[Generation], waiting: Mapping[str, int], free: int, now_ns: int
    ) -> Iterator[Generation]:
        """Of those that wait for a model, in their order, the ones that may be bound now. `waiting`: by tenant."""
        found = self._contest(model, waiting, free, now_ns)
        if found is None:
            return iter(ready)
        allowance = PlaceAllowance(found.places, found.free, found.demands)
        return (each for each in ready if each.batch or allowance.take(each.context.tenant))

    def giving_way(self, model: str, waiting: Mapping[str, int], free: int, now_ns: int) -> list[Generation]:
        """Running choices that make room, after all have been bound that found some: those that came last, lines of
        batch jobs first."""
        found = self._contest(model, waiting, free, now_ns)
        if found is None:
            return []
        yields = places_to_yield(found.places, found.free + found.coming, found.demands)
        chosen: list[Generation] = []
        for tenant, count in yields.items():
            running = [each for each in self._held[model][tenant] if each.placement.runs]
            chosen += sorted(running, key=_cost)[:count]
        if chosen:
            self._seen[model] = found.places, now_ns + COMING_NS
            self.given_up += len(chosen)
        return chosen

    def _contest(self, model: str, waiting: Mapping[str, int], free: int, now_ns: int) -> _Round | None:
        """None where at most one tenant asks for the model, or nobody is told apart."""
        if not self._tenants.told_apart or not self._shared(model, waiting):
            return None
        held = self._held.get(model, {})
        demands = {
            tenant: PlaceDemand(len(held.get(tenant, ())), waiting.get(tenant, 0), self._tenants.weight(tenant))
            for tenant in sorted(held.keys() | waiting.keys())
        }
        places = free + sum(demand.running for demand in demands.values())
        seen, until_ns = self._seen.get(model, (0, 0))
        coming = max(seen - places, 0) if now_ns < until_ns else 0
        return _Round(places + coming, free, coming, demands)

    def _shared(self, model: str, waiting: Mapping[str, int]) -> bool:
        """Whether somebody waits for it, and more than one tenant waits or holds places."""
        return bool(waiting) and (len(waiting) > 1 or not self._held.get(model, {}).keys() <= waiting.keys())


def _cost(generation: Generation) -> tuple[bool, int, int]:
    """Smaller gives way sooner: what nobody waits for in person, what came last, what has the fewest tokens to be
    computed again."""
    return not generation.batch, -generation.arrival_unix_ns, len(generation.output)
