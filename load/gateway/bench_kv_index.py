"""Measure the KV index in a real redis-server: memory of a block, updates a second, look-ups of a 100-block prefix.

A look-up asks each worker's set in one round trip. Its time grows linearly with the workers, as `fixed + workers x
slope`, and is fitted here. Figures for 10,000 workers with 100,000 blocks each are extrapolated from these constants.
The bench prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import secrets
import time
from typing import Any, Final

import numpy as np
from redis.asyncio import Redis

from libs.cli.console import plain_table
from libs.contracts import keys
from libs.contracts.hashing import HASH_BYTES
from libs.stores.kvindex import LOOKUP_TIMEOUT_S, PrefixQuery, RedisKvIndex
from libs.testing.servers.stores import real_redis
from load.measure import bench_parser, show

PREFIX_BLOCKS: Final = 100
CHANGED_BLOCKS: Final = 16
"""The number of blocks that an update stores. It evicts as many."""
MODEL: Final = "model"
LEASE_MS: Final = 600_000
# Look-ups are timed to their end, even if a gateway would have given up.
PATIENCE_S: Final = 30.0
WHOLE_WORKERS: Final = 10_000
WHOLE_BLOCKS: Final = 100_000


def hashes(count: int) -> list[bytes]:
    return [secrets.token_bytes(HASH_BYTES) for _ in range(count)]


async def bytes_a_block(redis: Redis, index: RedisKvIndex, workers: int, blocks: int) -> float:
    """Fill the sets of `workers`, and return the bytes of one block in Redis."""
    before = int((await redis.info("memory"))["used_memory"])
    for number in range(workers):
        await index.renew(MODEL, f"worker-{number}", lease_ms=LEASE_MS)
        await index.publish(MODEL, f"worker-{number}", stored=hashes(blocks), removed=())
    taken = int((await redis.info("memory"))["used_memory"]) - before
    # A write that timed out here may or may not have been carried out.
    listed = [await redis.scard(keys.kv_blocks("bench", MODEL, f"worker-{number}")) for number in range(workers)]
    if sum(listed) != workers * blocks:
        raise SystemExit(f"Redis lists {sum(listed)} of {workers * blocks} blocks: repeat on a quieter machine")
    return taken / sum(listed)


async def update_us(redis: Redis, index: RedisKvIndex, updates: int) -> dict[str, float]:
    """Return the time of one worker's update, and the CPU time of Redis for it, in microseconds."""
    stored, cpu_s, began_s = hashes(CHANGED_BLOCKS), await _redis_cpu_s(redis), time.monotonic()
    for _ in range(updates):
        removed, stored = stored, hashes(CHANGED_BLOCKS)
        await index.publish(MODEL, "worker-0", stored=stored, removed=removed)
    took_s = time.monotonic() - began_s
    return {"wall": 1e6 * took_s / updates, "redis_cpu": 1e6 * (await _redis_cpu_s(redis) - cpu_s) / updates}


async def look_up_ms(redis: Redis, index: RedisKvIndex, workers: int, lookups: int) -> dict[str, float]:
    """Return percentiles of look-ups over `workers` in ms, and a look-up's CPU time in Redis and in this process."""
    prefix = hashes(PREFIX_BLOCKS)
    await index.publish(MODEL, "worker-0", stored=prefix, removed=())
    query = PrefixQuery(MODEL, [prefix], [f"worker-{number}" for number in range(workers)])
    took_ms, cpu_s, own_cpu_s = [], await _redis_cpu_s(redis), time.process_time()
    for _ in range(lookups):
        began_s = time.perf_counter()
        ((found,),) = await index.longest_prefix([query])
        took_ms.append(1e3 * (time.perf_counter() - began_s))
        if found.get("worker-0") != PREFIX_BLOCKS:
            raise SystemExit("a look-up did not find the prefix that was stored: repeat on a quieter machine")
    p50, p99 = np.percentile(took_ms, [50, 99]).tolist()
    own_cpu_ms = 1e3 * (time.process_time() - own_cpu_s) / lookups
    return {
        "p50": p50,
        "p99": p99,
        "own_cpu": own_cpu_ms,
        "redis_cpu": 1e3 * (await _redis_cpu_s(redis) - cpu_s) / lookups,
    }


async def _redis_cpu_s(redis: Redis) -> float:
    used = await redis.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def whole(block_bytes: float, update_cpu_us: float, by_workers: dict[int, dict[str, float]]) -> dict[str, float]:
    """Extrapolate to the whole fleet.

    A look-up's time is a line through the smallest and the largest measured fleet.
    """
    least, most = min(by_workers), max(by_workers)

    def line(figure: str, workers: int) -> float:
        slope = (by_workers[most][figure] - by_workers[least][figure]) / (most - least)
        return by_workers[least][figure] + slope * (workers - least)

    return {
        "memory_gb": block_bytes * WHOLE_WORKERS * WHOLE_BLOCKS / 1e9,
        "updates_per_s": 1e6 / update_cpu_us,
        "look_up_p50_ms": line("p50", WHOLE_WORKERS),
        "look_up_p99_ms": line("p99", WHOLE_WORKERS),
        "look_ups_per_s": 1e3 / line("redis_cpu", WHOLE_WORKERS),
        "look_up_cpu_ms": line("redis_cpu", WHOLE_WORKERS) + line("own_cpu", WHOLE_WORKERS),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with real_redis() as server:
        redis: Redis = Redis.from_url(server.url)
        index = RedisKvIndex(server.url, "bench", lookup_timeout_s=PATIENCE_S)
        try:
            block_bytes = await bytes_a_block(redis, index, options.filled, options.blocks)
            update = await update_us(redis, index, options.updates)
            by_workers = {each: await look_up_ms(redis, index, each, options.lookups) for each in options.workers}
        finally:
            await index.close()
            await redis.aclose()
    return {
        "bytes_a_block": block_bytes, "update_us": update, "look_up_ms": by_workers,
        "extrapolated": whole(block_bytes, update["redis_cpu"], by_workers),
    }  # fmt: skip


async def main() -> None:
    options = bench_parser(
        __doc__, filled=(10, "workers whose sets are filled"), blocks=(WHOLE_BLOCKS, "blocks of each of them"),
        updates=2_000, lookups=200, workers=([10, 100, 1_000], "two or more numbers"),
    ).parse_args()  # fmt: skip
    found = await measure(options)
    table = plain_table("workers", "look-up p50", "p99", "CPU here", "CPU of Redis")
    for workers, took in found["look_up_ms"].items():
        table.add_row(
            str(workers), f"{took['p50']:.1f} ms", f"{took['p99']:.1f} ms", f"{took['own_cpu']:.2f} ms",
            f"{took['redis_cpu']:.2f} ms",
        )  # fmt: skip
    show(table)
    print(
        f"{found['bytes_a_block']:.0f} bytes a block; an update of {CHANGED_BLOCKS} + {CHANGED_BLOCKS} blocks "
        f"{found['update_us']['wall']:.0f} us, of which Redis {found['update_us']['redis_cpu']:.0f} us of CPU"
    )
    ahead = found["extrapolated"]
    print(
        f"extrapolated to {WHOLE_WORKERS} workers x {WHOLE_BLOCKS} blocks: {ahead['memory_gb']:.0f} GB, "
        f"{ahead['updates_per_s']:.0f} updates/s, look-ups {ahead['look_up_p99_ms']:.0f} ms at p99, "
        f"{ahead['look_ups_per_s']:.0f} a second; {ahead['look_up_cpu_ms']:.0f} ms of CPU each on both sides, while a "
        f"gateway waits {1e3 * LOOKUP_TIMEOUT_S:.0f} ms"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
