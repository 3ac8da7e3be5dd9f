"""Properties of fair queueing: tenants share service, and no request starves."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.fairness import MOST_CLASSES, FairTurns, Flow
from libs.policy.gateway.order import Line

asks = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["x", "y"]), st.integers(1, 10_000)), max_size=40
)


@dataclass(frozen=True)
class Item:
    number: int
    arrival_unix_ns: int = 0
    ttft_deadline_unix_ns: int = 0
    prompt_tokens: int = 1
    resumed: bool = False
    batch: bool = False


@given(asks)
def test_within_a_flow_requests_are_served_in_order_of_arrival(drawn: list[tuple[str, str, int]]) -> None:
    turns, by_flow = FairTurns(), dict[Flow, list[int]]()
    for tenant, service_class, tokens in drawn:
        flow, turn = turns.came((tenant, service_class), tokens)
        by_flow.setdefault(flow, []).append(turn)
    assert all(found == sorted(found) for found in by_flow.values())


@given(asks)
def test_no_state_of_tenants_without_requests_remains(drawn: list[tuple[str, str, int]]) -> None:
    turns = FairTurns()
    for flow, turn in [turns.came((tenant, kind), tokens) for tenant, kind, tokens in drawn]:
        turns.left(flow, turn, bound=False)
    assert len(turns) == 0


@given(st.integers(1, 5), st.integers(2, 12), st.integers(1, 3000))
def test_a_tenant_within_its_share_hardly_waits_beside_a_flood(modest: int, flood: int, tokens: int) -> None:
    """One request is served a second; each modest tenant sends its share, and one sends many times that, forever."""
    turns, waiting, worst_s, period = FairTurns(), list[tuple[int, int, Flow, int]](), 0, modest + 1
    for second in range(40 * period):
        asking = ["flood"] * flood + [f"t{number}" for number in range(modest) if second % period == number]
        for tenant in asking:
            flow, turn = turns.came((tenant, ""), tokens)
            waiting.append((turn, second * 100 + len(waiting), flow, second))
        waiting.sort()
        turn, _, flow, came_s = waiting.pop(0)
        turns.left(flow, turn, bound=True)
        if flow[0] != "flood":
            worst_s = max(worst_s, second - came_s)
    assert worst_s <= 2 * period
    assert sum(flow[0] != "flood" for _, _, flow, _ in waiting) <= 2 * modest


@given(st.lists(st.integers(1, 500), min_size=2, max_size=5))
def test_tenants_that_always_wait_are_served_equally_many_tokens(sizes: list[int]) -> None:
    """This holds for prompts of any length."""
    turns, line, served = FairTurns(), list[tuple[int, int, Flow, int]](), dict.fromkeys(range(len(sizes)), 0)

    def ask(number: int, place: int) -> None:
        flow, turn = turns.came((str(number), ""), sizes[number])
        line.append((turn, place, flow, number))

    for number in range(len(sizes)):
        ask(number, number)
        ask(number, number + 10)
    for place in range(2000):
        line.sort()
        turn, _, flow, number = line.pop(0)
        turns.left(flow, turn, bound=True)
        served[number] += sizes[number]
        ask(number, place + 100)
    assert max(served.values()) - min(served.values()) <= 2 * sum(sizes)


@given(st.lists(st.tuples(st.integers(100, 500), st.integers(1, 9)), min_size=2, max_size=5))
def test_tenants_that_always_wait_are_served_by_weight(requested: list[tuple[int, int]]) -> None:
    turns, line, served = FairTurns(), list[tuple[int, int, Flow, int]](), dict.fromkeys(range(len(requested)), 0)

    def ask(number: int, place: int) -> None:
        size, weight = requested[number]
        flow, turn = turns.came((str(number), ""), size, weight)
        line.append((turn, place, flow, number))

    for number in range(len(requested)):
        for place in range(3):
            ask(number, number + 10 * place)
    for place in range(3000):
        line.sort()
        turn, _, flow, number = line.pop(0)
        turns.left(flow, turn, bound=True)
        served[number] += requested[number][0]
        ask(number, place + 100)
    by_weight = [served[number] / weight for number, (_, weight) in enumerate(requested)]
    assert max(by_weight) <= 1.15 * min(by_weight)  # turns are whole numbers: up to 9 % of the shortest prompt


def test_several_classes_of_one_tenant_get_no_more_than_one_class_of_another() -> None:
    turns = FairTurns()
    many = [turns.came(("many", f"class{number % 4}"), 100)[1] for number in range(40)]
    one = [turns.came(("one", "chat"), 100)[1] for _ in range(10)]
    assert sum(turn < 1000 for turn in many) == pytest.approx(sum(turn < 1000 for turn in one), abs=7)
    flows = {turns.came(("many", f"other{number}"), 1)[0] for number in range(5 * MOST_CLASSES)}
    assert len(flows) <= MOST_CLASSES + 1


def test_requests_are_ordered_by_turn_then_by_arrival_with_batch_lines_last() -> None:
    line = Line[Item]()
    line.add(1, Item(1, 10), 500)
    line.add(2, Item(2, 20), 20)
    line.add(3, Item(3, 15), 20)
    line.add(4, Item(4, 0, batch=True))
    line.add(5, Item(5, 90, resumed=True))
    assert [each.number for each in line.in_order(0)] == [5, 3, 2, 1, 4]
