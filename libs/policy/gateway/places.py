"""How tenants share the places to decode of one model while some of them wait for one. Pure.

Weighted max-min fairness (Bertsekas and Gallager, Data Networks, 6.5): nobody gets more than it asks for, and what one
leaves is shared by weight among those that ask for more. A tenant alone may hold every place. Once another comes, new
places go to whoever is below its share, and as many running sequences of tenants above theirs give way as that takes:
answers of thousands of tokens would hold the places for longer than the other tenant can wait.

A share is seldom a whole number. Each tenant is sure of the next smaller one: others above theirs give way to it, and
free places are kept for it. What is left over goes by turns (fairness.py), to nobody beyond the next larger one, so
nobody starves where there are fewer places than tenants, and two never take a place from each other in turn.

Where several gateways share the places of a model, shares are of what all of them hold and ask for. What a tenant lacks
is given out by each gateway in the part of the tenant's requests that wait there, and what it has too much is given up
by each in the part that runs there, or by others where it cannot give way. Gateways that see the same round so that
their parts add up to the whole, and what is left over of what is given out goes to another one of them from second to
second.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import floor
from typing import Final, NamedTuple

PHASE_NS: Final = 1_000_000_000
GOLDEN: Final = 0.6180339887498949
"""Multiples of it fill the unit interval evenly (Weyl)."""


class PlaceDemand(NamedTuple):
    """What one tenant asks for."""

    running: int
    """Sequences that hold a place."""
    waiting: int
    """Sequences that wait for one; lines of batch jobs do not count, which wait behind all others."""
    weight: int = 1

    @property
    def wanted(self) -> int:
        """Places that it would use."""
        return self.running + self.waiting


class PlaceShare(NamedTuple):
    """Places of one tenant, as whole numbers around its share."""

    least: int
    """With fewer than these, others give way to it."""
    most: int
    """With these it gets no more."""


def place_shares(places: int, demands: Mapping[str, PlaceDemand]) -> dict[str, PlaceShare]:
    """The share of each tenant of `places`, which are all that there are, held or free."""
    shares: dict[str, PlaceShare] = {}
    asking = [(tenant, demand) for tenant, demand in demands.items() if demand.wanted]
    asking.sort(key=lambda each: each[1].wanted / each[1].weight)
    weights, left = sum(demand.weight for _, demand in asking), places
    for at, (tenant, demand) in enumerate(asking):
        if demand.wanted * weights > left * demand.weight:  # so does everyone after it
            parts = ((other, left * wants.weight) for other, wants in asking[at:])
            shares |= {other: PlaceShare(part // weights, -(-part // weights)) for other, part in parts}
            break
        shares[tenant] = PlaceShare(demand.wanted, demand.wanted)
        left -= demand.wanted
        weights -= demand.weight
    return shares


class GatewayPart(NamedTuple):
    """What one gateway has of something that all of them have together."""

    before: int
    """Of gateways that come before it, by name."""
    here: int

    def of(self, total: int, everywhere: int, phase: float) -> int:
        """Its part of `total`. phase: from 0 to 1, the same at all gateways: who gets what is left over."""
        if self.here >= everywhere:
            return total
        end, start = total * (self.before + self.here) / everywhere, total * self.before / everywhere
        return floor(end + phase) - floor(start + phase)


def phase_at(now_ns: int) -> float:
    """Another one each second, spread evenly in the long run."""
    return now_ns // PHASE_NS * GOLDEN % 1


class GatewayYield(NamedTuple):
    """Sequences of one tenant at one gateway."""

    running: int
    """Those that hold a place."""
    able: int
    """Those of them that can give way."""
    gave_way: int
    """Those that have lately."""

    @property
    def weight(self) -> int:
        """Its part of all that give way is in proportion."""
        return self.running + self.gave_way

    def bounded(self, part: int) -> int:
        """At least what has given way, and at most all that can as well."""
        return min(max(part, self.gave_way), self.able + self.gave_way)


def yields_by_gateway(count: int, gateways: Sequence[GatewayYield]) -> list[int]:
    """How many of one tenant's sequences give way at each gateway, where `count` do at all of them.

    Its part of all that give way, those that have lately included, less what has there. So a gateway never takes on
    what another has given up, or is about to, while neither has heard of the other's. What one cannot give up is made
    up for by the others, and what it gave up beyond its part is taken off theirs: parts are cut anew among those within
    their bounds, as lengths are in CSS (Flexible Box Layout, 9.7). What is left over of parts always goes to the same
    one: in turns, two would give it up."""
    left = min(count, sum(each.able for each in gateways)) + sum(each.gave_way for each in gateways)
    within, found = list(range(len(gateways))), [0] * len(gateways)
    while True:
        parts = dict(zip(within, _cut(left, [gateways[place].weight for place in within]), strict=True))
        more = {place: gateways[place].bounded(part) - part for place, part in parts.items()}
        too_many = sum(more.values())
        at_bound = [place for place in within if not too_many or more[place] * too_many > 0]
        for place in at_bound:
            found[place] = parts[place] + more[place]
            left -= found[place]
        within = [place for place in within if place not in at_bound]
        if not within:
            return [part - each.gave_way for part, each in zip(found, gateways, strict=True)]


def _cut(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion, along one line."""
    everywhere, ends = max(sum(weights), 1), list(accumulate(weights, initial=0))
    return [total * end // everywhere - total * start // everywhere for start, end in pairwise(ends)]


class PlaceAllowance:
    """Who may be given the places that are free, in one round of binding."""

    def __init__(
        self,
        places: int,
        free: int,
        demands: Mapping[str, PlaceDemand],
        parts: Mapping[str, GatewayPart] | None = None,
        phase: float = 0.0,
    ) -> None:
        """free: of the places, here. parts: of those that wait, by tenant; None: all wait here."""
        self._due: dict[str, int] = {}
        self._more: dict[str, int] = {}
        for tenant, share in place_shares(places, demands).items():
            running, waiting = demands[tenant].running, demands[tenant].waiting
            part = GatewayPart(0, waiting) if parts is None else parts[tenant]
            self._due[tenant] = part.of(max(share.least - running, 0), waiting, phase)
            self._more[tenant] = part.of(max(share.most - max(running, share.least), 0), waiting, phase)
        self._left_over = max(free - sum(self._due.values()), 0)

    def take(self, tenant: str) -> bool:
        """Whether the tenant may have one more; it has it then."""
        if self._due.get(tenant, 0):
            self._due[tenant] -= 1
            return True
        if self._left_over and self._more.get(tenant, 0):
            self._more[tenant] -= 1
            self._left_over -= 1
            return True
        return False

    def asked(self, waiting: Mapping[str, int]) -> int:
        """Of those that wait by tenant, how many may have a place once there are some."""
        return sum(min(count, self._due.get(t, 0) + self._more.get(t, 0)) for t, count in waiting.items())


def places_to_yield(places: int, free: int, demands: Mapping[str, PlaceDemand]) -> dict[str, int]:
    """How many running sequences of each tenant give way: those beyond `most` to whoever has less than its own, then
    those beyond `least` to whoever has less than that. `free`: places that are, or are about to be."""
    shares = place_shares(places, demands)
    yields: dict[str, int] = {}
    for bounds in ({t: share.most for t, share in shares.items()}, {t: share.least for t, share in shares.items()}):
        lacking = sum(max(bound - demands[tenant].running, 0) for tenant, bound in bounds.items())
        over = {t: demands[t].running - yields.get(t, 0) - bound for t, bound in bounds.items()}
        over = {tenant: count for tenant, count in over.items() if count > 0}
        count = min(lacking - free - sum(yields.values()), sum(over.values()))
        if count > 0:
            for tenant, gives in _furthest_above(over, count, {t: demands[t].weight for t in over}).items():
                yields[tenant] = yields.get(tenant, 0) + gives
    return yields


def _furthest_above(over: Mapping[str, int], count: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Take `count` of the places in `over`, each from the tenant with the most left for its weight; of equals from the
    one whose name comes last.

    All tenants come down to one level, at most one place too far each; the least of these go back.
    """
    order = sorted(over, key=lambda t: over[t] / weights[t], reverse=True)
    above, weight = -count, 0  # the level is above / weight
    for tenant in order:
        if weight and over[tenant] * weight <= above * weights[tenant]:
            break
        above += over[tenant]
        weight += weights[tenant]
    taken = {tenant: over[tenant] - above * weights[tenant] // weight for tenant in order}
    taken = {tenant: gives for tenant, gives in taken.items() if gives > 0}
    lowest = [((over[tenant] - gives + 1) / weights[tenant], tenant) for tenant, gives in taken.items()]
    heapify(lowest)
    for _ in range(sum(taken.values()) - count):
        _, tenant = heappop(lowest)
        taken[tenant] -= 1
        if taken[tenant]:
            heappush(lowest, ((over[tenant] - taken[tenant] + 1) / weights[tenant], tenant))
    return {tenant: gives for tenant, gives in taken.items() if gives}


def queue_room(max_waiting: int, waiting: int, own: int, weight: int) -> int:
    """How many more of a tenant's requests may wait, of which `own` do, in a queue that holds `waiting` of
    `max_waiting`.

    A dynamic threshold (Choudhury and Hahne, IEEE/ACM ToN 1998): a tenant may take its weight times what it leaves
    free. One of weight 1 alone gets half, each of two a third, and some is free for the next one that comes.
    """
    return max((weight * (max_waiting - waiting) - own) // (weight + 1), 0)
