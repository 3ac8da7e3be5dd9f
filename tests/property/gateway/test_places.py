"""Tenants share the places to decode by weight while they wait, and leave none of them idle."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.places import (
    PlaceAllowance,
    PlaceDemand,
    place_shares,
    places_to_yield,
    queue_room,
)

demands = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(PlaceDemand, st.integers(0, 40), st.integers(0, 40), st.integers(1, 9)),
    max_size=6,
)
frees = st.integers(0, 60)


def places_of(asked: dict[str, PlaceDemand], free: int) -> int:
    return free + sum(demand.running for demand in asked.values())


def given_out(asked: dict[str, PlaceDemand], places: int, free: int, first: list[str]) -> dict[str, int]:
    """Places that each tenant gets, where those of `first` come first in the queue."""
    allowance, taken = PlaceAllowance(places, free, asked), dict.fromkeys(asked, 0)
    for tenant in first:
        for _ in range(asked[tenant].waiting):
            if sum(taken.values()) < free and allowance.take(tenant):
                taken[tenant] += 1
    return taken


@given(demands, frees, st.randoms())
def test_no_place_stays_free_while_somebody_waits(asked: dict[str, PlaceDemand], free: int, chance: Random) -> None:
    order = chance.sample(sorted(asked), len(asked))
    taken = given_out(asked, places_of(asked, free), free, order)
    assert sum(taken.values()) == min(free, sum(demand.waiting for demand in asked.values()))


@given(demands, frees)
def test_who_waits_below_its_share_may_have_it_whatever_others_hold(asked: dict[str, PlaceDemand], free: int) -> None:
    """Together with what gives way there is a place for each that is due."""
    places = places_of(asked, free)
    shares, yields = place_shares(places, asked), places_to_yield(places, free, asked)
    due = sum(max(shares[tenant].least - asked[tenant].running, 0) for tenant in shares)
    assert free + sum(yields.values()) >= due
    wanted = sum(max(shares[tenant].most - asked[tenant].running, 0) for tenant in shares)
    assert sum(yields.values()) <= max(wanted - free, 0), "no more than it takes"


@given(demands, frees)
def test_nobody_gives_way_below_its_share(asked: dict[str, PlaceDemand], free: int) -> None:
    places = places_of(asked, free)
    shares = place_shares(places, asked)
    for tenant, count in places_to_yield(places, free, asked).items():
        assert asked[tenant].running - count >= shares[tenant].least


@given(demands, st.integers(0, 200))
def test_shares_are_by_weight_where_all_ask_for_more(asked: dict[str, PlaceDemand], places: int) -> None:
    shares = place_shares(places, asked)
    for one, share in shares.items():
        assert share.least <= share.most <= min(share.least + 1, asked[one].wanted)
        for other, others_share in shares.items():
            if share.most < asked[one].wanted:  # it could use more, so the other has no more for its weight
                assert others_share.least / asked[other].weight <= share.most / asked[one].weight + 1e-9
    assert sum(share.least for share in shares.values()) <= places
    assert sum(share.most for share in shares.values()) >= min(places, sum(each.wanted for each in asked.values()))


@given(demands, frees, st.randoms())
def test_what_gave_way_goes_to_those_it_gave_way_to(asked: dict[str, PlaceDemand], free: int, chance: Random) -> None:
    """In whatever order they wait; so nobody gives way again, and two do not take places from each other for ever."""
    places = places_of(asked, free)
    yields = places_to_yield(places, free, asked)
    now = {t: PlaceDemand(each.running - yields.get(t, 0), each.waiting + yields.get(t, 0), each.weight)
           for t, each in asked.items()}  # fmt: skip
    left = free + sum(yields.values())
    taken = given_out(now, places, left, chance.sample(sorted(now), len(now)))
    after = {t: each._replace(running=each.running + taken[t], waiting=each.waiting - taken[t])
             for t, each in now.items()}  # fmt: skip
    assert places_to_yield(places, left - sum(taken.values()), after) == {}
    shares = place_shares(places, after)
    assert all(after[tenant].running >= share.least for tenant, share in shares.items())


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 40), st.integers(0, 4), st.randoms())
def test_a_tenant_that_holds_everything_leaves_others_their_places(
    weights: list[int], places: int, flooded: int, chance: Random
) -> None:
    names = [f"t{number}" for number in range(len(weights))]
    flood = names[flooded % len(names)]
    asked = {name: PlaceDemand(places if name == flood else 0, 100, weight)
             for name, weight in zip(names, weights, strict=True)}  # fmt: skip
    asked[flood] = asked[flood]._replace(running=places - places_to_yield(places, 0, asked).get(flood, 0))
    free = places - asked[flood].running
    taken = given_out(asked, places, free, chance.sample(names, len(names)))
    for name, weight in zip(names, weights, strict=True):
        held, share = asked[name].running + taken[name], places * weight / sum(weights)
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
def test_a_tenant_alone_may_wait_in_its_part_of_the_queue_and_no_more(weight: int, most: int, own: int) -> None:
    room = queue_room(most, own, own, weight)
    part = most * weight // (weight + 1)
    assert room == 0 if own >= part else own + room in (part - 1, part)
