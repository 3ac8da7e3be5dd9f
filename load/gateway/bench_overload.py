"""A suite at its capacity and beyond: what is refused, with which Retry-After, whether that holds, and whether memory
stays. Clients come back when they are asked to, or with `--never` go away when they are refused.

Capacity is measured first, by clients that ask again as soon as they are answered. Then arrivals come at fixed
intervals whoever is still waiting. Prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import httpx
import uvloop

from libs.testing.suites.processes import gateway_metrics
from libs.testing.suites.suite import RunningSuite, running_suite
from load.processes import Kinds, processes_below, usage

KINDS = {"services.gateway": "gateway", "services.prefill": "prefill", "services.decode": "decode"}
MAX_WAITING = 64
MAX_SEQUENCES = 8
"""Of each worker: so few that ten times their capacity is nothing to the load client."""
CLIENTS = 32
"""That measure capacity: more than run at once, fewer than may wait."""
MAX_OPEN = 2000
"""Requests that the load itself has under way at most; arrivals beyond are counted as not sent."""
DRAIN_TIMEOUT_S = 120.0
SAMPLE_S = 1.0
SETTLE_S = 5.0
"""Of a phase, until the queue is as full as it will be."""
MAX_TRIES = 50
"""Of a request whose client comes back."""


@dataclass
class Phase:
    """What came of one rate of arrivals."""

    name: str
    per_s: float
    seconds: float
    statuses: Counter[str] = field(default_factory=Counter)
    not_sent: int = 0
    retry_after_s: list[float] = field(default_factory=list)
    """Retry-After of refusals."""
    last_retry_after_s: float = 0.0
    promises: list["Promise"] = field(default_factory=list)
    """First refusals of requests that came back."""
    served_s: list[float] = field(default_factory=list)
    """By the loop's clock, when requests were answered otherwise than by a refusal."""
    goodput_per_s: float = 0.0
    """Answers a second while requests arrived, after the first `SETTLE_S`."""
    drained_s: float = 0.0
    """From the last arrival until nothing waited any more."""
    rss_mb: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Promise:
    """A first refusal, and what came of coming back."""

    retry_after_s: float
    ahead: int
    """Requests that had been refused before and not been let in yet."""
    kept: bool | None = None
    """Whether the request was let in when it came back; None: it has not yet."""


async def come_back(http: httpx.AsyncClient, url: str, number: int, phase: Phase) -> None:
    """One request whose client obeys Retry-After until it is served."""
    first: Promise | None = None
    for _ in range(MAX_TRIES):
        wait_s = await ask(http, url, number, phase)
        if first is not None and first.kept is None:
            first.kept = wait_s is None
        if wait_s is None:
            return
        if first is None:
            first = Promise(wait_s, sum(each.kept is not True for each in phase.promises))
            phase.promises.append(first)
        await asyncio.sleep(wait_s)


async def ask(http: httpx.AsyncClient, url: str, number: int, phase: Phase) -> float | None:
    """One request, counted by how it was answered; Retry-After of one that was refused."""
    body = {"model": "sim", "prompt": f"{number:08d} what is the answer?", "max_tokens": 64, "ignore_eos": True}
    try:
        answer = await http.post(f"{url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        phase.statuses[type(error).__name__] += 1
        return None
    phase.statuses[str(answer.status_code)] += 1
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        phase.last_retry_after_s = float(answer.headers["retry-after"])
        phase.retry_after_s.append(phase.last_retry_after_s)
        return phase.last_retry_after_s
    phase.served_s.append(asyncio.get_running_loop().time())
    return None


async def capacity_per_s(http: httpx.AsyncClient, url: str, seconds: float, numbers: "count[int]") -> float:
    """Answers a second to clients that wait for each other."""
    phase = Phase("capacity", 0.0, seconds)

    async def client() -> None:
        while True:
            await ask(http, url, next(numbers), phase)

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.sleep(seconds / 4)
    before, start_s = phase.statuses["200"], time.perf_counter()
    await asyncio.sleep(seconds)
    found = (phase.statuses["200"] - before) / (time.perf_counter() - start_s)
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return found


async def run_phase(
    http: httpx.AsyncClient, suite: RunningSuite, phase: Phase, numbers: "count[int]", *, never: bool
) -> None:
    """Arrivals for so long, then until the queue is empty; memory all along."""
    loop, kinds = asyncio.get_running_loop(), processes_below(suite.process.pid, KINDS)
    sampling = asyncio.create_task(_sample(kinds, phase))
    open_requests: set[asyncio.Task[None]] = set()
    start_s, sent = loop.time(), 0
    while (passed_s := loop.time() - start_s) < phase.seconds:
        while sent < passed_s * phase.per_s:
            sent += 1
            if len(open_requests) >= MAX_OPEN:
                phase.not_sent += 1
                continue
            task = asyncio.create_task(_visit(http, suite.gateway, next(numbers), phase, never=never))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
        await asyncio.sleep(0.005)
    end_s = loop.time()
    settled = [each for each in phase.served_s if each - start_s >= SETTLE_S]
    phase.goodput_per_s = len(settled) / max(end_s - start_s - SETTLE_S, 1e-9)
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while (await gateway_metrics(http, suite.gateway))["waiting"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
    phase.drained_s = loop.time() - end_s
    await asyncio.gather(*open_requests)
    sampling.cancel()
    await asyncio.wait([sampling])


async def _visit(http: httpx.AsyncClient, url: str, number: int, phase: Phase, *, never: bool) -> None:
    await (ask if never else come_back)(http, url, number, phase)


def promised(phase: Phase, capacity: float) -> dict[str, float]:
    """Share of first refusals that were let in when they came back, and how much later than needed they were asked to:
    than the time in which those before them are served at full capacity, as far as clients can count whole seconds."""
    known = [each for each in phase.promises if each.kept is not None]
    if not known:
        return {"promises": 0}
    late = sorted(each.retry_after_s / max(each.ahead / capacity, 1.0) for each in known)
    return {
        "promises": len(known),
        "held": sum(each.kept is True for each in known) / len(known),
        "of_earliest_p50": late[len(late) // 2],
        "of_earliest_p90": late[len(late) * 9 // 10],
    }


async def _sample(kinds: Kinds, phase: Phase) -> None:
    while True:
        phase.rss_mb.append({kind: round(each.rss_mb, 1) for kind, each in usage(kinds).items()})
        await asyncio.sleep(SAMPLE_S)


def line(phase: Phase) -> str:
    """A row for people: memory at the start, after a third, and at the end."""
    waits = (
        f"{min(phase.retry_after_s):.0f}-{max(phase.retry_after_s):.0f}, last {phase.last_retry_after_s:.0f}"
        if phase.retry_after_s
        else "-"
    )
    shown = (0, len(phase.rss_mb) // 3, -1)
    rss = "  ".join(
        f"{kind} " + "/".join(f"{phase.rss_mb[place][kind]:.0f}" for place in shown) for kind in phase.rss_mb[0]
    )
    others = {status: n for status, n in phase.statuses.items() if status not in ("200", "429")}
    return (
        f"{phase.name:<6}{phase.per_s:>8.0f}{phase.statuses['200']:>8}{phase.statuses['429']:>8}{others or '-'!s:>8}"
        f"{phase.not_sent:>9}  {waits:>18}{phase.drained_s:>10.1f}   {rss}"
    )


async def bench(options: argparse.Namespace) -> tuple[float, list[Phase]]:
    """The phases, one after another, on one suite."""
    env = {"FULCRUM_GATEWAY_MAX_WAITING": str(MAX_WAITING), "FULCRUM_WORKER_MAX_SEQUENCES": str(MAX_SEQUENCES)}
    numbers: count[int] = count()
    limits = httpx.Limits(max_connections=None)
    with (
        tempfile.TemporaryDirectory(prefix="fulcrum-bench-") as folder,
        running_suite(Path(folder), "--engine", "sim", env=env) as suite,
    ):
        async with httpx.AsyncClient(timeout=120, limits=limits, verify=False) as http:
            capacity = await capacity_per_s(http, suite.gateway, options.measure_seconds, numbers)
            phases = [Phase(f"{times:g}x", capacity * times, options.seconds) for times in options.times]
            for phase in phases:
                await run_phase(http, suite, phase, numbers, never=options.never)
                print(line(phase), flush=True)
                print(f"      goodput {phase.goodput_per_s / capacity:.2f} of capacity, {promised(phase, capacity)}")
    return capacity, phases


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate of arrivals")
    parser.add_argument("--measure-seconds", type=float, default=6.0, help="of the measurement of capacity")
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 3.0, 10.0], help="of capacity")
    parser.add_argument("--never", action="store_true", help="clients that are refused do not come back")
    options = parser.parse_args()
    print(f"sim engine, 64 tokens an answer, {MAX_WAITING} may wait; MiB at the start, after a third, at the end")
    print(
        f"{'':<6}{'req/s':>8}{'200':>8}{'429':>8}{'others':>8}{'not sent':>9}  {'Retry-After s':>18}{'drained s':>10}"
    )
    capacity, phases = uvloop.run(bench(options))
    rows = [
        {name: value for name, value in asdict(phase).items() if name not in ("promises", "served_s")}
        | promised(phase, capacity)
        | {"statuses": dict(phase.statuses), "retry_after_s": sorted(Counter(phase.retry_after_s).items())}
        for phase in phases
    ]
    print(json.dumps({"bench": "overload", "capacity_per_s": round(capacity, 1), "phases": rows}))


if __name__ == "__main__":
    main()
