"""Measure live occupancy of fleets of GPUs that report ten times a second: its cost, its freshness, and the page.

Each fleet's telemetry goes through the metrics service's own ingest, history and stream in a separate process, with one
reader here. Freshness is the time from the end of each step until the message that shows it has been read. Memory is
the process's peak. It is also measured for a process that starts with a full history. A large fleet is also read by
several instances that share it, and a real Chromium shows the page over 1,000 GPUs. The bench prints a table, then one
JSON line. It exits with 1 if one service over 1,000 GPUs or the page misses its aim.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from libs.cli.console import plain_table
from libs.testing.suites.browser import WIDE, BrowserUnavailable, browser
from load.measure import show
from load.metrics.freshness import WARM_UP_S, Reader, follow

FLEETS: Final = (10, 100, 1000, 3000)
FULL_GPUS: Final = 1000
SHARED_GPUS: Final = 3000
SHARED_BY: Final = (2, 3)
PAGE_GPUS: Final = 1000
# The size of the fleet for the aims, which one service reads.
AIMED_GPUS: Final = 1000
MOST_FRESH_P99_MS: Final = 200.0
MOST_CORES: Final = 1.0
MOST_RSS_MB: Final = 500.0
LEAST_FRAMES_PER_S: Final = 30.0
MOST_TASK_MS: Final = 200.0
FRAMES: Final = """seconds => new Promise(resolve => {
  const gaps = [], tasks = [];
  new PerformanceObserver(list => list.getEntries().forEach(entry => tasks.push(entry.duration)))
    .observe({entryTypes: ["longtask"]});
  let last = performance.now();
  const end = last + 1000 * seconds;
  const frame = now => {
    gaps.push(now - last);
    last = now;
    if (now < end) requestAnimationFrame(frame);
    else resolve({gaps, tasks});
  };
  requestAnimationFrame(frame);
})"""


@dataclass(frozen=True, slots=True)
class Measured:
    gpus: int
    instances: int
    full: bool
    """True if the service started with a full history."""
    cpu_share: float
    """The cores in use, summed over all instances."""
    rss_mb: float
    """The peak memory of the largest instance in MB."""
    fresh_p50_ms: float
    fresh_p99_ms: float
    tick_kb: float
    late_ms: float
    """The lag of the slowest instance behind the telemetry at the end."""
    skipped_ticks: int
    unrevised_windows: int


@asynccontextmanager
async def service(gpus: int, used: list[dict[str, Any]], *more: str) -> AsyncIterator[str]:
    """Run the metrics service's parts with a fleet, and yield the address.

    The service's usage is appended to `used` at the end.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "load.metrics.occupancy_service", str(gpus), *more,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        yield json.loads(await process.stdout.readline())["url"]
        process.stdin.close()
        used.append(json.loads(await process.stdout.readline() or "{}"))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def services(gpus: int, used: list[dict[str, Any]], instances: int, *, full: bool) -> AsyncIterator[str]:
    """Run several instances that share the fleet, and yield the address of one."""
    more = ("--full",) * full
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory())

        async def start(number: int) -> str:
            sharing = ("--instances", str(instances), "--number", str(number), "--sockets", str(Path(sockets)))
            return await stack.enter_async_context(service(gpus, used, *more, *sharing))

        yield (await asyncio.gather(*map(start, range(instances))))[0]


async def measure(gpus: int, seconds: float, instances: int = 1, *, full: bool = False) -> Measured:
    reader = Reader(gpus)
    used: list[dict[str, Any]] = []
    async with services(gpus, used, instances, full=full) as url:
        await follow(url, reader, seconds)
    return Measured(
        gpus=gpus,
        instances=instances,
        full=full,
        cpu_share=sum(each["cpu_share"] for each in used),
        rss_mb=max(each["rss_mb"] for each in used),
        tick_kb=statistics.fmean(reader.sizes or [0]) / 1e3,
        late_ms=max(each["late_ms"] for each in used),
        skipped_ticks=sum(each["skipped_ticks"] for each in used),
        unrevised_windows=sum(each["unrevised_windows"] for each in used),
        **reader.percentiles_ms(),
    )


async def measure_page(seconds: float) -> dict[str, float]:
    """Return the frames and long tasks of a page over `PAGE_GPUS`, once its history is loaded."""
    async with service(PAGE_GPUS, []) as url, browser() as running:
        page = await running.new_page(viewport=WIDE)
        await page.goto(f"{url}/")
        await page.wait_for_timeout(1e3 * 2 * WARM_UP_S)
        found = await page.evaluate(FRAMES, seconds)
    gaps = found["gaps"][1:]
    return {
        "gpus": PAGE_GPUS,
        "seconds": seconds,
        "frames_per_s_median": 1e3 / statistics.median(gaps),
        "frames_per_s_p5": 1e3 / sorted(gaps)[int(0.95 * len(gaps))],
        "longest_task_ms": max(found["tasks"], default=0.0),
        "tasks_over_50_ms": len(found["tasks"]),
    }


def slopes(fleets: Sequence[Measured]) -> list[dict[str, float]]:
    """Return the cost of 1,000 more GPUs between each two successive fleets of one service with an empty history."""
    alone = [each for each in fleets if each.instances == 1 and not each.full]
    return [
        {
            "from_gpus": less.gpus,
            "to_gpus": more.gpus,
            "cores_per_1000_gpus": 1000 * (more.cpu_share - less.cpu_share) / (more.gpus - less.gpus),
            "mb_per_1000_gpus": 1000 * (more.rss_mb - less.rss_mb) / (more.gpus - less.gpus),
        }
        for less, more in pairwise(alone)
    ]


def misses(fleets: Sequence[Measured], page: dict[str, float] | None) -> list[str]:
    aimed = [each for each in fleets if each.gpus == AIMED_GPUS and each.instances == 1]
    bounds = [
        (f"{each.gpus} GPUs{', all history kept' * each.full}: {name}", value, most)
        for each in aimed
        for name, value, most in (
            ("p99 freshness, ms", each.fresh_p99_ms, MOST_FRESH_P99_MS),
            ("cores", each.cpu_share, MOST_CORES),
            ("peak RSS, MB", each.rss_mb, MOST_RSS_MB),
        )
    ]
    if page:
        bounds.append(("page: longest task, ms", page["longest_task_ms"], MOST_TASK_MS))
    missed = [f"{name}: {value:.2f}, at most {most:g}" for name, value, most in bounds if not value <= most]
    if page and not page["frames_per_s_median"] >= LEAST_FRAMES_PER_S:
        missed.append(f"page: median frames/s: {page['frames_per_s_median']:.0f}, at least {LEAST_FRAMES_PER_S:g}")
    return missed


def report(fleets: Sequence[Measured], page: dict[str, float] | None) -> None:
    table = plain_table("GPUs", "by", "CPU, cores", "peak RSS", "fresh p50", "p99", "a tick", "behind", "")
    for each in fleets:
        table.add_row(
            str(each.gpus), str(each.instances), f"{each.cpu_share:.2f}", f"{each.rss_mb:.0f} MB",
            f"{each.fresh_p50_ms:.0f} ms", f"{each.fresh_p99_ms:.0f} ms", f"{each.tick_kb:.1f} kB",
            f"{each.late_ms:.0f} ms", "all history kept" * each.full,
        )  # fmt: skip
    show(table)
    for slope in slopes(fleets):
        print(
            f"from {slope['from_gpus']} to {slope['to_gpus']} GPUs: {slope['cores_per_1000_gpus']:.2f} cores and "
            f"{slope['mb_per_1000_gpus']:.0f} MB for 1,000 more"
        )
    if page:
        print(
            f"page over {page['gpus']:.0f} GPUs for {page['seconds']:.0f} s: {page['frames_per_s_median']:.0f} "
            f"frames/s (5th percentile {page['frames_per_s_p5']:.0f}), longest task {page['longest_task_ms']:.0f} ms, "
            f"{page['tasks_over_50_ms']:.0f} over 50 ms"
        )


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each fleet, after warm-up")
    parser.add_argument("--page-seconds", type=float, default=60.0, help="0: no page")
    parser.add_argument("--gpus", type=int, nargs="*", default=list(FLEETS))
    parser.add_argument("--full-gpus", type=int, default=FULL_GPUS, help="fleet with all history kept; 0: none")
    parser.add_argument("--shared-gpus", type=int, default=SHARED_GPUS, help="fleet of instances that share it")
    parser.add_argument("--shared-by", type=int, nargs="*", default=list(SHARED_BY), help="how many of them")
    options = parser.parse_args()
    fleets = [await measure(gpus, options.seconds) for gpus in options.gpus]
    if options.full_gpus:
        fleets.append(await measure(options.full_gpus, options.seconds, full=True))
    fleets += [await measure(options.shared_gpus, options.seconds, by) for by in options.shared_by]
    page, missed = None, []
    if options.page_seconds:
        try:
            page = await measure_page(options.page_seconds)
        except BrowserUnavailable as error:
            missed.append(f"page: not measured: {error}; --page-seconds 0 leaves it out")
    report(fleets, page)
    missed += misses(fleets, page)
    found = {"fleets": [asdict(each) for each in fleets], "slopes": slopes(fleets), "page": page, "missed": missed}
    print(json.dumps(found))
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
