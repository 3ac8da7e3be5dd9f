"""Properties of the order in which a gateway accepts requests: by tenants' turns and by cost."""

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.fairness import ROUND_UNITS, IntakeLine, units_of

TENANTS = st.sampled_from(["a", "b", "c"])


def filled(*requests: tuple[str, int]) -> tuple[IntakeLine, dict[int, str]]:
    """A line behind a round that is used up, and whose each ticket is."""
    line, tickets = IntakeLine(), {}
    assert line.enter("first", ROUND_UNITS) is None
    for tenant, units in requests:
        ticket = line.enter(tenant, units)
        assert ticket is not None
        tickets[ticket] = tenant
    return line, tickets


@given(st.lists(st.tuples(TENANTS, st.integers(1, 9)), max_size=60))
def test_each_request_is_accepted_once_and_no_round_exceeds_its_units(requests: list[tuple[str, int]]) -> None:
    line, tickets = filled(*requests)
    units = dict(zip(tickets, (units for _, units in requests), strict=True))
    gone: list[int] = []
    for _ in range(sum(units.values()) + 1):
        found = line.next_round()
        assert sum(units[each] for each in found[:-1]) < ROUND_UNITS
        gone += found
    assert sorted(gone) == sorted(tickets)
    line.next_round()
    assert line.is_fresh


@given(st.integers(20, 200), st.integers(1, 9))
def test_a_request_of_one_tenant_waits_at_most_two_rounds_beside_a_flood(count: int, units: int) -> None:
    line, tickets = filled(*[("flood", units)] * count, ("modest", 1))
    modest = next(ticket for ticket, tenant in tickets.items() if tenant == "modest")
    waited = 0
    while modest not in line.next_round():
        waited += 1
    assert waited <= 1 + -(-2 * units // ROUND_UNITS)


@given(st.lists(st.tuples(TENANTS, st.integers(1, 9)), min_size=1, max_size=60), st.data())
def test_requests_whose_clients_left_take_no_turn(requests: list[tuple[str, int]], data: st.DataObject) -> None:
    line, tickets = filled(*requests)
    left = data.draw(st.sets(st.sampled_from(sorted(tickets))))
    for ticket in left:
        line.leave(ticket)
        line.leave(ticket)
    gone: list[int] = []
    while len(line):
        gone += line.next_round()
    assert sorted(gone) == sorted(set(tickets) - left)


def test_many_choices_count_like_many_requests() -> None:
    assert [units_of(choices) for choices in (1, 16, 17, 128)] == [1, 1, 2, 8]
    line, tickets = filled(*[("choices", units_of(128))] * 20, *[("single", 1)] * 20)
    served = {"choices": 0, "single": 0}
    for _ in range(10):
        for ticket in line.next_round():
            served[tickets[ticket]] += units_of(128) if tickets[ticket] == "choices" else 1
    assert abs(served["choices"] - served["single"]) <= units_of(128)


@given(st.integers(1, 16), st.integers(1, 16))
def test_turns_follow_weights_even_for_requests_of_one_unit(heavy: int, light: int) -> None:
    line = IntakeLine()
    assert line.enter("first", ROUND_UNITS) is None
    tickets = {line.enter(name, 1, weight): name for _ in range(200) for name, weight in (("a", heavy), ("b", light))}
    served = {"a": 0, "b": 0}
    while sum(served.values()) < 200:
        for ticket in line.next_round():
            served[tickets[ticket]] += 1
    assert abs(served["a"] / 200 - heavy / (heavy + light)) <= 0.03
