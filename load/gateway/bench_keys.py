"""`make bench-keys`: measure the cost of authentication and limits of a REST API, in µs a request.

The app behind them answers at once.
"""

import asyncio
import json
import statistics
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from libs.keys.book import KeySet, TenantLimits, draw_key
from libs.keys.gate import HostCheck, KeyGate
from libs.keys.table import KeyTable
from libs.runtime.clock import SystemClock
from libs.testing.memory.limits import MemoryLedger
from load.measure import bench_parser
from services.gateway.request.limits import TenantLimiter
from services.gateway.routes import need

KEYS = 1_000
REQUESTS = 20_000
ROUNDS = 5
# No case reaches this limit.
MAX_LIMIT = 10**9


async def answers(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer every request with an empty body."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def receive() -> Any: ...


async def sent(_message: Any) -> None: ...


async def measure(app: ASGIApp, headers: list[tuple[bytes, bytes]]) -> float:
    """Return the µs that one request takes."""
    began_s = perf_counter()
    for _ in range(REQUESTS):
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await app(scope, receive, sent)
    return (perf_counter() - began_s) / REQUESTS * 1e6


async def measure_limits(limiter: TenantLimiter) -> float:
    """Return the µs that the limits of a tenant with all kinds of limits take, while units taken in advance last."""
    began_s = perf_counter()
    for _ in range(REQUESTS):
        allowance = await limiter.admit("tenant-0")
        await allowance.prompt(10)
        allowance.headers()
        allowance.output(10)
        allowance.end()
    return (perf_counter() - began_s) / REQUESTS * 1e6


def made() -> tuple[KeyTable, str]:
    """Return a table of `KEYS` keys, and one of the keys."""
    keys = [draw_key(f"tenant-{number}", now_s=0) for number in range(KEYS)]
    limits = TenantLimits(MAX_LIMIT, MAX_LIMIT, MAX_LIMIT)
    book = KeySet(tuple(key for _, key in keys), {"tenant-0": limits})
    table = KeyTable(open_without_keys=True)
    table.replace(book, 0)
    return table, keys[KEYS // 2][0]


async def run() -> dict[str, float]:
    """Return the medians over rounds, in which the cases alternate."""
    (table, secret), clock = made(), SystemClock()
    empty = KeyTable(open_without_keys=True)
    empty.replace(KeySet(), 0)
    headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json"), (b"user-agent", b"bench")]
    headers += [(b"x-stainless-lang", b"python"), (b"authorization", f"Bearer {secret}".encode())]
    hosts = HostCheck("")
    ledger = MemoryLedger(lambda: clock.now_ns() / 1e9)
    limiter = TenantLimiter(table, ledger, clock, "bench")
    found: dict[str, list[float]] = {"bare": [], "open": [], "key": [], "limits": []}
    for _ in range(ROUNDS):
        found["bare"].append(await measure(answers, headers))
        found["open"].append(await measure(KeyGate(answers, empty, clock, need=need, hosts=hosts), headers))
        found["key"].append(await measure(KeyGate(answers, table, clock, need=need, hosts=hosts), headers))
        found["limits"].append(await measure_limits(limiter))
    middle = {name: statistics.median(values) for name, values in found.items()}
    return {
        "names_of_loopback_us": round(middle["open"] - middle["bare"], 2),
        "key_us": round(middle["key"] - middle["bare"], 2),
        "limits_us": round(middle["limits"], 2),
    }


def main() -> None:
    bench_parser(__doc__).parse_args()
    found = asyncio.run(run())
    print(f"{KEYS} keys, µs a request, median of {ROUNDS} times {REQUESTS}")
    print(f"  no keys, names of loopback  {found['names_of_loopback_us']:.2f}")
    print(f"  a key                       {found['key_us']:.2f}")
    print(f"  limits of a tenant          {found['limits_us']:.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
