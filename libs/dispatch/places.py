"""Decode places by tenant, and the choices that give way when tenants compete for places."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from libs.dispatch.generation import Generation
from libs.dispatch.ports import QueuedDemand, Tenancy
from libs.policy.gateway.places import (
    GatewayPart,
    GatewayYield,
    PlaceAllowance,
    PlaceDemand,
    phase_at,
    places_to_yield,
    yields_by_gateway,
)

# The time in which a place that a choice gave up should become free. Until then no other choice gives way for it.
COMING_NS: Final = 1_000_000_000
# The time for which reports count such a place as free. Later, another gateway may occupy and report it, and it would
# be counted twice.
REPORTED_COMING_NS: Final = 300_000_000
# The time for which reports include choices that gave way: four reporting intervals. After that, all gateways know how
# many choices each one gave up for the same demand.
KNOWN_NS: Final = 1_250_000_000
# A gateway counts the choices that it gave up until the other gateways' ones have left their reports. Otherwise it
# would give up choices again for demand that others still report.
OWN_NS: Final = KNOWN_NS + 500_000_000


class TenantCount(NamedTuple):
    """The choices of one tenant for one model, counted by state."""

    running: int = 0
    waiting: int = 0
    gave_way: int = 0
    """The number of choices that gave up their place within KNOWN_NS. Most of them wait."""
    fixed: int = 0
    """The number of running choices that cannot give up their place yet: their prompt is being computed or their KV is
    moving.
    """

    @property
    def to_yield(self) -> GatewayYield:
        """The counts from which the policy decides which tenant gives way."""
        return GatewayYield(self.running, max(self.running - self.fixed, 0), self.gave_way)


NONE: Final = TenantCount()


def total(*counts: TenantCount) -> TenantCount:
    return TenantCount(*map(sum, zip(*counts, strict=True)))


class ModelPlaces(NamedTuple):
    """The decode places of one model at one gateway, or at several gateways together."""

    free: int
    """The number of places that are free, or that were given up and become free soon."""
    tenants: Mapping[str, TenantCount]


NO_PLACES: Final = ModelPlaces(0, {})


def together(reports: Iterable[Mapping[str, ModelPlaces]]) -> Mapping[str, ModelPlaces]:
    """Return the sums of several gateways' reports by model."""
    free: dict[str, int] = {}
    tenants: dict[str, dict[str, TenantCount]] = {}
    for report in reports:
        for model, found in report.items():
            free[model] = free.get(model, 0) + found.free
            sums = tenants.setdefault(model, {})
            for tenant, count in found.tenants.items():
                sums[tenant] = total(sums.get(tenant, NONE), count)
    return {model: ModelPlaces(free[model], tenants[model]) for model in free}


@dataclass(frozen=True)
class Others:
    """The latest reports of the other gateways, in the order of their ids."""

    before: tuple[Mapping[str, ModelPlaces], ...] = ()
    """The reports of gateways whose ids precede this gateway's."""
    after: tuple[Mapping[str, ModelPlaces], ...] = ()

    @cached_property
    def sides(self) -> tuple[Mapping[str, ModelPlaces], Mapping[str, ModelPlaces]]:
        """The sums of the reports before this gateway's and of those after it."""
        return together(self.before), together(self.after)

    def models(self) -> set[str]:
        return {model for side in self.sides for model in side}

    def free(self, model: str) -> int:
        """Return the number of a model's free places at other gateways."""
        return sum(side.get(model, NO_PLACES).free for side in self.sides)

    def tenants(self, model: str) -> set[str]:
        return {tenant for side in self.sides for tenant in side.get(model, NO_PLACES).tenants}

    def places(self, model: str) -> int:
        """Return the number of a model's places at other gateways, whether used or free."""
        used = sum(count.running for side in self.sides for count in side.get(model, NO_PLACES).tenants.values())
        return used + self.free(model)

    def of(self, model: str, tenant: str) -> tuple[TenantCount, TenantCount]:
        """Return a tenant's counts at the gateways before this one and at those after it."""
        before, after = (side.get(model, NO_PLACES).tenants.get(tenant, NONE) for side in self.sides)
        return before, after

    def yields(self, model: str, tenant: str, here: GatewayYield, count: int) -> int:
        """Return how many of a tenant's choices give way here if `count` give way at all gateways together."""
        before, after = (
            [each.get(model, NO_PLACES).tenants.get(tenant, NONE).to_yield for each in side]
            for side in (self.before, self.after)
        )
        return yields_by_gateway(count, [*before, here, *after])[len(before)]

    def wait(self, model: str) -> bool:
        """Return whether choices wait for the model at other gateways."""
        return any(count.waiting for side in self.sides for count in side.get(model, NO_PLACES).tenants.values())

    def wanted(self) -> set[str]:
        return {model for side in self.sides for model, found in side.items() if found.tenants}


NOBODY: Final = Others()


class _Round(NamedTuple):
    """The tenants' demand for the places of one model."""

    places: int
    """The number of places at all gateways: used, free, or free soon."""
    free: int
    elsewhere: int
    coming: int
    demands: Mapping[str, PlaceDemand]
    waits: Mapping[str, GatewayPart]
    known: Mapping[str, int]
    """The number of each tenant's waiting choices, as far as every gateway knows of them."""
    phase: float

    @property
    def allowance(self) -> PlaceAllowance:
        """The free places at this gateway that each tenant may use."""
        return PlaceAllowance(self.places, self.free, self.demands, self.waits, self.phase)

    def yields(self) -> dict[str, int]:
        """Return how many choices of each tenant give way at all gateways together."""
        yields = self._yields_for(self.demands)
        if any(self.demands[tenant].waiting > self.waits[tenant].here for tenant in yields):
            # A gateway that does not know of the waiting choices yet would take the places that others give up for
            # them.
            demands = self.demands.items()
            return self._yields_for({t: d._replace(waiting=min(d.waiting, self.known.get(t, 0))) for t, d in demands})
        return yields

    def _yields_for(self, demands: Mapping[str, PlaceDemand]) -> dict[str, int]:
        return places_to_yield(self.places, self.free + self.elsewhere + self.coming, demands)


class TenantPlaces:
    """The decode places at one gateway by model and tenant, and the reports of other gateways.

    Without API keys, tenants cannot be distinguished, and none is held back.
    """

    def __init__(self, tenants: Tenancy) -> None:
        self._tenants = tenants
        self._held: dict[str, dict[str, dict[Generation, None]]] = {}
        """The choices with a place by model and tenant, in the order in which they got it."""
        self._seen: dict[str, int] = {}
        """The number of each model's places when choices last gave way."""
        self._gave_way: dict[str, list[tuple[int, Counter[str]]]] = {}
        """The times within OWN_NS at which choices gave way, and the number of each tenant's choices, by model."""
        self._others = NOBODY
        self._reported: dict[str, ModelPlaces] = {}
        self._exchanged: dict[str, ModelPlaces] = {}
        """This gateway's report when it last received the reports of others."""
        self._known_here: dict[str, ModelPlaces] = {}
        """The report one exchange earlier, which every gateway has received."""
        self._waiting: dict[str, Counter[str]] = {}
        """The number of each tenant's choices that waited at any gateway at the last exchange, by model."""
        self._known: dict[str, Counter[str]] = {}
        """The numbers one exchange earlier, which every gateway has received."""
        self.given_up = 0
        """The number of times that a choice has given way since the start."""

    def adopt_reports(self, others: Others) -> None:
        """Adopt the reports of other gateways, which receive this gateway's last report in the same exchange.

        Pass `NOBODY` if they are unknown. Each gateway then divides only its own places.
        """
        self._others = others
        self._known, self._waiting = self._waiting, {}
        self._known_here, self._exchanged = self._exchanged, self._reported
        for side in (*others.sides, self._reported):
            for model, found in side.items():
                counts = {tenant: count.waiting for tenant, count in found.tenants.items()}
                self._waiting.setdefault(model, Counter()).update(counts)

    def report(
        self, waiting: Mapping[str, Mapping[str, int]], free: Mapping[str, int], now_ns: int
    ) -> dict[str, ModelPlaces]:
        """Return this gateway's report by model.

        The report includes free places of models that are requested at other gateways. It is empty if no model is
        requested.
        """
        for model in list(self._gave_way):
            self._forget(model, now_ns)
        found: dict[str, ModelPlaces] = {}
        models = self._held.keys() | waiting.keys() | self._gave_way.keys() | self._others.wanted()
        for model in sorted(models) if self._tenants.are_distinct else ():
            counts = self._here(model, waiting.get(model, {}), now_ns - KNOWN_NS)
            unused = free.get(model, 0)
            coming = self._coming(model, unused, now_ns - REPORTED_COMING_NS)
            found[model] = ModelPlaces(unused + coming, counts)
        self._reported = found
        return found

    def _here(self, model: str, waiting: Mapping[str, int], since_ns: int) -> dict[str, TenantCount]:
        """Return each tenant's counts here, including the choices that gave way after `since_ns`."""
        held, gave_way, found = self._held.get(model, {}), self._gave_way_since(model, since_ns), {}
        for tenant in sorted(held.keys() | waiting.keys() | gave_way.keys()):
            running = held.get(tenant, {})
            fixed = sum(not each.placement.runs for each in running)
            found[tenant] = TenantCount(len(running), waiting.get(tenant, 0), gave_way[tenant], fixed)
        return found

    def _gave_way_since(self, model: str, since_ns: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for at_ns, counts in self._gave_way.get(model, ()):
            if at_ns > since_ns:
                found.update(counts)
        return found

    def _coming(self, model: str, free: int, since_ns: int) -> int:
        """Return the number of places given up here after `since_ns` that no gateway has reported as its own."""
        gave_way = self._gave_way_since(model, since_ns).total()
        if not gave_way:
            return 0
        held = sum(map(len, self._held.get(model, {}).values()))
        return min(max(self._seen[model] - free - held - self._others.places(model), 0), gave_way)

    def bound(self, generation: Generation) -> None:
        """Record that a choice has got a place."""
        tenants = self._held.setdefault(generation.model, {})
        tenants.setdefault(generation.context.tenant, {})[generation] = None

    def left(self, generation: Generation) -> None:
        """Record that a choice has left its place, if it had one."""
        model, tenant = generation.model, generation.context.tenant
        held = self._held.get(model, {}).get(tenant)
        if held is None or held.pop(generation, self) is self or held:
            return
        del self._held[model][tenant]
        if not self._held[model]:
            del self._held[model]

    def contested(self, waiting: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
        """Return the models for which several tenants compete, with the number of each tenant's waiting choices here.

        The choices may wait here or at other gateways.
        """
        if not self._tenants.are_distinct:
            return {}
        models = waiting.keys() | self._others.models()
        return {model: waiting.get(model, {}) for model in models if self._shared(model, waiting.get(model, {}))}

    def within(
        self, model: str, ready: Iterable[Generation], waiting: Mapping[str, int], free: int, now_ns: int
    ) -> Iterator[Generation]:
        """Return the waiting choices of a model that may be bound now, in order.

        `waiting` contains their number by tenant.
        """
        found = self._contest(model, waiting, free, now_ns)
        if found is None:
            return iter(ready)
        allowance = found.allowance
        return (each for each in ready if each.batch or each.pooled or allowance.take(each.context.tenant))

    def within_share(
        self, model: str, demand: QueuedDemand, waiting: Mapping[str, int], free: int, now_ns: int
    ) -> QueuedDemand:
        """Return a model's demand without choices that exceed their tenants' shares.

        Workers then grant places given up here to the gateways whose tenants lack them.
        """
        found = self._contest(model, waiting, free, now_ns) if self._others.tenants(model) else None
        if found is None:
            return demand
        return demand._replace(waiting=demand.waiting - sum(waiting.values()) + found.allowance.within_share(waiting))

    def giving_way(self, model: str, waiting: Mapping[str, int], free: int, now_ns: int) -> list[Generation]:
        """Return the running choices to preempt. All waiting choices that found room must have been bound before.

        Batch lines are preempted first, then the latest arrivals.
        """
        self._forget(model, now_ns)
        found = self._contest(model, waiting, free, now_ns)
        if found is None:
            return []
        chosen: list[Generation] = []
        gave_way = self._gave_way_since(model, now_ns - OWN_NS)
        for tenant, count in found.yields().items():
            held = self._held.get(model, {}).get(tenant, {})
            able = [each for each in held if each.placement.runs]
            here = GatewayYield(len(held), self._as_known(model, tenant, len(able)), gave_way[tenant])
            chosen += sorted(able, key=_cost)[: self._others.yields(model, tenant, here, count)]
        if chosen:
            self._seen[model] = found.places
            counts = Counter(each.context.tenant for each in chosen)
            self._gave_way.setdefault(model, []).append((now_ns, counts))
        self.given_up += len(chosen)
        return chosen

    def _as_known(self, model: str, tenant: str, able: int) -> int:
        """Limit `able` to the number of this tenant's choices here that other gateways know of.

        Gateways that do not know of each other's choices would each give up all of the missing places.
        """
        if tenant not in self._others.tenants(model):
            return able
        return min(able, self._known_here.get(model, NO_PLACES).tenants.get(tenant, NONE).to_yield.able)

    def _forget(self, model: str, now_ns: int) -> None:
        """Drop the records of choices that gave way before OWN_NS."""
        found = self._gave_way.pop(model, [])
        if left := [each for each in found if each[0] > now_ns - OWN_NS]:
            self._gave_way[model] = left
        else:
            self._seen.pop(model, None)

    def _contest(self, model: str, waiting: Mapping[str, int], free: int, now_ns: int) -> _Round | None:
        """Return the demand for a model's places.

        Return None if at most one tenant requests the model, or if tenants cannot be distinguished.
        """
        if not self._tenants.are_distinct or not self._shared(model, waiting):
            return None
        demands, waits = dict[str, PlaceDemand](), dict[str, GatewayPart]()
        held = self._held.get(model, {})
        for tenant in sorted(held.keys() | waiting.keys() | self._others.tenants(model)):
            before, after = self._others.of(model, tenant)
            waits[tenant] = GatewayPart(before.waiting, waiting.get(tenant, 0))
            running = before.running + len(held.get(tenant, ())) + after.running
            waits_for_one = before.waiting + waits[tenant].here + after.waiting
            demands[tenant] = PlaceDemand(running, waits_for_one, self._tenants.weight(tenant))
        elsewhere, coming = self._others.free(model), self._coming(model, free, now_ns - COMING_NS)
        places = free + elsewhere + coming + sum(demand.running for demand in demands.values())
        known: Mapping[str, int] = self._known.get(model, {})
        return _Round(places, free, elsewhere, coming, demands, waits, known, phase_at(now_ns))

    def _shared(self, model: str, waiting: Mapping[str, int]) -> bool:
        """Return whether choices wait for the model and more than one tenant waits or has places, here or elsewhere."""
        if not waiting and not self._others.wait(model):
            return False
        return len(waiting.keys() | self._held.get(model, {}).keys() | self._others.tenants(model)) > 1


def _cost(generation: Generation) -> tuple[bool, int, int]:
    """Return a sort key: batch lines give way first, then late arrivals, then those with the fewest tokens to
    recompute.
    """
    return not generation.batch, -generation.arrival_unix_ns, len(generation.output)
