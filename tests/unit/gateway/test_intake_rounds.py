"""Tests that each turn of the event loop accepts only a few requests."""

import asyncio

import pytest

from libs.contracts.errors import QueueFull
from libs.dispatch.ports import OneForAll
from libs.policy.gateway.fairness import ROUND_UNITS
from services.gateway import turns
from services.gateway.turns import IntakeRounds


class Known(OneForAll):
    are_distinct = True


async def loop_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_loop_runs_other_tasks_between_a_few_requests_and_the_next() -> None:
    rounds, turns, taken = IntakeRounds(Known()), 0, list[int]()

    async def request() -> None:
        await rounds.turn("flood")
        taken.append(turns)

    async with asyncio.TaskGroup() as group:
        for _ in range(10 * ROUND_UNITS):
            group.create_task(request())
        while len(taken) < 10 * ROUND_UNITS:
            await asyncio.sleep(0)
            turns += 1
    assert max(map(taken.count, set(taken))) <= ROUND_UNITS


async def test_another_tenants_request_does_not_wait_behind_a_flood() -> None:
    rounds = IntakeRounds(Known())
    flood = [asyncio.ensure_future(rounds.turn("flood")) for _ in range(100 * ROUND_UNITS)]
    await loop_turns(1)
    modest = asyncio.ensure_future(rounds.turn("modest"))
    await loop_turns(4)
    assert modest.done()
    assert not flood[-1].done()
    await asyncio.gather(*flood)


async def test_tenants_get_no_turns_if_any_client_may_name_any_tenant() -> None:
    rounds, order = IntakeRounds(OneForAll()), list[str]()

    async def request(tenant: str) -> None:
        await rounds.turn(tenant)
        order.append(tenant)

    names = [*("flood" for _ in range(20 * ROUND_UNITS)), "another"]
    await asyncio.gather(*map(request, names))
    assert order == names


async def test_a_request_whose_client_leaves_uses_no_turn_and_leaves_no_state() -> None:
    rounds = IntakeRounds(Known())
    waiting = [asyncio.ensure_future(rounds.turn("flood")) for _ in range(3 * ROUND_UNITS)]
    await loop_turns(1)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(rounds) == 0
    await rounds.turn("modest")


async def test_requests_beyond_the_waiting_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_WAITING", 3)
    rounds = IntakeRounds(Known())
    requested = [rounds.turn("flood") for _ in range(ROUND_UNITS + 3 + 2)]
    answers = await asyncio.gather(*requested, return_exceptions=True)
    assert [type(each) for each in answers if each] == [QueueFull] * 2
