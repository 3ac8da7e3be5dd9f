"""Properties of places to decode: shared by weight while tenants wait, and never idle."""

from collections.abc import Mapping
from math import ceil
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.gateway.places import (
    GatewayPart,
    GatewayYield,
    PlaceAllowance,
    PlaceDemand,
    PlaceShare,
    phase_at,
    place_shares,
    places_to_yield,
    queue_room,
    yields_by_gateway,
)

demands = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(PlaceDemand, st.integers(0, 40), st.integers(0, 40), st.integers(1, 9)),
    max_size=6,
)
frees = st.integers(0, 60)


def places_of(requested: dict[str, PlaceDemand], free: int) -> int:
    return free + sum(demand.running for demand in requested.values())


def given_out(requested: dict[str, PlaceDemand], places: int, free: int, first: list[str]) -> dict[str, int]:
    """Return the places that each tenant gets, with the choices of `first` at the head of the queue."""
    allowance, taken = PlaceAllowance(places, free, requested), dict.fromkeys(requested, 0)
    for tenant in first:
        for _ in range(requested[tenant].waiting):
            if sum(taken.values()) < free and allowance.take(tenant):
                taken[tenant] += 1
    return taken


@given(demands, frees, st.randoms())
def test_no_place_stays_free_while_a_choice_waits(by_tenant: dict[str, PlaceDemand], free: int, chance: Random) -> None:
    order = chance.sample(sorted(by_tenant), len(by_tenant))
    taken = given_out(by_tenant, places_of(by_tenant, free), free, order)
    assert sum(taken.values()) == min(free, sum(demand.waiting for demand in by_tenant.values()))


@given(demands, frees)
def test_a_tenant_below_its_share_gets_a_place_whatever_others_hold(
    by_tenant: dict[str, PlaceDemand], free: int
) -> None:
    """Together with preempted places there is a place for each eligible choice."""
    places = places_of(by_tenant, free)
    shares, yields = place_shares(places, by_tenant), places_to_yield(places, free, by_tenant)
    due = sum(max(shares[tenant].least - by_tenant[tenant].running, 0) for tenant in shares)
    assert free + sum(yields.values()) >= due
    wanted = sum(max(shares[tenant].most - by_tenant[tenant].running, 0) for tenant in shares)
    assert sum(yields.values()) <= max(wanted - free, 0), "no more than it takes"


@given(demands, frees)
def test_no_tenant_is_preempted_below_its_share(by_tenant: dict[str, PlaceDemand], free: int) -> None:
    places = places_of(by_tenant, free)
    shares = place_shares(places, by_tenant)
    for tenant, count in places_to_yield(places, free, by_tenant).items():
        assert by_tenant[tenant].running - count >= shares[tenant].least


@given(demands, st.integers(0, 200))
def test_shares_follow_weights_if_every_tenant_wants_more(by_tenant: dict[str, PlaceDemand], places: int) -> None:
    shares = place_shares(places, by_tenant)
    for one, share in shares.items():
        assert share.least <= share.most <= min(share.least + 1, by_tenant[one].wanted)
        for other, others_share in shares.items():
            if share.most < by_tenant[one].wanted:  # it could use more, so the other has no more for its weight
                assert others_share.least / by_tenant[other].weight <= share.most / by_tenant[one].weight + 1e-9
    assert sum(share.least for share in shares.values()) <= places
    assert sum(share.most for share in shares.values()) >= min(places, sum(each.wanted for each in by_tenant.values()))


@given(demands, frees, st.randoms())
def test_preempted_places_go_to_those_they_were_preempted_for(
    by_tenant: dict[str, PlaceDemand], free: int, chance: Random
) -> None:
    """This holds in any order, so no choice is preempted again, and two tenants never alternate forever."""
    places = places_of(by_tenant, free)
    yields = places_to_yield(places, free, by_tenant)
    now = {t: PlaceDemand(each.running - yields.get(t, 0), each.waiting + yields.get(t, 0), each.weight)
           for t, each in by_tenant.items()}  # fmt: skip
    left = free + sum(yields.values())
    taken = given_out(now, places, left, chance.sample(sorted(now), len(now)))
    after = {t: each._replace(running=each.running + taken[t], waiting=each.waiting - taken[t])
             for t, each in now.items()}  # fmt: skip
    assert places_to_yield(places, left - sum(taken.values()), after) == {}
    shares = place_shares(places, after)
    assert all(after[tenant].running >= share.least for tenant, share in shares.items())


def yielded_one_by_one(places: int, free: int, demands: Mapping[str, PlaceDemand]) -> dict[str, int]:
    """Return the result of `places_to_yield` by one turn per place."""
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


@settings(max_examples=500)
@given(demands, st.integers(0, 12), st.integers(-40, 40))
def test_the_tenant_furthest_above_its_weighted_share_is_preempted_one_by_one(
    by_tenant: dict[str, PlaceDemand], free: int, more: int
) -> None:
    """This includes fewer places than are held, and more."""
    places = max(places_of(by_tenant, free) + more, 0)
    assert places_to_yield(places, free, by_tenant) == yielded_one_by_one(places, free, by_tenant)


def shares_level_by_level(places: int, demands: Mapping[str, PlaceDemand]) -> dict[str, PlaceShare]:
    """Return the result of `place_shares` by one round for each level at which tenants have all they want."""
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


@given(demands, st.integers(0, 200))
def test_shares_equal_those_of_a_rising_level(by_tenant: dict[str, PlaceDemand], places: int) -> None:
    assert place_shares(places, by_tenant) == shares_level_by_level(places, by_tenant)


def test_large_counts_take_no_longer() -> None:
    """A turn for each place would take minutes."""
    by_tenant = {"x": PlaceDemand(10**9, 0), "y": PlaceDemand(0, 10**9)}
    assert places_to_yield(10**9, 0, by_tenant) == {"x": 10**9 // 2}


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 40), st.integers(0, 4), st.randoms())
def test_a_tenant_that_holds_everything_leaves_others_their_places(
    weights: list[int], places: int, flooded: int, chance: Random
) -> None:
    names = [f"t{number}" for number in range(len(weights))]
    flood = names[flooded % len(names)]
    by_tenant = {name: PlaceDemand(places if name == flood else 0, 100, weight)
             for name, weight in zip(names, weights, strict=True)}  # fmt: skip
    by_tenant[flood] = by_tenant[flood]._replace(running=places - places_to_yield(places, 0, by_tenant).get(flood, 0))
    free = places - by_tenant[flood].running
    taken = given_out(by_tenant, places, free, chance.sample(names, len(names)))
    for name, weight in zip(names, weights, strict=True):
        held, share = by_tenant[name].running + taken[name], places * weight / sum(weights)
        assert share - 1 < held < share + 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(10, 2000))
def test_a_queue_always_has_room_for_the_next_tenant(weights: list[int], max_waiting: int) -> None:
    held: list[int] = []
    for weight in weights:
        while (room := queue_room(max_waiting, sum(held), 0, weight)) > 0 and len(held) < len(weights):
            held.append(room)
            break
    left = max_waiting - sum(held)
    assert left >= 0
    whole = max_waiting
    for weight in weights:
        whole //= weight + 1
    assert left >= whole


@given(st.integers(1, 9), st.integers(2, 2000), st.integers(0, 500))
def test_a_tenant_alone_fills_only_its_part_of_the_queue(weight: int, most: int, own: int) -> None:
    room = queue_room(most, own, own, weight)
    part = most * weight // (weight + 1)
    assert room == 0 if own >= part else own + room in (part - 1, part)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 2**62))
def test_the_parts_of_gateways_add_up_to_the_whole(held: list[int], total: int, now_ns: int) -> None:
    everywhere, total = sum(held), min(total, sum(held))
    parts = [GatewayPart(sum(held[:place]), here).of(total, everywhere, phase_at(now_ns))
             for place, here in enumerate(held)]  # fmt: skip
    assert sum(parts) == total
    assert all(part <= here for part, here in zip(parts, held, strict=True))


@st.composite
def yielding(draw: st.DrawFn) -> GatewayYield:
    running = draw(st.integers(0, 20))
    return GatewayYield(running, draw(st.integers(0, running)), draw(st.integers(0, 20)))


@given(st.lists(yielding(), min_size=1, max_size=6), st.integers(0, 60))
def test_all_gateways_together_preempt_exactly_the_missing_places(gateways: list[GatewayYield], count: int) -> None:
    """This holds as far as gateways can, whatever was preempted before."""
    parts = yields_by_gateway(count, gateways)
    assert sum(parts) == min(count, sum(each.able for each in gateways))
    assert all(0 <= part <= each.able for part, each in zip(parts, gateways, strict=True))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 60), st.data())
def test_a_gateways_part_is_unchanged_while_others_preempt_theirs(
    able: list[int], count: int, data: st.DataObject
) -> None:
    """This holds whether it knows of that or not."""
    parts = yields_by_gateway(count, [GatewayYield(each, each, 0) for each in able])
    gave = [data.draw(st.integers(0, part)) for part in parts]
    after = [GatewayYield(each - gives, each - gives, gives) for each, gives in zip(able, gave, strict=True)]
    left = min(count, sum(able)) - sum(gave)
    assert yields_by_gateway(left, after) == [part - gives for part, gives in zip(parts, gave, strict=True)]


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(0, 2**60))
def test_a_gateway_with_a_small_part_gets_the_remainder_in_turn(held: list[int], start_ns: int) -> None:
    """One place at a time is preempted; each gateway gets it in proportion to its part, so none starves."""
    everywhere, seconds = sum(held), 2000
    for place, here in enumerate(held):
        part = GatewayPart(sum(held[:place]), here)
        got = sum(part.of(1, everywhere, phase_at(start_ns + second * 10**9)) for second in range(seconds))
        assert abs(got / seconds - here / everywhere) < 0.01


@given(demands, demands, st.integers(0, 2**62))
def test_two_gateways_grant_what_one_would(
    one: dict[str, PlaceDemand], two: dict[str, PlaceDemand], now_ns: int
) -> None:
    """Each gateway knows the other's state."""
    nobody, phase = PlaceDemand(0, 0), phase_at(now_ns)
    by_tenant = {t: PlaceDemand(*(sum(each.get(t, nobody)[at] for each in (one, two)) for at in (0, 1)))
             for t in one.keys() | two.keys()}  # fmt: skip
    free = sum(each.waiting for each in by_tenant.values())
    places = places_of(by_tenant, free)
    whole = PlaceAllowance(places, free, by_tenant).within_share({t: each.waiting for t, each in by_tenant.items()})
    parts = 0
    for first, here, before in ((True, one, {}), (False, two, one)):
        of = {t: GatewayPart(before.get(t, nobody).waiting, here.get(t, nobody).waiting) for t in by_tenant}
        found = PlaceAllowance(places, free, by_tenant, of, phase)
        parts += found.within_share({t: each.waiting for t, each in here.items()})
        assert first or parts == whole
