"""Tests of tenant limits at a gateway: shared through the ledger, and local without it."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

import pytest

from libs.contracts.errors import InvalidRequest, RateLimited
from libs.keys.book import KeySet, TenantLimits, draw_key
from libs.keys.table import KeyTable
from libs.policy.gateway.usage import written_s
from libs.testing.memory.limits import MemoryLedger
from libs.testing.wait import ManualClock
from services.gateway.request.limits import AWAY_S, FREE, REFUSED_S, Allowance, TenantLimiter


class World:
    """Some gateways over one ledger; tenant `a` has limits."""

    def __init__(self, limits: TenantLimits, gateways: int = 1) -> None:
        self.clock = ManualClock()
        self.ledger = MemoryLedger(lambda: self.clock.now_ns() / 1e9)
        self.table = KeyTable(open_without_keys=True)
        _, key = draw_key("a", now_s=0)
        self.book = KeySet().with_key(key, 0)
        self.limit(limits)
        self.gateways = [
            TenantLimiter(self.table, self.ledger, self.clock, f"gateway-{number}") for number in range(gateways)
        ]

    def limit(self, limits: TenantLimits) -> None:
        self.table.replace(self.book.with_limits("a", limits), 0)

    async def admitted(self, count: int) -> list[Allowance]:
        """Return the accepted ones of `count` requests, dealt to the gateways in turn."""
        found: list[Allowance] = []
        for number in range(count):
            with suppress(RateLimited):
                found.append(await self.gateways[number % len(self.gateways)].admit("a"))
        return found


async def refused(asking: Awaitable[object]) -> RateLimited:
    with pytest.raises(RateLimited) as found:
        await asking
    return found.value


async def test_the_request_over_the_limit_is_refused_with_the_limit_and_a_retry_after() -> None:
    world = World(TenantLimits(requests_per_minute=3))
    gateway = world.gateways[0]
    headers = [(await gateway.admit("a")).headers() for _ in range(3)]
    assert [each["x-ratelimit-remaining-requests"] for each in headers] == ["2", "1", "0"]
    world.clock.advance_ms(20_000)
    error = await refused(gateway.admit("a"))
    assert "3 requests a minute" in error.message and "tenant a" in error.message
    assert (error.http_status, error.http_headers["retry-after"]) == (429, "41")
    assert error.http_headers["x-ratelimit-limit-requests"] == "3"
    assert error.http_headers["x-ratelimit-reset-requests"] == "41s"
    world.clock.advance_ms(41_000)
    await gateway.admit("a")


async def test_tokens_of_prompts_and_of_answers_count() -> None:
    world = World(TenantLimits(tokens_per_minute=100))
    gateway = world.gateways[0]
    first = await gateway.admit("a")
    await first.prompt(60)
    first.output(60)
    first.end()
    await gateway.sweep()
    second = await gateway.admit("a")
    error = await refused(second.prompt(1))
    second.end()
    assert "100 tokens a minute" in error.message
    assert first.headers()["x-ratelimit-remaining-tokens"] == "0"
    world.clock.advance_ms(61_000)
    await (await gateway.admit("a")).prompt(100)


async def test_a_prompt_that_never_fits_is_refused_as_too_large() -> None:
    allowance = await World(TenantLimits(tokens_per_minute=10)).gateways[0].admit("a")
    error = await refused(allowance.prompt(11))
    assert "more than the limit" in error.message
    assert error.http_headers["x-should-retry"] == "false"


async def test_concurrent_requests_are_bounded_across_gateways_and_each_end_makes_room() -> None:
    world = World(TenantLimits(concurrent=3), gateways=2)
    running = await world.admitted(10)
    assert len(running) == 3
    error = await refused(world.gateways[1].admit("a"))
    assert "its limit is 3 at once" in error.message
    running[0].end()  # of the first gateway, which gives its place back
    await world.gateways[0].sweep()
    await world.gateways[1].admit("a")
    assert not await world.admitted(4)


async def test_each_choice_counts_as_one_concurrent_request_until_all_have_ended() -> None:
    world = World(TenantLimits(concurrent=8))
    gateway = world.gateways[0]
    many, one = await gateway.admit("a"), await gateway.admit("a")
    await many.choices(6)
    error = await refused(one.choices(4))
    assert "asks for 3 more: its limit is 8 at once" in error.message
    assert error.http_status == 429
    await one.choices(2)
    await refused(gateway.admit("a"))
    many.end()
    assert len(await world.admitted(10)) == 6


async def test_a_request_with_more_choices_than_the_limit_is_refused_as_impossible() -> None:
    gateway = World(TenantLimits(concurrent=8)).gateways[0]
    allowance = await gateway.admit("a")
    with pytest.raises(InvalidRequest, match="asks for 9 choices at once, and tenant a may have 8") as found:
        await allowance.choices(9)
    assert (found.value.http_status, found.value.param) == (400, "n")
    await allowance.choices(8)


async def test_two_gateways_exceed_the_limit_by_at_most_five_percent() -> None:
    world = World(TenantLimits(requests_per_minute=500), gateways=2)
    for _ in range(3):
        assert 475 <= len(await world.admitted(1000)) <= 525
        world.clock.advance_ms(61_000)
        for gateway in world.gateways:
            await gateway.sweep()
    assert world.ledger.calls < 300, "each requests some ahead, and not again at once after a refusal"


async def test_units_unused_at_one_gateway_go_to_the_others() -> None:
    world = World(TenantLimits(requests_per_minute=500), gateways=2)
    await world.gateways[0].admit("a")
    world.clock.advance_ms(1_100)
    await world.gateways[0].sweep()
    world.gateways = world.gateways[1:]
    assert len(await world.admitted(600)) == 499


async def test_without_the_ledger_each_gateway_uses_its_share_and_retries_the_ledger_later() -> None:
    world = World(TenantLimits(requests_per_minute=100, concurrent=40), gateways=2)
    for _ in range(2):
        for gateway in world.gateways:
            await gateway.sweep()
    world.ledger.away = True
    first = await world.admitted(200)
    assert len(first) == 40
    for each in first:
        each.end()
    calls = world.ledger.calls
    second = await world.admitted(200)
    assert len(second) == 40
    assert world.ledger.calls == calls, "requests do not wait for it"
    for each in second:
        each.end()
    assert len(await world.admitted(200)) == 20
    world.ledger.away = False
    world.clock.advance_ms(AWAY_S * 1000)
    for gateway in world.gateways:
        await gateway.sweep()
    assert (await world.ledger.take("a", "requests", 100, want=1, least=1)).left == 0


async def test_concurrent_requests_call_the_ledger_one_after_another() -> None:
    world = World(TenantLimits(requests_per_minute=10, concurrent=5))
    requested = await asyncio.gather(*(world.gateways[0].admit("a") for _ in range(50)), return_exceptions=True)
    assert sum(isinstance(each, Allowance) for each in requested) == 5


async def test_a_changed_limit_applies_from_the_next_request_on() -> None:
    world = World(TenantLimits(requests_per_minute=2))
    assert len(await world.admitted(5)) == 2
    world.limit(TenantLimits(requests_per_minute=4))
    world.clock.advance_ms(REFUSED_S * 1000)
    assert len(await world.admitted(5)) == 2
    world.limit(TenantLimits())
    assert len(await world.admitted(5)) == 5


async def test_tenants_without_limits_and_suites_without_keys_do_not_call_the_ledger() -> None:
    world = World(TenantLimits(requests_per_minute=1))
    assert await world.gateways[0].admit("b") is FREE
    world.table = KeyTable(open_without_keys=True)
    world.table.replace(KeySet().with_limits("a", TenantLimits(requests_per_minute=1)), 0)
    gateway = TenantLimiter(world.table, world.ledger, world.clock, "g")
    assert [await gateway.admit("a") for _ in range(3)] == [FREE] * 3
    assert world.ledger.calls == 0


@pytest.mark.parametrize(("wait_s", "text"), [(0, "0ms"), (0.25, "250ms"), (12.4, "12s"), (60, "1m0s"), (61, "1m1s")])
def test_times_have_the_format_that_openais_clients_read(wait_s: float, text: str) -> None:
    assert written_s(wait_s) == text


async def test_gpu_time_of_a_day_is_counted_at_the_end_of_choices_and_refuses_the_next() -> None:
    world = World(TenantLimits(gpu_seconds_per_day=10), gateways=2)
    one, two = world.gateways
    first = await one.admit("a")
    one.spent_gpu_ms("a", 6_000)
    first.end()
    await one.sweep()
    (await two.admit("a")).end()
    two.spent_gpu_ms("a", 5_000)
    await two.sweep()
    error = await refused(one.admit("a"))
    assert "10 GPU-seconds a day" in error.message
    assert 23 * 3600 < int(error.http_headers["retry-after"]) <= 25 * 3600
    assert error.http_headers["x-should-retry"] == "false"
    assert error.http_headers["x-ratelimit-limit-gpu-ms"] == "10000"
    with pytest.raises(RateLimited):
        await two.check_gpu_time("a")
    world.clock.advance_ms(25 * 3_600_000)
    (await one.admit("a")).end()


async def test_gpu_time_of_a_tenant_without_limits_is_not_counted() -> None:
    world = World(TenantLimits(gpu_seconds_per_day=1))
    (gateway,) = world.gateways
    gateway.spent_gpu_ms("b", 10**9)
    await gateway.check_gpu_time("b")
    assert not gateway.limits_gpu_time("b") and gateway.limits_gpu_time("a")


def test_a_day_is_written_in_hours() -> None:
    assert written_s(24 * 3600 + 61) == "24h1m1s"
