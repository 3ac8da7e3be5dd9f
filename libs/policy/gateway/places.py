"""How tenants share the places to decode of one model while some of them wait for one. Pure.

Weighted max-min fairness (Bertsekas and Gallager, Data Networks, 6.5): nobody gets more than it asks for, and what one
leaves is shared by weight among those that ask for more. A tenant alone may hold every place. Once another comes, new
places go to whoever is below its share, and as many running sequences of tenants above theirs give way as that takes:
answers of thousands of tokens would hold the places for longer than the other tenant can wait.

A share is seldom a whole number. Each tenant is sure of the next smaller one: others above theirs give way to it, and
free places are kept for it. What is left over goes by turns (fairness.py), to nobody beyond the next larger one, so
nobody starves where there are fewer places than tenants, and two never take a place from each other in turn.
"""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple


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
    open_to = {tenant: demand for tenant, demand in demands.items() if demand.wanted}
    left = places
    while open_to:
        weights = sum(demand.weight for demand in open_to.values())
        content = [t for t, demand in open_to.items() if demand.wanted * weights <= left * demand.weight]
        if not content:
            for tenant, demand in open_to.items():
                part = left * demand.weight
                shares[tenant] = PlaceShare(part // weights, ceil(part / weights))
            break
        for tenant in content:
            wanted = open_to.pop(tenant).wanted
            shares[tenant] = PlaceShare(wanted, wanted)
            left -= wanted
    return shares


class PlaceAllowance:
    """Who may be given the places that are free, in one round of binding."""

    def __init__(self, places: int, free: int, demands: Mapping[str, PlaceDemand]) -> None:
        self._due: dict[str, int] = {}
        self._more: dict[str, int] = {}
        for tenant, share in place_shares(places, demands).items():
            running = demands[tenant].running
            self._due[tenant] = max(share.least - running, 0)
            self._more[tenant] = max(share.most - max(running, share.least), 0)
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


def places_to_yield(places: int, free: int, demands: Mapping[str, PlaceDemand]) -> dict[str, int]:
    """How many running sequences of each tenant give way: those beyond `most` to whoever has less than its own, then
    those beyond `least` to whoever has less than that. `free`: places that are, or are about to be."""
    shares = place_shares(places, demands)
    running = {tenant: demands[tenant].running for tenant in shares}
    yields: dict[str, int] = {}
    for bounds in ({t: share.most for t, share in shares.items()}, {t: share.least for t, share in shares.items()}):
        lacking = sum(max(bound - demands[tenant].running, 0) for tenant, bound in bounds.items())
        over = {tenant for tenant, bound in bounds.items() if running[tenant] > bound}
        for _ in range(lacking - free - sum(yields.values())):
            if not over:
                break
            most_over = max(over, key=lambda t: ((running[t] - bounds[t]) / demands[t].weight, t))
            yields[most_over] = yields.get(most_over, 0) + 1
            running[most_over] -= 1
            if running[most_over] == bounds[most_over]:
                over.remove(most_over)
    return yields


def queue_room(max_waiting: int, waiting: int, own: int, weight: int) -> int:
    """How many more of a tenant's requests may wait, of which `own` do, in a queue that holds `waiting` of
    `max_waiting`.

    A dynamic threshold (Choudhury and Hahne, IEEE/ACM ToN 1998): a tenant may take its weight times what it leaves
    free. One of weight 1 alone gets half, each of two a third, and some is free for the next one that comes.
    """
    return max((weight * (max_waiting - waiting) - own) // (weight + 1), 0)
