"""Contract tests of the ledger of tenant limits in memory, over the embedded Redis and over a real Redis."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from libs.contracts import keys
from libs.stores.limits import HOLD_S, MAX_REPORT_BYTES, REPORT_HOLD_S, Ledger, LedgerDown, RedisLedger
from libs.testing.memory.limits import MemoryLedger


@pytest.fixture(params=["memory", "embedded", "real"])
async def ledger(request: pytest.FixtureRequest, cluster: str) -> AsyncIterator[Ledger]:
    found: Ledger
    if request.param == "memory":
        found = MemoryLedger(time.time)
    else:
        found = RedisLedger(request.getfixturevalue(f"{request.param}_redis_server").url, cluster)
    yield found
    await found.close()
    await found.close()


async def test_units_are_granted_up_to_the_limit(ledger: Ledger) -> None:
    taken = await ledger.take("a", "tokens", 10, want=6, least=6)
    assert (taken.granted, taken.left, taken.wait_s) == (6, 4, 0)
    assert (await ledger.take("a", "tokens", 10, want=6, least=2)).granted == 4
    refused = await ledger.take("a", "tokens", 10, want=6, least=1)
    assert (refused.granted, refused.left) == (0, 0) and 55 < refused.wait_s <= 61
    assert (await ledger.take("a", "tokens", 10, want=20, least=20)).wait_s == 61
    assert (await ledger.take("a", "requests", 10, want=1, least=1)).granted == 1
    assert (await ledger.take("b", "tokens", 10, want=1, least=1)).granted == 1


async def test_units_can_exceed_the_limit_and_be_returned(ledger: Ledger) -> None:
    await ledger.add("a", "tokens", 15)
    assert (await ledger.take("a", "tokens", 10, want=1, least=1)).granted == 0
    await ledger.add("a", "tokens", -7)
    assert (await ledger.take("a", "tokens", 10, want=9, least=1)).granted == 2
    await ledger.add("a", "tokens", -100)
    assert (await ledger.take("a", "tokens", 10, want=10, least=10)).granted == 10


async def test_gateways_share_a_tenants_places_and_running_work_counts_against_them(ledger: Ledger) -> None:
    assert await ledger.hold("a", "g1", 5, running=0, want=3) == 3
    assert await ledger.hold("a", "g2", 5, running=0, want=3) == 2
    assert await ledger.hold("a", "g1", 5, running=1, want=1) == 1
    assert await ledger.hold("a", "g2", 5, running=2, want=9) == 4
    assert await ledger.hold("a", "g1", 2, running=1, want=9) == 1
    assert await ledger.hold("b", "g1", 2, running=0, want=9) == 2


async def test_a_gateway_reads_the_last_reports_of_others_and_not_its_own(ledger: Ledger) -> None:
    assert await ledger.exchange("g1", b'{"a": "\xc3\xa9:1"}') == {}
    assert await ledger.exchange("g2", b"two") == {"g1": b'{"a": "\xc3\xa9:1"}'}
    assert await ledger.exchange("g1", b"one") == {"g2": b"two"}
    assert await ledger.exchange("g3", b"three") == {"g1": b"one", "g2": b"two"}
    assert await ledger.exchange("g2", b"") == {"g1": b"one", "g3": b"three"}
    assert await ledger.exchange("g1", b"one") == {"g3": b"three"}


async def test_a_report_expires_soon_after_its_gateway_ends(ledger: Ledger) -> None:
    """Other gateways preempt answers by its report."""
    await ledger.exchange("g1", b"one")
    await asyncio.sleep(REPORT_HOLD_S / 2)
    assert await ledger.exchange("g2", b"") == {"g1": b"one"}
    await asyncio.sleep(REPORT_HOLD_S / 2 + 0.1)
    assert await ledger.exchange("g2", b"") == {}


async def test_a_report_over_the_size_bound_is_dropped(ledger: Ledger) -> None:
    await ledger.exchange("g1", b"a" * MAX_REPORT_BYTES)
    await ledger.exchange("g2", b"a" * (MAX_REPORT_BYTES - 20))
    assert list(await ledger.exchange("g3", b"")) == ["g2"]


async def test_live_gateways_are_counted(ledger: Ledger) -> None:
    assert [await ledger.beat("g1"), await ledger.beat("g2"), await ledger.beat("g1")] == [1, 2, 2]


async def test_a_ledger_that_is_away_raises_an_error(cluster: str) -> None:
    away = RedisLedger("redis://127.0.0.1:1/0", cluster)
    for call in (
        away.take("a", "tokens", 1, want=1, least=1),
        away.add("a", "tokens", 1),
        away.hold("a", "g", 1, running=0, want=1),
        away.beat("g"),
    ):
        with pytest.raises(LedgerDown):
            await call
    await away.close()


async def test_gpu_time_leaves_the_ledger_a_day_later_and_the_wait_is_reported(ledger: Ledger) -> None:
    taken = await ledger.take("a", "gpu_ms", 1_000, want=1, least=1)
    assert taken.granted == 1
    await ledger.add("a", "gpu_ms", 5_000)
    refused = await ledger.take("a", "gpu_ms", 1_000, want=1, least=1)
    assert not refused.granted and 23 * 3600 < refused.wait_s <= 25 * 3600
    assert (await ledger.take("a", "tokens", 1_000, want=1, least=1)).granted == 1


@pytest.fixture(params=["embedded", "real"])
async def redis_ledger(request: pytest.FixtureRequest, cluster: str) -> AsyncIterator[tuple[RedisLedger, Redis]]:
    url = request.getfixturevalue(f"{request.param}_redis_server").url
    found, client = RedisLedger(url, cluster), Redis.from_url(url)
    yield found, client
    await client.aclose()
    await found.close()


async def test_a_redis_clock_set_back_blocks_no_tenant_for_longer_than_the_window(
    redis_ledger: tuple[RedisLedger, Redis], cluster: str
) -> None:
    ledger, client = redis_ledger
    later = int(time.time()) + 3600
    await client.hset(keys.limit_use(cluster, "a", "tokens"), str(later), "8")
    await client.hset(keys.limit_use(cluster, "a", "tokens"), str(later - 1), "2")
    refused = await ledger.take("a", "tokens", 10, want=1, least=1)
    assert not refused.granted and 55 < refused.wait_s <= 61, "usage counts as of now"
    assert (await ledger.take("a", "tokens", 12, want=5, least=1)).granted == 2
    await ledger.add("a", "tokens", -12)
    assert (await ledger.take("a", "tokens", 10, want=10, least=10)).granted == 10


async def test_ended_gateways_expire_even_if_the_clock_of_redis_was_set_back(
    redis_ledger: tuple[RedisLedger, Redis], cluster: str
) -> None:
    ledger, client = redis_ledger
    later_ms = (int(time.time()) + 3600) * 1000
    await client.hset(keys.limit_open(cluster, "a"), "g1", f"3:{later_ms}")
    await client.zadd(keys.limit_gateways(cluster), {"g1": later_ms})
    assert await ledger.hold("a", "g2", 5, running=0, want=5) == 2, "it may be alive, so its places are held at first"
    assert await ledger.beat("g2") == 2
    held = (await client.hget(keys.limit_open(cluster, "a"), "g1") or b"").decode()
    ends_ms = [int(held.partition(":")[2]), await client.zscore(keys.limit_gateways(cluster), "g1")]
    assert all(each - time.time() * 1000 <= HOLD_S * 1000 for each in ends_ms if each is not None), ends_ms


async def test_a_gateway_name_that_is_not_utf8_does_not_break_the_ledger(
    redis_ledger: tuple[RedisLedger, Redis], cluster: str
) -> None:
    ledger, client = redis_ledger
    soon_ms = round((time.time() + REPORT_HOLD_S / 2) * 1000)
    await client.hset(keys.tenant_places(cluster), mapping={b"\xff\xfe": b"%d:{}" % soon_ms})  # type: ignore[dict-item]
    await ledger.exchange("g1", b"one")
    assert await ledger.exchange("g2", b"") == {"\ufffd\ufffd": b"{}", "g1": b"one"}
