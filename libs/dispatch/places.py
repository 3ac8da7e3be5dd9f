"""Whose choices hold places to decode, and who gives way where tenants share them."""

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

COMING_NS: Final = 1_000_000_000
"""For this long a place that was given up is expected back from its worker, and nobody else gives way for it."""
REPORTED_COMING_NS: Final = 300_000_000
"""For this long reports count it as free. Later another gateway may hold it and report it too: it would count twice."""
KNOWN_NS: Final = 1_250_000_000
"""After this long all gateways know what one gave up, and it knows what they gave up for the same: four times that they
tell each other. Reports have it until then."""
OWN_NS: Final = KNOWN_NS + 500_000_000
"""For this long a gateway counts what it gave up itself: until others' parts of the same have left their reports. If it
forgot sooner, each would take on a part of what others still have in theirs."""


class TenantCount(NamedTuple):
    """Choices of one tenant for a model."""

    running: int = 0
    """Those that hold a place."""
    waiting: int = 0
    """Those that wait for one."""
    gave_way: int = 0
    """Those that gave up their place within KNOWN_NS; most of them wait."""
    fixed: int = 0
    """Those that hold a place and cannot give it up yet: a prompt is computed, or KV blocks move."""

    @property
    def to_yield(self) -> GatewayYield:
        """As far as places are given up."""
        return GatewayYield(self.running, max(self.running - self.fixed, 0), self.gave_way)


NONE: Final = TenantCount()


def total(*counts: TenantCount) -> TenantCount:
    """All of them."""
    return TenantCount(*map(sum, zip(*counts, strict=True)))


class ModelPlaces(NamedTuple):
    """Places of one model that one gateway has, or several together."""

    free: int
    """Or about to be: those given up that have not come back."""
    tenants: Mapping[str, TenantCount]


NO_PLACES: Final = ModelPlaces(0, {})


def together(reports: Iterable[Mapping[str, ModelPlaces]]) -> Mapping[str, ModelPlaces]:
    """What all these gateways have, by model."""
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
    """What each other gateway has, by model, as far as they have said; in the order of their names."""

    before: tuple[Mapping[str, ModelPlaces], ...] = ()
    """Of those whose names come before this one's."""
    after: tuple[Mapping[str, ModelPlaces], ...] = ()

    @cached_property
    def sides(self) -> tuple[Mapping[str, ModelPlaces], Mapping[str, ModelPlaces]]:
        """Those before together, and those after."""
        return together(self.before), together(self.after)

    def models(self) -> set[str]:
        """That gateways have said something of."""
        return {model for side in self.sides for model in side}

    def free(self, model: str) -> int:
        """Places that they hold unused."""
        return sum(side.get(model, NO_PLACES).free for side in self.sides)

    def tenants(self, model: str) -> set[str]:
        """Who asks for the model there."""
        return {tenant for side in self.sides for tenant in side.get(model, NO_PLACES).tenants}

    def places(self, model: str) -> int:
        """That they hold, used or unused."""
        used = sum(count.running for side in self.sides for count in side.get(model, NO_PLACES).tenants.values())
        return used + self.free(model)

    def of(self, model: str, tenant: str) -> tuple[TenantCount, TenantCount]:
        """At those before, and at those after."""
        before, after = (side.get(model, NO_PLACES).tenants.get(tenant, NONE) for side in self.sides)
        return before, after

    def yields(self, model: str, tenant: str, here: GatewayYield, count: int) -> int:
        """How many of the tenant's choices give way here, where `count` do at all gateways."""
        before, after = (
            [each.get(model, NO_PLACES).tenants.get(tenant, NONE).to_yield for each in side]
            for side in (self.before, self.after)
        )
        return yields_by_gateway(count, [*before, here, *after])[len(before)]

    def wait(self, model: str) -> bool:
        """Whether choices wait there for the model."""
        return any(count.waiting for side in self.sides for count in side.get(model, NO_PLACES).tenants.values())

    def wanted(self) -> set[str]:
        """Models that somebody asks for there."""
        return {model for side in self.sides for model, found in side.items() if found.tenants}


NOBODY: Final = Others()


class _Round(NamedTuple):
    """What tenants ask for of one model."""

    places: int
    """Held, free or coming, at all gateways."""
    free: int
    """Here."""
    elsewhere: int
    """Free at other gateways."""
    coming: int
    demands: Mapping[str, PlaceDemand]
    """At all gateways."""
    waits: Mapping[str, GatewayPart]
    known: Mapping[str, int]
    """Choices of each tenant that wait, as far as every gateway has heard of them."""
    phase: float

    @property
    def allowance(self) -> PlaceAllowance:
        """Who may be given a place here."""
        return PlaceAllowance(self.places, self.free, self.demands, self.waits, self.phase)

    def yields(self) -> dict[str, int]:
        """How many of each tenant give way at all gateways."""
        yields = self._yields_for(self.demands)
        if any(self.demands[tenant].waiting > self.waits[tenant].here for tenant in yields):
            # A gateway that has not heard who lacks places would take those that are given up for its own.
            demands = self.demands.items()
            return self._yields_for({t: d._replace(waiting=min(d.waiting, self.known.get(t, 0))) for t, d in demands})
        return yields

    def _yields_for(self, demands: Mapping[str, PlaceDemand]) -> dict[str, int]:
        return places_to_yield(self.places, self.free + self.elsewhere + self.coming, demands)


class TenantPlaces:
    """One gateway's places, by model and tenant, beside what other gateways report. Without keys it holds nobody
    back."""

    def __init__(self, tenants: Tenancy) -> None:
        self._tenants = tenants
        self._held: dict[str, dict[str, dict[Generation, None]]] = {}
        """Choices with a place, by model and tenant, in the order in which they got it; those with none are not in
        it."""
        self._seen: dict[str, int] = {}
        """By model: places that there were when sequences gave way last."""
        self._gave_way: dict[str, list[tuple[int, Counter[str]]]] = {}
        """By model: when some gave way within OWN_NS, and how many of each tenant."""
        self._others = NOBODY
        self._reported: dict[str, ModelPlaces] = {}
        self._told: dict[str, ModelPlaces] = {}
        """What this one had reported when it heard others last."""
        self._known_here: dict[str, ModelPlaces] = {}
        """The same one time before: every gateway has heard it by now."""
        self._waiting: dict[str, Counter[str]] = {}
        """By model and tenant: choices that wait at any gateway, as was reported before this one heard others last."""
        self._known: dict[str, Counter[str]] = {}
        """The same one time before: every gateway has heard it by now."""
        self.given_up = 0
        """How often a choice gave way since the start."""

    def hear(self, others: Others) -> None:
        """What other gateways have, while they get what this one has reported last; `NOBODY` where that is not known:
        each shares what it holds then."""
        self._others = others
        self._known, self._waiting = self._waiting, {}
        self._known_here, self._told = self._told, self._reported
        for side in (*others.sides, self._reported):
            for model, found in side.items():
                counts = {tenant: count.waiting for tenant, count in found.tenants.items()}
                self._waiting.setdefault(model, Counter()).update(counts)

    def report(
        self, waiting: Mapping[str, Mapping[str, int]], free: Mapping[str, int], now_ns: int
    ) -> dict[str, ModelPlaces]:
        """What other gateways are to know of this one, by model: also what it holds unused of models that somebody asks
        for there. Empty where nobody asks for anything."""
        for model in list(self._gave_way):
            self._forget(model, now_ns)
        found: dict[str, ModelPlaces] = {}
        models = self._held.keys() | waiting.keys() | self._gave_way.keys() | self._others.wanted()
        for model in sorted(models) if self._tenants.told_apart else ():
            counts = self._here(model, waiting.get(model, {}), now_ns - KNOWN_NS)
            unused = free.get(model, 0)
            coming = self._coming(model, unused, now_ns - REPORTED_COMING_NS)
            found[model] = ModelPlaces(unused + coming, counts)
        self._reported = found
        return found

    def _here(self, model: str, waiting: Mapping[str, int], since_ns: int) -> dict[str, TenantCount]:
        """`since_ns`: what gave way before that is left out."""
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
        """Places given up here since then that no gateway has yet, as far as it has said."""
        gave_way = self._gave_way_since(model, since_ns).total()
        if not gave_way:
            return 0
        held = sum(map(len, self._held.get(model, {}).values()))
        return min(max(self._seen[model] - free - held - self._others.places(model), 0), gave_way)

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
        """Of the models that choices wait for, here by model and tenant or at other gateways, those that another tenant
        asks for too."""
        if not self._tenants.told_apart:
            return {}
        models = waiting.keys() | self._others.models()
        return {model: waiting.get(model, {}) for model in models if self._shared(model, waiting.get(model, {}))}

    def within(
        self, model: str, ready: Iterable[Generation], waiting: Mapping[str, int], free: int, now_ns: int
    ) -> Iterator[Generation]:
        """Of those that wait for a model, in their order, the ones that may be bound now. `waiting`: by tenant."""
        found = self._contest(model, waiting, free, now_ns)
        if found is None:
            return iter(ready)
        allowance = found.allowance
        return (each for each in ready if each.batch or allowance.take(each.context.tenant))

    def asked(
        self, model: str, demand: QueuedDemand, waiting: Mapping[str, int], free: int, now_ns: int
    ) -> QueuedDemand:
        """The queue of a model as its workers get it: without those that are beyond their tenants' shares, so that what
        gives way here goes to the gateways that it gave way to."""
        found = self._contest(model, waiting, free, now_ns) if self._others.tenants(model) else None
        if found is None:
            return demand
        return demand._replace(waiting=demand.waiting - sum(waiting.values()) + found.allowance.asked(waiting))

    def giving_way(self, model: str, waiting: Mapping[str, int], free: int, now_ns: int) -> list[Generation]:
        """Running choices that make room, after all have been bound that found some: those that came last, lines of
        batch jobs first."""
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
        """Of those that can give way here, as many as other gateways with the tenant's choices have heard of: each
        would give up all that lacks while it has not heard that the other can."""
        if tenant not in self._others.tenants(model):
            return able
        return min(able, self._known_here.get(model, NO_PLACES).tenants.get(tenant, NONE).to_yield.able)

    def _forget(self, model: str, now_ns: int) -> None:
        """What gave way long ago."""
        found = self._gave_way.pop(model, [])
        if left := [each for each in found if each[0] > now_ns - OWN_NS]:
            self._gave_way[model] = left
        else:
            self._seen.pop(model, None)

    def _contest(self, model: str, waiting: Mapping[str, int], free: int, now_ns: int) -> _Round | None:
        """None where at most one tenant asks for the model, or nobody is told apart."""
        if not self._tenants.told_apart or not self._shared(model, waiting):
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
        """Whether somebody waits for it, and more than one tenant waits or holds places, here or elsewhere."""
        if not waiting and not self._others.wait(model):
            return False
        return len(waiting.keys() | self._held.get(model, {}).keys() | self._others.tenants(model)) > 1


def _cost(generation: Generation) -> tuple[bool, int, int]:
    """Smaller gives way sooner: what nobody waits for in person, what came last, what has the fewest tokens to be
    computed again."""
    return not generation.batch, -generation.arrival_unix_ns, len(generation.output)
