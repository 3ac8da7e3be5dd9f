"""Properties of a tenant's limit over any minute, for one gateway and for several that share it."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.usage import (
    AHEAD_PERCENT,
    IDLE_S,
    SLOTS,
    WINDOW_S,
    Lease,
    MinuteWindow,
    ahead,
    held,
    local_share,
)

STEPS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 12), st.integers(0, 12)), max_size=120)


def worst(used: Iterable[tuple[float, int]]) -> int:
    """The most units within any minute."""
    events = list(used)
    return max((sum(n for at, n in events if 0 <= at - begin < WINDOW_S) for begin, _ in events), default=0)


@given(limit=st.integers(1, 40), steps=STEPS)
def test_no_minute_exceeds_the_limit(limit: int, steps: list[tuple[float, int, int]]) -> None:
    window, now_s, used = MinuteWindow(), 1000.0, []
    for after_s, want, least in steps:
        now_s += after_s
        granted = window.take(limit, want, least, now_s)
        assert granted == 0 or max(least, 1) <= granted <= want
        used.append((now_s, granted))
    assert worst(used) <= limit


@given(limit=st.integers(1, 40), steps=STEPS, need=st.integers(1, 40))
def test_a_refused_request_fits_after_the_reported_wait(
    limit: int, steps: list[tuple[float, int, int]], need: int
) -> None:
    window, now_s = MinuteWindow(), 1000.0
    for after_s, want, least in steps:
        now_s += after_s
        window.take(limit, want, least, now_s)
    wait_s = window.wait_s(limit, need, now_s)
    assert 0 <= wait_s <= SLOTS
    if need <= limit:
        assert window.take(limit, need, need, now_s + wait_s) == need


@given(limit=st.integers(1, 40), steps=STEPS)
def test_returned_units_can_be_taken_again_at_once(limit: int, steps: list[tuple[float, int, int]]) -> None:
    window, now_s = MinuteWindow(), 1000.0
    for after_s, want, _ in steps:
        now_s += after_s
        before = window.used(now_s)
        granted = window.take(limit, want, 1, now_s)
        window.add(-granted, now_s)
        assert window.used(now_s) == before


@given(limit=st.integers(50, 120), arrivals=st.lists(st.tuples(st.floats(0, 0.5), st.booleans()), max_size=400))
def test_two_gateways_that_share_a_limit_exceed_it_by_at_most_five_percent(
    limit: int, arrivals: list[tuple[float, bool]]
) -> None:
    shared, leases, now_s, refused = MinuteWindow(), (Lease(), Lease()), 1000.0, False
    admitted: list[float] = []
    for after_s, which in arrivals:
        now_s += after_s
        for lease in leases:
            owed = lease.settle(now_s)
            shared.add(owed, now_s)
        lease = leases[which]
        if (least := lease.need(1)) > 0:
            lease.balance += shared.take(limit, least + ahead(limit), least, now_s)
        if lease.need(1) > 0:
            refused = True
            in_minute = sum(1 for at in admitted if now_s - at <= SLOTS)
            assert in_minute >= limit * 0.95 - 1, "refused with room left"
            continue
        lease.spend(1, now_s)
        admitted.append(now_s)
    assert worst((at, 1) for at in admitted) <= limit * 1.05
    assert refused or len(admitted) == len(arrivals)


@given(first=st.integers(0, 30), steps=st.lists(st.integers(-5, 9), max_size=60))
def test_a_settled_lease_owes_nothing(first: int, steps: list[int]) -> None:
    lease = Lease(balance=first)
    counted = first  # when they were taken
    for number, units in enumerate(steps):
        lease.spend(units, number * 1.0)
        counted += lease.settle(number * 1.0 + IDLE_S)
        assert lease.balance == 0
    assert counted - lease.balance == sum(steps)


@given(limit=st.integers(1, 60), steps=st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 3)), max_size=80))
def test_gateways_together_hold_no_more_places_than_the_limit(limit: int, steps: list[tuple[int, int]]) -> None:
    running, places = [0, 0, 0], [0, 0, 0]
    for which, change in steps:
        if change < 0:
            running[which] = max(running[which] - 1, 0)
            continue
        others = sum(places) - places[which]
        places[which] = held(limit, others, running[which], running[which] + change)
        if places[which] > running[which]:
            running[which] += 1
        assert sum(running) <= sum(places) <= limit


@given(limit=st.integers(1, 10_000), gateways=st.integers(0, 20))
def test_local_shares_add_up_to_at_most_the_limit(limit: int, gateways: int) -> None:
    share = local_share(limit, gateways)
    assert 1 <= share <= limit
    assert share * gateways <= max(limit, gateways)
    assert ahead(limit) * 100 <= limit * AHEAD_PERCENT
