"""Tests of gateways that report to each other the places that tenants have and need."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from libs.dispatch.places import NOBODY, ModelPlaces, Others, TenantCount, together
from libs.dispatch.ports import OneForAll
from libs.testing.memory.limits import MemoryLedger
from services.gateway.request.limits import LISTEN_EVERY, MAX_TENANTS, PlaceExchange, read_places


class Places:
    """A dispatcher, as far as places go."""

    def __init__(self) -> None:
        self.here: dict[str, ModelPlaces] = {}
        self.received: Others = NOBODY

    def places_here(self) -> dict[str, ModelPlaces]:
        return self.here

    def places_elsewhere(self, others: Others) -> None:
        self.received = others


def gateways(ledger: MemoryLedger, *names: str) -> list[tuple[Places, PlaceExchange]]:
    found: list[tuple[Places, Any]] = []
    for name in names:
        places: Any = Places()
        found.append((places, PlaceExchange(places, ledger, OneForAll(), name)))
    return found


async def test_each_gateway_receives_the_others_reports_in_order_of_their_names() -> None:
    (first, one), (second, two), (third, three) = gateways(MemoryLedger(lambda: 0.0), "a", "b", "c")
    first.here = {"m": ModelPlaces(1, {"x": TenantCount(2, 3)})}
    second.here = {"m": ModelPlaces(4, {"x": TenantCount(5, 6), "y": TenantCount(1, 0)})}
    third.here = {"m": ModelPlaces(0, {"x": TenantCount(7, 0)}), "n": ModelPlaces(1, {})}
    for each in (one, two, three, two):
        await each.exchange()
    assert second.received == Others((first.here,), (third.here,))
    assert third.received == Others((first.here, second.here))
    assert third.received.sides == ({"m": ModelPlaces(5, {"x": TenantCount(7, 9), "y": TenantCount(1, 0)})}, {})


async def test_a_gateway_with_nothing_to_share_reports_it_once_and_polls_rarely() -> None:
    ledger = MemoryLedger(lambda: 0.0)
    (first, one), (second, two) = gateways(ledger, "a", "b")
    for _ in range(3 * LISTEN_EVERY):
        await one.exchange()
    assert ledger.calls == 3
    first.here = second.here = {"m": ModelPlaces(1, {"x": TenantCount(2, 3)})}
    await one.exchange()
    await two.exchange()
    assert second.received.before == (first.here,)
    first.here, ledger.calls = {}, 0
    for _ in range(LISTEN_EVERY):
        await one.exchange()
    assert ledger.calls == 1
    await two.exchange()
    assert second.received == NOBODY
    await one.exchange()
    assert first.received.after == (second.here,), "it receives requests although it has nothing"


async def test_a_gateway_that_leaves_withdraws_its_report_and_sends_no_more() -> None:
    ledger = MemoryLedger(lambda: 0.0)
    (first, one), (second, two) = gateways(ledger, "a", "b")
    first.here = second.here = {"m": ModelPlaces(1, {"x": TenantCount(2, 3)})}
    await one.exchange()
    await one.leave()
    await one.exchange()
    await two.exchange()
    assert second.received == NOBODY
    await two.leave()
    ledger.away = True
    await gateways(ledger, "c")[0][1].leave()


class SlowLedger(MemoryLedger):
    """A ledger that holds reports back until it is released."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.may_go_on = asyncio.Event()

    async def exchange(self, gateway_id: str, report: bytes) -> Mapping[str, bytes]:
        if report:
            await self.may_go_on.wait()
        return await super().exchange(gateway_id, report)


async def test_a_report_in_flight_does_not_outlast_its_gateway() -> None:
    ledger = SlowLedger()
    ((first, one),) = gateways(ledger, "a")
    first.here = {"m": ModelPlaces(1, {"x": TenantCount(2, 3)})}
    exchanges, leaves = asyncio.create_task(one.exchange()), asyncio.create_task(one.leave())
    await asyncio.sleep(0)
    ledger.may_go_on.set()
    await asyncio.gather(exchanges, leaves)
    assert await ledger.exchange("b", b"") == {}


async def test_without_the_ledger_each_gateway_shares_only_the_places_it_holds() -> None:
    ledger = MemoryLedger(lambda: 0.0)
    (first, one), (second, two) = gateways(ledger, "a", "b")
    first.here = second.here = {"m": ModelPlaces(1, {"x": TenantCount(2, 3)})}
    for each in (one, two):
        await each.exchange()
    assert second.received != NOBODY
    ledger.away = True
    await two.exchange()
    assert second.received == NOBODY


def test_foreign_reports_are_ignored() -> None:
    bad = [b"", b"\xff", b"[]", b'{"m": 1}', b'{"m": [1, {"x": [2]}, 3]}', b'{"m": ["a", {}]}', b'{"m": [-1, {}]}',
           b'{"m": [0, {"x": [0, 1000001]}]}', b'{"m": [1%s, {}]}' % (b"0" * 400), b'{"m": [1, {"x": [2, 3, -1]}]}',
           b'{"m": [1, {"x": [2, 3, 0, -1]}]}',
           msgspec.json.encode({"m": [1, {f"x{number}": [1, 1] for number in range(MAX_TENANTS)}]})]  # fmt: skip
    assert [read_places(each) for each in bad] == [{}] * len(bad)


def test_reports_with_fewer_numbers_are_accepted() -> None:
    """A number that is missing counts as 0."""
    reports = [b'{"m": [1, {"x": [2, 3]}]}', b'{"m": [5, {"x": [1, 1, 4]}]}', b'{"m": [0, {"x": [4, 0, 0, 4]}]}']
    assert together(map(read_places, reports)) == {"m": ModelPlaces(6, {"x": TenantCount(7, 4, 4, 4)})}
