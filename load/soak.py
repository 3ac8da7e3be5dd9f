"""`make soak`: kill a loaded suite's processes every minute, and check for growth of memory, descriptors and latency.

One process of each kind survives. It repeatedly loses its peers and stores, which may cause a leak. The bench prints a
line for each kill, a table, and one JSON object as its last line. It exits with 1 if a request failed or a figure is
missing. It also does so if a figure of the last third exceeds that of the second third by more than its tolerance.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Final

import psutil

from libs.cli.console import plain_table
from libs.runtime.tasks import TaskOwner
from libs.testing.suites.processes import BACK_S, kill, pid_of
from libs.testing.suites.steady_load import SteadyLoad, steady_load
from libs.testing.suites.suite import RunningSuite
from load.measure import bench_parser, show
from load.setup import bench_suite

SURVIVORS: Final = ("gateway-1", "prefill-1", "decode-1", "planner", "metrics")
VICTIMS: Final = ("gateway-2", "prefill-2", "decode-2", "redis", "kafka")
LAUNCHER: Final = "launcher"
SHAPE: Final = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--gateways", "2")
CLIENTS: Final = 4
TOKENS: Final = 16
MINUTES: Final = 8.0
WATCH_S: Final = 1.0
START_S: Final = 300.0
MINUTE_S: Final = 60.0
END_S: Final = 120.0
"""The upper bound of the time for the last requests to end."""
# The first third is not compared, because caches fill and modules are imported in it.
THIRDS: Final = 3
# The growth between the medians of the last two thirds that is no leak: a share and an amount. A leak exceeds both.
TOLERANCES: Final[Mapping[str, tuple[float, float]]] = {
    "resident_mib": (0.05, 4.0),
    "descriptors": (0.1, 8.0),
    "latency_ms": (0.5, 50.0),
}


MEDIAN: Final = "requests, median"
LONGEST: Final = "requests, longest in 1 s"
# The figures that every soak must compare. They are missing if the suite or one of its processes has ended.
COMPARED: Final = (
    *((name, figure) for name in (LAUNCHER, *SURVIVORS) for figure in ("resident_mib", "descriptors")),
    (MEDIAN, "latency_ms"),
    (LONGEST, "latency_ms"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure at a time since the start."""

    subject: str
    figure: str
    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Trend:
    """The medians of one figure over the second and the last third of the time."""

    subject: str
    figure: str
    second_third: float
    last_third: float

    @property
    def flat(self) -> bool:
        share, amount = TOLERANCES[self.figure]
        return self.last_third - self.second_third <= max(share * self.second_third, amount)


def trends(samples: Sequence[Sample], seconds: float) -> list[Trend]:
    """Compare the thirds of each subject's figures. A figure without values in one third is left out."""
    values: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for each in samples:
        third = min(int(each.at_s * THIRDS / seconds), THIRDS - 1)
        if third:
            values.setdefault((each.subject, each.figure), ([], []))[third - 1].append(each.value)
    return [
        Trend(subject, figure, median(second), median(last))
        for (subject, figure), (second, last) in sorted(values.items())
        if second and last
    ]


def missing(compared: Sequence[Trend]) -> list[str]:
    """Return a description of each figure in `COMPARED` that was not compared."""
    there = {(each.subject, each.figure) for each in compared}
    return [f"{figure} of {subject}" for subject, figure in COMPARED if (subject, figure) not in there]


@dataclass(slots=True)
class SoakReport:
    seconds: float
    load: SteadyLoad = field(default_factory=lambda: SteadyLoad((), TOKENS))
    kills: int = 0
    samples: list[Sample] = field(default_factory=list)


async def soak(suite: RunningSuite, seconds: float, chance: random.Random) -> SoakReport:
    found = SoakReport(seconds)
    try:
        # Clients repeat a request until it is answered, so they would run forever without gateways.
        async with (
            asyncio.timeout(seconds + END_S),
            steady_load(suite.ready["gateways"], clients=CLIENTS, tokens=TOKENS) as load,
        ):
            found.load = load
            await _watch(suite, found, chance)
    except TimeoutError:
        found.load.failed.append(f"no answer {END_S:.0f} s after the end of the soak: see the suite's log")
    return found


async def _watch(suite: RunningSuite, found: SoakReport, chance: random.Random) -> None:
    """Take samples while processes are killed, until the time is over."""
    tasks, began_s = TaskOwner(), time.monotonic()
    tasks.spawn("kills", _kill_forever(suite, found, chance))
    try:
        known = 0
        while (now_s := time.monotonic() - began_s) < found.seconds and tasks.error is None:
            found.samples += _look(suite, now_s)
            known = _add_latency(found.load, known, found, now_s)
            await asyncio.sleep(WATCH_S)
    finally:
        await tasks.close()
    if tasks.error is not None:  # a soak without kills tests nothing
        raise tasks.error


def _add_latency(load: SteadyLoad, known: int, found: SoakReport, now_s: float) -> int:
    """Add the median and maximum latency of the requests since the last call. Return the number of requests so far."""
    took_s = load.took_s[known:]
    if took_s:
        found.samples.append(Sample(MEDIAN, "latency_ms", now_s, median(took_s) * 1000))
        found.samples.append(Sample(LONGEST, "latency_ms", now_s, max(took_s) * 1000))
    return known + len(took_s)


def _look(suite: RunningSuite, now_s: float) -> list[Sample]:
    found = []
    pids = {LAUNCHER: suite.process.pid, **{name: pid_of(suite, name) for name in SURVIVORS}}
    for name, pid in pids.items():
        if pid is None:
            raise RuntimeError(f"{name} ended, which nothing has killed: see the suite's log")
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append(Sample(name, "resident_mib", now_s, process.memory_info().rss / 2**20))
            found.append(Sample(name, "descriptors", now_s, process.num_fds()))
    return found


async def _kill_forever(suite: RunningSuite, found: SoakReport, chance: random.Random) -> None:
    """Kill every victim once a minute, each time in another order."""
    while True:
        for name in chance.sample(VICTIMS, len(VICTIMS)):
            await asyncio.sleep(MINUTE_S / len(VICTIMS))
            try:
                async with asyncio.timeout(BACK_S):
                    await kill(suite, name)
            except TimeoutError:
                raise RuntimeError(f"{name} was not back after {BACK_S:.0f} s: see the suite's log") from None
            found.kills += 1
            print(f"kill {found.kills}: {name}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the soak. Return 1 if something failed or grew."""
    parser = bench_parser(__doc__, minutes=MINUTES, seed=1)
    arguments = parser.parse_args(argv)
    with bench_suite(*SHAPE, start_s=START_S) as suite:
        found = asyncio.run(soak(suite, arguments.minutes * MINUTE_S, random.Random(arguments.seed)))
        return report(found)  # before the suite stops, which may fail too


def report(found: SoakReport) -> int:
    compared = trends(found.samples, found.seconds)
    table = plain_table("of", "figure", "second third", "last third", "flat")
    for each in compared:
        table.add_row(
            each.subject,
            each.figure,
            f"{each.second_third:.1f}",
            f"{each.last_third:.1f}",
            "yes" if each.flat else "NO",
        )
    show(table)
    load, unknown = found.load, missing(compared)
    for failure in (*load.failed[:5], *(f"unknown in a third of the time: {each}" for each in unknown)):
        print(f"  {failure}")
    row = {"seconds": found.seconds, "served": load.served, "failed": len(load.failed), "broken": load.broken}
    row |= {"kills": found.kills, "missing": len(unknown)}
    print(json.dumps({**row, "trends": [asdict(each) for each in compared]}), flush=True)
    return int(bool(load.failed or unknown) or not all(each.flat for each in compared))


if __name__ == "__main__":
    sys.exit(main())
