"""Properties of which requests make room: as few as possible, and none for another tenant or class."""

from itertools import combinations
from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from libs.policy.gateway.order import QueuedRequest, making_room

NOW_NS = 1_000
PACES = st.sampled_from([0.5, 1.0, 4.0])
ANY_LATEST = st.one_of(st.just(inf), st.integers(NOW_NS - 50, NOW_NS + 400).map(float))


@st.composite
def lines(draw: st.DrawFn, *, flows: int = 3, most: int = 12) -> list[QueuedRequest]:
    found = draw(st.lists(st.tuples(st.integers(0, flows - 1), st.integers(0, 100), ANY_LATEST), max_size=most))
    return [QueuedRequest(number, *each) for number, each in enumerate(found)]


def late(line: list[QueuedRequest], pace: float) -> list[QueuedRequest]:
    """Return the requests that start too late if all run one after another."""
    found, at_ns = [], float(NOW_NS)
    for due in line:
        if at_ns > due.latest_ns + 1e-6:
            found.append(due)
        at_ns += due.prefill_ns / pace
    return found


@given(lines(), PACES)
def test_every_remaining_request_starts_in_time(line: list[QueuedRequest], pace: float) -> None:
    found = making_room(line, NOW_NS, pace)
    assert late([due for due in line if due.number not in found], pace) == []


@given(lines(), PACES)
def test_a_class_whose_requests_would_all_be_in_time_makes_no_room(line: list[QueuedRequest], pace: float) -> None:
    found, pressed = making_room(line, NOW_NS, pace), {due.flow for due in late(line, pace)}
    assert {line[number].flow for number in found} <= pressed


@given(lines(), PACES)
def test_a_request_that_is_never_late_is_never_put_off(line: list[QueuedRequest], pace: float) -> None:
    assert all(line[number].latest_ns < inf for number in making_room(line, NOW_NS, pace))


@given(lines(flows=1, most=7), PACES)
@example(
    [
        QueuedRequest(0, 0, 90, NOW_NS + 0.0),
        QueuedRequest(1, 0, 10, NOW_NS + 50.0),
        QueuedRequest(2, 0, 10, NOW_NS + 60.0),
    ],
    1.0,
)
def test_no_smaller_choice_would_do_for_one_class_in_order_of_deadlines(line: list[QueuedRequest], pace: float) -> None:
    line = [due for due in line if due.latest_ns < inf]
    line.sort(key=lambda due: due.latest_ns + due.prefill_ns / pace)
    fewest = next(
        count
        for count in range(len(line) + 1)
        if any(not late([each for each in line if each not in out], pace) for out in combinations(line, count))
    )
    assert len(making_room(line, NOW_NS, pace)) == fewest


def test_the_longest_request_waits_rather_than_the_many_behind_it() -> None:
    line = [QueuedRequest(0, "a", 900, 1_500.0), *(QueuedRequest(number, "a", 50, 1_500.0) for number in range(1, 8))]
    assert making_room(line, NOW_NS, 1.0) == {0}
    assert making_room(line, NOW_NS, 10.0) == set(), "there is time for all of them"


def test_classes_of_one_tenant_make_room_for_each_other_unless_they_stand_apart() -> None:
    line = [
        QueuedRequest(0, "essays", 900, 1_500.0, "acme"),
        *(QueuedRequest(number, "chat", 50, 1_500.0, "acme") for number in range(1, 8)),
    ]
    assert making_room(line, NOW_NS, 1.0) == {0}
    assert making_room(line, NOW_NS, 1.0, apart={"essays"}) == {1, 2, 3, 4, 5, 6, 7}


@given(lines(), PACES)
def test_no_tenant_makes_room_for_another(line: list[QueuedRequest], pace: float) -> None:
    of_tenants = [due._replace(flow=number, tenant=f"tenant{due.flow}") for number, due in enumerate(line)]
    assert making_room(of_tenants, NOW_NS, pace) == making_room(line, NOW_NS, pace)
