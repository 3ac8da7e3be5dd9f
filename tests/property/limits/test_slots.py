"""Properties of slots shared by tenants: one is left for others, turns are fair, and none is lost or reused."""

import asyncio
from collections import Counter
from contextlib import closing
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import QueueFull
from libs.policy.gateway.fairness import ANYBODY, SlotLine, may_take
from load.chaos.loop import SimLoop
from services.gateway.turns import FairSlots


@given(st.integers(2, 64), st.lists(st.integers(0, 64), max_size=8), st.integers(1, 100))
def test_a_tenant_that_holds_a_slot_never_takes_the_last_one(slots: int, others: list[int], weight: int) -> None:
    held = 0
    for own in [*others, slots]:
        taken = 0
        while taken < own and may_take(slots, held, taken, weight):
            taken, held = taken + 1, held + 1
        assert taken <= 1 or held < slots
    assert held <= slots


def test_of_eight_slots_the_first_tenant_gets_four_the_second_two_and_two_more_one_each() -> None:
    line = SlotLine(8, 0, shared=True)
    assert [sum(line.take(tenant) for _ in range(8)) for tenant in "abcd"] == [4, 2, 1, 1]
    assert sum(SlotLine(8, 0, shared=True).take(ANYBODY) for _ in range(1)) == 1
    nobody = SlotLine(8, 0, shared=True)
    assert sum(nobody.take(ANYBODY) for _ in range(9)) == 8, "without keys no tenant is held to a share"


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "come", "done", "leave"])), max_size=80)


@given(STEPS, st.integers(1, 9), st.booleans())
def test_slots_never_exceed_their_number_and_none_stays_free_for_an_eligible_tenant(
    steps: list[tuple[str, str]], slots: int, shared: bool
) -> None:
    line, holds, waits = SlotLine(slots, 12, shared=shared), Counter[str](), dict[int, str]()
    for tenant, what in steps:
        if what == "come":
            if line.take(tenant):
                holds[tenant] += 1
            elif line.has_room(tenant):
                waits[line.wait(tenant)] = tenant
        elif what == "done" and holds[tenant]:
            holds[tenant] -= 1
            line.done(tenant)
        elif what == "leave":
            for ticket in [each for each, whose in waits.items() if whose == tenant][:1]:
                del waits[ticket]
                line.leave(ticket)
        for ticket in line.next():
            holds[waits.pop(ticket)] += 1
        assert line.held == holds.total() <= slots
        assert len(line) == len(waits) <= 12
        for whose in set(waits.values()):
            assert not (may_take(slots, holds.total(), holds[whose]) if shared else holds.total() < slots)


def test_a_waiting_tenant_is_served_before_the_remaining_requests_of_a_large_one() -> None:
    line = SlotLine(1, 100, shared=False)
    assert line.take("flood")
    many = [line.wait("flood", cost=10) for _ in range(20)]
    other = line.wait("modest", cost=10)
    served: list[int] = []
    for _ in range(3):
        line.done("flood" if not served or served[-1] in many else "modest")
        served += line.next()
    assert other in served[:2]


def test_a_queue_leaves_room_for_the_next_tenant() -> None:
    line = SlotLine(1, 64, shared=True)
    assert line.take("flood")
    waiting = 0
    while line.has_room("flood"):
        line.wait("flood")
        waiting += 1
    assert waiting == 32
    assert line.has_room("modest")


class Apart:
    are_distinct = True

    def weight(self, _tenant: str) -> int:
        return 1


def test_a_slot_is_returned_whatever_happens_to_its_request() -> None:
    """Tasks are cancelled at every moment, including that in which their slot arrives."""

    async def run(random: Random) -> None:
        slots = FairSlots(2, 8, "full", tenants=Apart(), max_wait_s=3.0)

        async def hold(tenant: str) -> None:
            async with slots.slot(tenant):
                assert slots.held <= 2
                await asyncio.sleep(random.random() * 2)

        for _ in range(60):
            task = asyncio.ensure_future(hold(random.choice("abc")))
            await asyncio.sleep(random.random() / 2)
            if random.random() < 0.3:
                task.cancel()
            task.add_done_callback(lambda each: each.cancelled() or each.exception())
        await asyncio.sleep(60)
        assert (slots.held, len(slots)) == (0, 0)

    for seed in range(5):
        with closing(SimLoop(Random(seed))) as loop:
            loop.run_until_complete(run(Random(seed)))


async def test_a_request_that_waits_too_long_times_out_and_the_queue_continues() -> None:
    slots = FairSlots(1, 8, "all are taken", max_wait_s=0.0)
    async with slots.slot("a"):
        with pytest.raises(QueueFull, match="all are taken") as caught:
            async with slots.slot("b"):
                raise AssertionError
        assert caught.value.retry_after_s
    async with slots.slot("b"):
        assert slots.held == 1
    assert (slots.held, len(slots)) == (0, 0)
