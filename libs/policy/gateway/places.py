"""The division of one model's decode places between tenants while some of them wait for a place.

The shares are weighted max-min fair (Bertsekas and Gallager, Data Networks, 6.5). No tenant gets more than it
demands, and what it leaves is divided by weight among those that demand more. A tenant alone may hold every place.
When another arrives, new places go to tenants below their share. If those are too few, running sequences of tenants
above theirs give way. Answers of thousands of tokens would hold the places for longer than the other tenant can
wait.

A share is seldom a whole number. Each tenant is guaranteed the next smaller one: others above theirs give way to it,
and free places are kept for it. The remainder goes by turns (fairness.py), to no tenant beyond its next larger whole
number. So no tenant starves if there are fewer places than tenants, and two tenants never keep taking a place from each
other.

Where several gateways share the places of a model, shares cover what all of them hold and demand. A tenant's
missing places are given out by each gateway in proportion to the requests waiting there. Its surplus is given up by
each in proportion to what runs there, or by others where it cannot give way. Gateways with the same view round so
that their parts add up to the whole. The remainder of what is given out goes to a different gateway every second.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import floor
from typing import Final, NamedTuple

PHASE_NS: Final = 1_000_000_000
# Multiples of it, modulo 1, fill the unit interval evenly (Weyl).
GOLDEN: Final = 0.6180339887498949


class PlaceDemand(NamedTuple):
    """The demand of one tenant for places."""

    running: int
    waiting: int
    """The sequences that wait for a place, without batch lines, which wait behind all others."""
    weight: int = 1

    @property
    def wanted(self) -> int:
        """The number of places that the tenant would use."""
        return self.running + self.waiting


class PlaceShare(NamedTuple):
    """The whole numbers of places around one tenant's share."""

    least: int
    """The number of places below which others give way to the tenant."""
    most: int
    """The number of places above which the tenant gets no more."""


def place_shares(places: int, demands: Mapping[str, PlaceDemand]) -> dict[str, PlaceShare]:
    """Return each tenant's share of all `places`, held and free ones together."""
    shares: dict[str, PlaceShare] = {}
    asking = [(tenant, demand) for tenant, demand in demands.items() if demand.wanted]
    asking.sort(key=lambda each: each[1].wanted / each[1].weight)
    weights, left = sum(demand.weight for _, demand in asking), places
    for at, (tenant, demand) in enumerate(asking):
        if demand.wanted * weights > left * demand.weight:  # and so do all later ones
            parts = ((other, left * wants.weight) for other, wants in asking[at:])
            shares |= {other: PlaceShare(part // weights, -(-part // weights)) for other, part in parts}
            break
        shares[tenant] = PlaceShare(demand.wanted, demand.wanted)
        left -= demand.wanted
        weights -= demand.weight
    return shares


class GatewayPart(NamedTuple):
    """One gateway's part of a quantity summed over all gateways."""

    before: int
    """The sum over the gateways that precede this one by name."""
    here: int

    def of(self, total: int, everywhere: int, phase: float) -> int:
        """Return this gateway's part of `total`. `phase` (0 to 1, equal at all gateways) decides which gateways get the
        remainder.
        """
        if self.here >= everywhere:
            return total
        end, start = total * (self.before + self.here) / everywhere, total * self.before / everywhere
        return floor(end + phase) - floor(start + phase)


def phase_at(now_ns: int) -> float:
    """Return a phase that changes every second and is evenly distributed in the long run."""
    return now_ns // PHASE_NS * GOLDEN % 1


class GatewayYield(NamedTuple):
    """The sequences of one tenant at one gateway that may give way."""

    running: int
    able: int
    """The running sequences that can give way."""
    gave_way: int
    """The sequences that gave way recently."""

    @property
    def weight(self) -> int:
        """The weight of this gateway's part of all sequences that give way."""
        return self.running + self.gave_way

    def bounded(self, part: int) -> int:
        """Return `part`, at least what has given way and at most that plus what can."""
        return min(max(part, self.gave_way), self.able + self.gave_way)


def yields_by_gateway(count: int, gateways: Sequence[GatewayYield]) -> list[int]:
    """Return how many of one tenant's sequences give way at each gateway, where `count` do in total.

    A gateway's number is its part of all that give way, recent ones included, less its own recent ones. So a gateway
    never gives up what another has given up or is about to, even before they exchange reports. What one gateway cannot
    give up, the others do. What it gave up beyond its part is deducted from theirs. To do so, parts are divided again
    among the gateways within their bounds, as lengths are in CSS (Flexible Box Layout, 9.7). The remainder always goes
    to the same gateway, because in turns two would give it up.
    """
    left = min(count, sum(each.able for each in gateways)) + sum(each.gave_way for each in gateways)
    within, found = list(range(len(gateways))), [0] * len(gateways)
    while True:
        parts = dict(zip(within, _cut(left, [gateways[index].weight for index in within]), strict=True))
        more = {index: gateways[index].bounded(part) - part for index, part in parts.items()}
        too_many = sum(more.values())
        at_bound = [index for index in within if not too_many or more[index] * too_many > 0]
        for index in at_bound:
            found[index] = parts[index] + more[index]
            left -= found[index]
        within = [index for index in within if index not in at_bound]
        if not within:
            return [part - each.gave_way for part, each in zip(found, gateways, strict=True)]


def _cut(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into integers in proportion to the weights, rounding the cumulative sums."""
    everywhere, ends = max(sum(weights), 1), list(accumulate(weights, initial=0))
    return [total * end // everywhere - total * start // everywhere for start, end in pairwise(ends)]


class PlaceAllowance:
    """The free places that each tenant may still be given in one binding round."""

    def __init__(
        self,
        places: int,
        free: int,
        demands: Mapping[str, PlaceDemand],
        parts: Mapping[str, GatewayPart] | None = None,
        phase: float = 0.0,
    ) -> None:
        """Divide the free places of a model, of which `free` are free here.

        `parts` is this gateway's part of each tenant's waiting requests; None if all of them wait here.
        """
        self._owed: dict[str, int] = {}
        self._more: dict[str, int] = {}
        for tenant, share in place_shares(places, demands).items():
            running, waiting = demands[tenant].running, demands[tenant].waiting
            part = GatewayPart(0, waiting) if parts is None else parts[tenant]
            self._owed[tenant] = part.of(max(share.least - running, 0), waiting, phase)
            self._more[tenant] = part.of(max(share.most - max(running, share.least), 0), waiting, phase)
        self._left_over = max(free - sum(self._owed.values()), 0)

    def take(self, tenant: str) -> bool:
        """Take one more place for the tenant and return whether it was allowed."""
        if self._owed.get(tenant, 0):
            self._owed[tenant] -= 1
            return True
        if self._left_over and self._more.get(tenant, 0):
            self._more[tenant] -= 1
            self._left_over -= 1
            return True
        return False

    def within_share(self, waiting: Mapping[str, int]) -> int:
        """Return the number of the waiting requests, by tenant, that may have a place once some are free."""
        return sum(min(count, self._owed.get(t, 0) + self._more.get(t, 0)) for t, count in waiting.items())


def places_to_yield(places: int, free: int, demands: Mapping[str, PlaceDemand]) -> dict[str, int]:
    """Return how many running sequences of each tenant give way.

    First those beyond `most` give way to tenants with less than their own `most`, then those beyond `least` to tenants
    with less than their `least`. `free` counts places that are free or about to be.
    """
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
    """Take `count` of the places in `over`, each from the tenant with the most left for its weight.

    Among equals the tenant whose name sorts last is taken from. All tenants come down to one level, each at most
    one place too far. The surplus is returned to the lowest.
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
    """Return how many more requests of a tenant with `own` waiting may join a queue that holds `waiting` of
    `max_waiting`.

    This is a dynamic threshold (Choudhury and Hahne, IEEE/ACM ToN 1998): a tenant may use its weight times what it
    leaves free. One of weight 1 alone gets half and each of two a third, so that some room is left for a newcomer.
    """
    return max((weight * (max_waiting - waiting) - own) // (weight + 1), 0)
