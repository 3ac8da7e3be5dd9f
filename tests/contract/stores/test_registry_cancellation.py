"""Tests that a cancelled watch ends, whatever it was doing."""

import asyncio

from libs.testing.contract.databases import Database

ROUNDS = 150
SPREAD_S = 0.05
POLL_MS = 20
END_S = 10.0
"""A watch that has lost its cancellation never ends."""


async def test_a_cancelled_watch_ends_at_once_whatever_it_was_doing(database: Database, cluster: str):
    registry = database.registry(cluster)

    async def follow() -> None:
        async for _ in registry.watch(poll_ms=POLL_MS):
            pass

    try:
        for number in range(ROUNDS):
            task = asyncio.get_running_loop().create_task(follow())
            # Moments spread over subscribing, reading and waiting.
            await asyncio.sleep(SPREAD_S * number / ROUNDS)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=END_S)
            assert done, f"round {number}"
            assert task.cancelled()
    finally:
        await registry.close()
