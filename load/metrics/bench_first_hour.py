"""Measure a suite's first hour, and check for growth: CPU, memory, coverage, age of data, alerts.

The suite is `fulcrum up` on the sim engine, in several shapes. Each is first idle, then under a steady load of streams.
A reader follows the live stream the whole time, as a page does. Every minute the bench reads the CPU and memory of each
process, the coverage of that minute, the age of the newest data shown, and alerts that started. A line for each minute
goes to stderr. At the end it prints tables with the fitted growth of CPU by process, a verdict on each aim, and one
JSON line. It exits with 1 if an aim is not met.
"""

import argparse
import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import uvloop

from libs.testing.suites.processes import name_of
from libs.testing.suites.suite import RunningSuite
from load.gateway.http_load import PacedLoad, Requests, Shape
from load.measure import Reading, cpu_points, listener_on, machine_busy_s, read_named, show
from load.metrics.first_hour_figures import (
    IDLE,
    LOADED,
    Minute,
    Phase,
    as_json,
    process_table,
    progress,
    summary,
    verdicts,
)
from load.metrics.freshness import Ages, messages
from load.setup import bench_suite

EXAMPLES = """examples:
  python -m load.metrics.bench_first_hour --idle-minutes 3 --load-minutes 3 --shapes 1+1     a quick look
  python -m load.metrics.bench_first_hour --hour --shapes 1+1                                an hour idle
  python -m libs.testing.servers.stores --kafka-port 9092 &
  python -m load.metrics.bench_first_hour --kafka 127.0.0.1:9092                             the same on a real Kafka
"""
MINUTE_S: Final = 60
# The length of the windows whose coverage is read. They are stored for longer than a phase takes.
WINDOW_S: Final = 10
# The time from the end of a minute to the first read of its coverage. It is read again after the phase.
SETTLE_S: Final = 4.0
# The interval between two samples of the age of the newest data. It is no multiple of a tick's 100 ms.
SAMPLE_S: Final = 0.13
RETRY_S: Final = 0.5
MAX_TRIES: Final = 10
FIRST_DATA_S: Final = 60.0
TOKENS: Final = 64
# The sim engine makes a token of each letter.
PROMPT: Final = "Tell me once more what you know of prefill and decode, and of how they share a device. " * 4
HELPERS: Final = "helpers"
# A program that wakes fifty times a second, like idle processes, and does the same work each time.
CONTROL_PROGRAM: Final = """
import time
while True:
    time.sleep(0.02)
    sum(range(2000))
"""


class Watcher:
    """A reader of a suite's stream that samples the age of the data shown."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ages = Ages()
        self._newest_s: list[float] = []
        self._stalest_s: list[float] = []
        """The samples of a phase, 460 a minute."""
        self._counted = 0
        """The number of samples that belong to completed minutes."""

    async def read_forever(self) -> None:
        """Follow the stream until cancelled. Reconnect whenever it ends."""
        while True:
            with suppress(httpx.HTTPError):
                async with aclosing(messages(self._url)) as coming:
                    async for event, data, _ in coming:
                        self._ages.take(event, data)
            await asyncio.sleep(RETRY_S)

    async def until_shown(self, workers: int) -> None:
        """Wait until this many workers are shown. Raise TimeoutError if they are not."""
        async with asyncio.timeout(FIRST_DATA_S):
            while self._ages.workers < workers:  # noqa: ASYNC110 - the stream sets no event
                await asyncio.sleep(SAMPLE_S)

    async def sample_forever(self) -> None:
        """Sample the ages every `SAMPLE_S` until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            now_ms = time.time_ns() / 1e6
            self._newest_s.append(self._ages.newest_s(now_ms))
            self._stalest_s.append(self._ages.stalest_s(now_ms))

    def begin(self) -> None:
        self._newest_s.clear()
        self._stalest_s.clear()
        self._counted = 0

    def minute(self) -> dict[str, float]:
        """Return the ages since the last call, as fields of Minute."""
        since, self._counted = self._counted, len(self._newest_s)
        return _ages(self._newest_s[since:], self._stalest_s[since:])

    def phase(self) -> dict[str, float]:
        """Return the ages up to the last minute, as fields of Phase."""
        return _ages(self._newest_s[: self._counted], self._stalest_s[: self._counted])


def _ages(newest_s: Sequence[float], stalest_s: Sequence[float]) -> dict[str, float]:
    p50_s, p99_s = np.percentile(newest_s, [50, 99]).tolist()
    return {"fresh_p50_s": p50_s, "fresh_p99_s": p99_s, "stalest_p99_s": float(np.percentile(stalest_s, 99))}


class MinuteReports:
    """The metrics service's answers about whole minutes."""

    def __init__(self, http: httpx.AsyncClient, url: str, workers: int) -> None:
        self._http = http
        self._url = url
        self._workers = workers
        self._alert = 0
        """The number of the last alert that was read."""

    async def coverage(self, end_unix_s: int) -> float:
        """Return the coverage of the minute that ended at `end_unix_s`, over all workers that were started."""
        span = {"window": f"{WINDOW_S}s", "span": f"{MINUTE_S}s", "end_unix_ms": end_unix_s * 1000}
        history = await self._get("/v1/occupancy/history", span)
        return float(sum(history["gpu_ns"]["covered"])) / (self._workers * MINUTE_S * 1e9)

    async def alerts(self) -> list[str]:
        """Return the alerts that started to fire since the last call."""
        newest = await self._get("/v1/alerts", {"limit": 1000})
        news = [alert for alert in newest["recent"] if alert["number"] > self._alert]
        self._alert = max([self._alert, *(alert["number"] for alert in news)])
        return [f"{alert['id']}: {alert['reason']}" for alert in reversed(news) if alert["state"] == "firing"]

    async def _get(self, path: str, query: dict[str, Any]) -> Any:
        for _ in range(MAX_TRIES - 1):
            with suppress(httpx.HTTPError):
                return (await self._http.get(self._url + path, params=query)).raise_for_status().json()
            await asyncio.sleep(RETRY_S)
        return (await self._http.get(self._url + path, params=query)).raise_for_status().json()


@dataclass(frozen=True, slots=True)
class Beside:
    """The processes beside the suite whose CPU is also read."""

    kafka: psutil.Process | None
    """A broker outside the suite; None if it does not run on this machine."""
    control: psutil.Process


class Machine:
    """The CPU and memory of a suite's processes, of this process, of the control, and of all others on the machine."""

    def __init__(self, suite: RunningSuite, beside: Beside) -> None:
        self._launcher = psutil.Process(suite.process.pid)
        self._own = psutil.Process()
        self._beside = beside
        self._last = self._read()

    def minute(self) -> dict[str, Any]:
        """Return the usage since the last call, as fields of Minute."""
        (suite, own, busy_s), self._last = self._last, self._read()
        now, own_now, busy_now_s = self._last
        points = cpu_points(suite, now)
        bench = cpu_points(own, own_now)
        busy_points = 100 * (busy_now_s - busy_s) / (now.at_s - suite.at_s)
        return {
            "cpu_points": points,
            "rss_mb": now.rss_mb,
            "restarted": sorted({key.name for key in now.cpu_s.keys() - suite.cpu_s.keys()}),
            "bench_points": bench["bench"],
            "control_points": bench["control"],
            "elsewhere_points": max(busy_points - sum(points.values()) - sum(bench.values()), 0.0),
        }

    def _read(self) -> tuple[Reading, Reading, float]:
        return (
            read_named(self._named()),
            read_named([("bench", self._own), ("control", self._beside.control)]),
            machine_busy_s(),
        )

    def _named(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield each process under the name of the launcher's child that it is or descends from."""
        yield "launcher", self._launcher
        if self._beside.kafka is not None:
            yield "kafka", self._beside.kafka
        for child in self._launcher.children():
            with suppress(psutil.NoSuchProcess):
                name = name_of(child) or HELPERS
                yield from ((name, process) for process in (child, *child.children(recursive=True)))


def load_minute(load: PacedLoad) -> dict[str, Any]:
    """Return the answers since the last call, as fields of Minute."""
    p50_s, p99_s = np.percentile(load.latencies_s, [50, 99]).tolist() if load.latencies_s else (None, None)
    found = {
        "answers": len(load.latencies_s),
        "answer_p50_s": p50_s,
        "answer_p99_s": p99_s,
        "failures": dict(load.failures),
        "not_sent": load.not_sent,
    }
    load.latencies_s.clear()
    load.failures.clear()
    load.not_sent = 0
    return found


async def until_unix_s(end_s: float) -> None:
    await asyncio.sleep(max(end_s - time.time(), 0.0))


class SuiteObserver:
    def __init__(
        self, shape: str, suite: RunningSuite, reports: MinuteReports, watcher: Watcher, beside: Beside
    ) -> None:
        self._shape = shape
        self._suite = suite
        self._reports = reports
        self._watcher = watcher
        self._beside = beside

    async def phase(self, name: str, minutes: int, load: PacedLoad | None) -> Phase:
        """Run a phase of `minutes` minutes, which start at the start of a window."""
        found: list[Minute] = []
        begun_s = (int(time.time()) // WINDOW_S + 1) * WINDOW_S
        await until_unix_s(begun_s)
        async with asyncio.TaskGroup() as tasks:  # a load that fails ends the phase
            loading = [tasks.create_task(load.run_forever())] if load else []
            machine, watcher = Machine(self._suite, self._beside), self._watcher
            watcher.begin()
            for number in range(1, minutes + 1):
                end_s = begun_s + number * MINUTE_S
                await until_unix_s(end_s)
                figures = machine.minute() | watcher.minute() | (load_minute(load) if load else {})
                await asyncio.sleep(SETTLE_S)
                coverage, alerts = await self._reports.coverage(end_s), await self._reports.alerts()
                figures |= {"coverage": coverage, "coverage_soon": coverage, "alerts": alerts}
                found.append(Minute(ended_s=float(number * MINUTE_S), **figures))
                print(progress(f"{self._shape} {name}", number, minutes, found[-1]), file=sys.stderr, flush=True)
            for task in loading:
                task.cancel()
        ends_s = [begun_s + int(minute.ended_s) for minute in found]
        settled = [replace(m, coverage=await self._reports.coverage(s)) for m, s in zip(found, ends_s, strict=True)]
        return Phase(self._shape, name, settled, **watcher.phase())


async def observe(shape: str, suite: RunningSuite, beside: Beside, options: argparse.Namespace) -> list[Phase]:
    """Run the requested phases of one suite."""
    url, gateway = str(suite.ready["metrics"]), urlsplit(suite.gateway)
    watcher, request_shape = Watcher(url), Shape(TOKENS, stream=True)
    requests = Requests(str(suite.ready["model"] or "sim"), request_shape, question=PROMPT)
    address = (str(gateway.hostname), int(gateway.port or 0))
    load = PacedLoad(address, requests, request_shape, clients=options.clients, per_s=options.rate)
    wanted = ((IDLE, options.idle_minutes, None), (LOADED, options.load_minutes, load))
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http, asyncio.TaskGroup() as tasks:
        observer = SuiteObserver(shape, suite, MinuteReports(http, url, suite.workers), watcher, beside)
        watching = [tasks.create_task(watcher.read_forever()), tasks.create_task(watcher.sample_forever())]
        await watcher.until_shown(suite.workers)
        phases = [await observer.phase(name, minutes, its_load) for name, minutes, its_load in wanted if minutes]
        for task in watching:
            task.cancel()
    return phases


def run(shape: str, beside: Beside, options: argparse.Namespace) -> list[Phase]:
    prefill, decode = shape.split("+")
    arguments = ["--engine", "sim", "--prefill", prefill, "--decode", decode]
    arguments += ["--kafka", options.kafka] if options.kafka else []
    # With its own cluster name, the suite ignores records of earlier suites on an external Kafka.
    with bench_suite(*arguments, env={"FULCRUM_CLUSTER": f"first-hour-{secrets.token_hex(4)}"}) as suite:
        return uvloop.run(observe(shape, suite, beside, options))


def shapes(text: str) -> list[str]:
    """Parse shapes such as "1+1,3+5". Raise ArgumentTypeError for other text."""
    found = text.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]*\+[1-9][0-9]*", shape, re.ASCII) for shape in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1+1,3+5: prefill and decode workers of each suite")
    return found


def broker(address: str | None) -> psutil.Process | None:
    """Return the process of the broker in --kafka; None if it does not run on this machine."""
    host, _, port = (address or "").partition(":")
    found = listener_on(int(port)) if host in ("127.0.0.1", "localhost") and port.isdecimal() else None
    if address and found is None:
        print(f"no process of this user listens on {address}: the broker's CPU is left out", file=sys.stderr)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle-minutes", type=int, default=20, metavar="N", help="of each shape; 0: none (default 20)")
    parser.add_argument("--load-minutes", type=int, default=20, metavar="N", help="the same under load (default 20)")
    parser.add_argument("--hour", action="store_const", const=60, dest="idle_minutes", help="--idle-minutes 60")
    parser.add_argument(
        "--shapes", type=shapes, default=["1+1", "3+5"], help="prefill+decode workers, one after another (1+1,3+5)"
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker that runs, in place of the embedded one")
    parser.add_argument("--clients", type=int, default=20, help="streams under way at most (default 20)")
    parser.add_argument("--rate", type=float, default=20.0, help="streams begun a second, at fixed times (default 20)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(None)
    kafka, phases = broker(options.kafka), list[Phase]()
    with subprocess.Popen([sys.executable, "-c", CONTROL_PROGRAM]) as control:
        try:
            for shape in options.shapes:
                for phase in run(shape, Beside(kafka, psutil.Process(control.pid)), options):
                    show(process_table(phase))
                    print(summary(phase), end="\n\n", flush=True)
                    phases.append(phase)
        finally:
            control.kill()
    print("* without the first minute of a phase, in which things start")
    aims = [verdict for phase in phases for verdict in verdicts(phase)]
    print("\n".join(verdict.text for verdict in aims))
    settings = {"cores": os.cpu_count(), "kafka": options.kafka, "clients": options.clients, "rate": options.rate}
    print(json.dumps({"bench": "first hour", **settings, **as_json(phases)}, allow_nan=False))
    return int(any(verdict.met is False for verdict in aims))


if __name__ == "__main__":
    sys.exit(main())
