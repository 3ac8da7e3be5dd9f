"""Properties of the late-last order: requests that can be in time come first, and none starves."""

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.order import (
    LATE_PATIENCE_NS,
    LATE_SHARE,
    LIMIT_MARGIN,
    MOST_SHARES,
    PREFILL_MARGIN,
    InTimeShares,
    Line,
    hopeless_from_ns,
)

S = 1_000_000_000


@dataclass(frozen=True)
class Item:
    number: int
    arrival_unix_ns: int = 0
    ttft_deadline_unix_ns: int = 0
    prompt_tokens: int = 100
    resumed: bool = False
    batch: bool = False


def line_of(items: list[Item], hopeless_ns: dict[int, float], prefill_ns: int = 0) -> Line[Item]:
    line = Line[Item]()
    for item in items:
        line.add(item.number, item)
        line.judge(item.number, hopeless_ns.get(item.number, inf), prefill_ns * item.prompt_tokens)
    return line


def numbers(line: Line[Item], now_ns: int) -> list[int]:
    return [item.number for item in line.in_order(now_ns)]


people = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.just(inf), st.integers(0, 40).map(float)), st.booleans(), st.booleans()),
    max_size=12,
)


@given(people, st.integers(0, 40), st.sets(st.integers(0, 11)))
def test_the_order_equals_a_sort_by_the_present_state(
    drawn: list[tuple[int, float, bool, bool]], now_ns: int, gone: set[int]
) -> None:
    items = [Item(number, at, resumed=resumed, batch=batch) for number, (at, _, resumed, batch) in enumerate(drawn)]
    late_ns = {item.number: inf if item.batch or item.resumed else drawn[item.number][1] for item in items}
    line = line_of(items, late_ns)
    for number in gone:
        assert line.remove(number) == (number < len(items))
    here = [item for item in items if item.number not in gone]
    late = {item.number for item in here if late_ns[item.number] <= now_ns}
    wanted = sorted(
        here, key=lambda each: (each.batch, each.number in late, not each.resumed, each.arrival_unix_ns, each.number)
    )
    assert numbers(line, now_ns) == [item.number for item in wanted]
    assert (len(line), line.late) == (len(here), len(late))
    assert line.hopeful_tokens == 100 * (len(here) - len(late))


@given(people, st.integers(0, 40), st.sets(st.integers(0, 11)), st.one_of(st.none(), st.floats(0.1, 1e3)))
def test_a_request_that_makes_room_still_precedes_late_ones_and_a_read_changes_nothing(
    drawn: list[tuple[int, float, bool, bool]], now_ns: int, gone: set[int], pace: float | None
) -> None:
    items = [Item(number, at, resumed=resumed, batch=batch) for number, (at, _, resumed, batch) in enumerate(drawn)]
    late_ns = {item.number: inf if item.batch or item.resumed else drawn[item.number][1] for item in items}
    line = line_of(items, late_ns, prefill_ns=1)
    for number in gone:
        line.remove(number)
    found = [item.number for item in line.in_order(now_ns, pace)]
    assert sorted(found) == [item.number for item in items if item.number not in gone]
    tail = [number for number in found if items[number].batch or late_ns[number] <= now_ns]
    assert found[len(found) - len(tail) :] == tail
    assert found == [item.number for item in line.in_order(now_ns, pace)]


def test_at_a_known_pace_the_longest_request_makes_room_for_others_of_its_class() -> None:
    items = [Item(1, 0, 90, prompt_tokens=800), *(Item(number, number, 99, prompt_tokens=40) for number in (2, 3, 4))]
    line = line_of(items, dict.fromkeys(range(1, 5), 60.0), prefill_ns=1)
    assert [each.number for each in line.in_order(0, pace=2.0)] == [2, 3, 4, 1]
    assert [each.number for each in line.in_order(0, pace=100.0)] == [1, 2, 3, 4]
    assert [each.number for each in line.in_order(0, pace=None)] == [1, 2, 3, 4]
    line.remove(3)
    line.remove(4)
    assert [each.number for each in line.in_order(0, pace=20.0)] == [1, 2], "there is time for both by now"


def test_a_class_makes_room_only_for_its_own() -> None:
    line = Line[Item]()
    for number, flow, tokens in ((1, "essays", 800), (2, "chat", 40), (3, "chat", 30)):
        line.add(number, Item(number, number, 99, prompt_tokens=tokens), turn=number, flow=flow)
        line.judge(number, 60.0, tokens)
    assert [each.number for each in line.in_order(0, pace=2.0)] == [1, 2, 3]


def essays_and_chat(late_essays: int = 0) -> Line[Item]:
    """Return a line in which a long essay of the same tenant precedes two chats, after some essays turned late."""
    line = Line[Item]()
    for number in range(100, 100 + late_essays):
        line.add(number, Item(number), flow="essays", tenant="acme")
        line.judge(number, -1.0)
    line.look(0)
    for number, flow, tokens in ((1, "essays", 800), (2, "chat", 40), (3, "chat", 30)):
        line.add(number, Item(number, number, 99, prompt_tokens=tokens), turn=number, flow=flow, tenant="acme")
        line.judge(number, 60.0, tokens)
    return line


def hopeful(line: Line[Item], pace: float | None) -> list[int]:
    return [each.number for each in line.in_order(0, pace) if each.number < 100]


def test_a_class_makes_room_for_other_classes_of_its_tenant_while_most_of_it_is_in_time() -> None:
    assert hopeful(essays_and_chat(), pace=2.0) == [2, 3, 1]
    assert hopeful(essays_and_chat(), pace=100.0) == [1, 2, 3], "there is time for all"


def test_a_class_with_too_few_in_time_makes_room_for_its_own_alone() -> None:
    fewest = next(late for late in range(1, 99) if hopeful(essays_and_chat(late), pace=2.0) == [1, 2, 3])
    shares = InTimeShares()
    for _ in range(fewest):
        assert shares.low() == set()
        shares.note("essays", in_time=False)
    assert shares.low() == {"essays"}


def test_a_class_makes_room_for_others_again_once_enough_of_it_leaves_in_time() -> None:
    line = essays_and_chat(late_essays=20)
    assert hopeful(line, pace=2.0) == [1, 2, 3]
    for number in range(200, 300):
        line.add(number, Item(number), flow="essays", tenant="acme")
        line.judge(number, 1e18)
        line.bound(number)
        line.remove(number)
    assert hopeful(line, pace=2.0) == [2, 3, 1]


def test_requests_that_are_never_late_do_not_raise_the_share_of_their_class() -> None:
    line = essays_and_chat(late_essays=20)
    for number in range(200, 300):
        line.add(number, Item(number, batch=True), flow="essays", tenant="acme")
        line.judge(number, inf)
        line.bound(number)
        line.remove(number)
    assert hopeful(line, pace=2.0) == [1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 2 * MOST_SHARES), st.booleans()), max_size=40))
def test_only_a_class_with_late_requests_is_low(noted: list[tuple[int, bool]]) -> None:
    shares = InTimeShares()
    for flow, in_time in noted:
        shares.note(flow, in_time=in_time)
    assert shares.low() <= {flow for flow, in_time in noted if not in_time}


def test_the_shares_of_no_more_than_so_many_classes_are_known() -> None:
    shares = InTimeShares()
    for flow in range(3 * MOST_SHARES):
        shares.note(flow, in_time=False)
    assert len(shares) == MOST_SHARES


def test_a_request_is_hopeless_once_its_prefill_and_a_margin_do_not_fit() -> None:
    item = Item(1, arrival_unix_ns=10 * S, ttft_deadline_unix_ns=12 * S)
    at_ns = hopeless_from_ns(item, prefill_ns=0.4 * S)
    assert at_ns == pytest.approx(12 * S - PREFILL_MARGIN * 0.4 * S - LIMIT_MARGIN * 2 * S)


@pytest.mark.parametrize(
    "item",
    [
        Item(1, ttft_deadline_unix_ns=0),
        Item(1, ttft_deadline_unix_ns=5, batch=True),
        Item(1, ttft_deadline_unix_ns=5, resumed=True),
    ],
)
def test_a_resumed_request_or_one_without_deadline_or_tenant_is_never_hopeless(item: Item) -> None:
    assert hopeless_from_ns(item, S) == inf


def test_a_hopeless_head_is_not_urgent() -> None:
    late, hopeful = Item(1, 0, 5 * S), Item(2, 1, 9 * S)
    line = line_of([late, hopeful], {1: 3.0 * S, 2: 7.0 * S})
    assert line.head_deadline_ns(2 * S) == 5 * S
    assert line.head_deadline_ns(3 * S) == 9 * S
    assert line.head_deadline_ns(7 * S) == 0


def test_late_requests_get_their_share_in_an_endless_overload() -> None:
    """One prompt is served at a time while a hopeful one always waits; the late one's turn comes by its share."""
    late = Item(0, 0, S, prompt_tokens=200)
    line = line_of([late], {0: 0.0})
    bound_tokens, number, now_ns = 0, 0, 0
    while 0 in numbers(line, now_ns):
        number, now_ns = number + 1, now_ns + S
        fresh = Item(number, now_ns, now_ns + 5 * S)
        line.add(number, fresh)
        line.judge(number, inf)
        first = next(line.in_order(now_ns))
        line.bound(first.number)
        line.remove(first.number)
        bound_tokens += first.prompt_tokens if first is fresh else 0
        assert number < 1000, "it starves"
    assert now_ns >= LATE_PATIENCE_NS
    assert bound_tokens * LATE_SHARE == pytest.approx(late.prompt_tokens, rel=0.2)


def test_old_departures_are_forgotten() -> None:
    line = Line[Item]()
    for number in range(5000):
        line.add(number, Item(number))
        line.judge(number, 1e18)
        line.remove(number)
    assert len(line._turning) < 2000
