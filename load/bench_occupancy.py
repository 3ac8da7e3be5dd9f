"""Live occupancy of fleets of GPUs that send ten times a second: what it costs, how fresh it is, how the page holds.

Each fleet's telemetry goes through the metrics service's own ingest, history and stream in a process of its own, with
one reader here. Freshness: from the end of a step until the stream's message that shows it has been read. For the page
a real Chromium is open over 1,000 GPUs. Prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import httpx

from libs.testing.browser import WIDE, BrowserUnavailable, browser
from load.synthetic_fleet import synthetic_fleet

FLEETS: Final = (10, 100, 1000, 3000)
WARM_UP_S: Final = 4.0
PAGE_GPUS: Final = 1000
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


@dataclass
class Fleet:
    """What a fleet came to."""

    gpus: int
    cpu_share: float = 0.0
    rss_mb: float = 0.0
    fresh_p50_ms: float = 0.0
    fresh_p99_ms: float = 0.0
    tick_kb: float = 0.0
    late_ms: float = 0.0
    skipped_ticks: int = 0
    unrevised_windows: int = 0


@asynccontextmanager
async def service(gpus: int, used: dict[str, Any]) -> AsyncIterator[str]:
    """The parts of the metrics service with a fleet; its address. `used` is filled at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "load.occupancy_service", str(gpus),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        yield json.loads(await process.stdout.readline())["url"]
        process.stdin.close()
        used |= json.loads(await process.stdout.readline() or "{}")
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Reader:
    """Follows a stream and times when each worker's steps show."""

    def __init__(self, gpus: int) -> None:
        self._phases_ms = {worker.id: worker.phase_ns / 1e6 for worker in synthetic_fleet(gpus)}
        self._ids: list[str] = []
        self._covered: dict[tuple[int, int], int] = {}
        self.freshness_ms: list[float] = []
        self.sizes: list[int] = []

    def take(self, event: str, data: str, now_ms: float) -> None:
        """A message that was read at `now_ms`."""
        value = json.loads(data)
        if event == "members":
            self._ids = [worker["id"] for worker in value["workers"]]
            self._covered.clear()
            return
        self.sizes.append(len(data))
        for start_ms, places, covered, *_ in value["windows"]:
            for index, ns in enumerate(covered):
                place = places[index] if places else index
                self._step(start_ms, place, ns, now_ms)
        oldest = value["now_unix_ms"] - 2_000
        self._covered = {key: ns for key, ns in self._covered.items() if key[0] > oldest}

    def _step(self, start_ms: int, place: int, covered_ns: int, now_ms: float) -> None:
        """A step of each worker ends at its phase in each window: shown once the window is covered up to there."""
        before = self._covered.get((start_ms, place), 0)
        self._covered[start_ms, place] = covered_ns
        phase_ms = self._phases_ms[self._ids[place]]
        if before < phase_ms * 1e6 <= covered_ns + 1:
            self.freshness_ms.append(now_ms - start_ms - phase_ms)


async def follow(url: str, reader: Reader, seconds: float) -> None:
    """Read the stream for so long, and count from the end of the warm-up on."""
    async with httpx.AsyncClient(timeout=30) as http, http.stream("GET", f"{url}/v1/occupancy/stream") as answer:
        began_s, event, warm = time.monotonic(), "", False
        async for line in answer.aiter_lines():
            now_ms = time.time_ns() / 1e6
            if line.startswith("event: "):
                event = line[7:]
            elif line.startswith("data: "):
                reader.take(event, line[6:], now_ms)
            passed_s = time.monotonic() - began_s
            if not warm and passed_s > WARM_UP_S:
                warm = True
                reader.freshness_ms.clear()
            if passed_s > WARM_UP_S + seconds:
                return


async def measure(gpus: int, seconds: float) -> Fleet:
    """One fleet."""
    reader = Reader(gpus)
    used: dict[str, Any] = {}
    async with service(gpus, used) as url:
        await follow(url, reader, seconds)
    ranks = statistics.quantiles(reader.freshness_ms, n=100)
    return Fleet(
        gpus=gpus, fresh_p50_ms=ranks[49], fresh_p99_ms=ranks[98], tick_kb=statistics.fmean(reader.sizes) / 1e3, **used
    )


async def measure_page(seconds: float) -> dict[str, float]:
    """Frames and long tasks of a page over `PAGE_GPUS`, once its history is loaded."""
    async with service(PAGE_GPUS, {}) as url, browser() as running:
        page = await running.new_page(viewport=WIDE)
        await page.goto(f"{url}/")
        await page.wait_for_timeout(1e3 * 2 * WARM_UP_S)
        found = await page.evaluate(FRAMES, seconds)
    gaps = found["gaps"][1:]
    return {
        "gpus": PAGE_GPUS,
        "frames_per_s_median": 1e3 / statistics.median(gaps),
        "frames_per_s_p5": 1e3 / sorted(gaps)[int(0.95 * len(gaps))],
        "longest_task_ms": max(found["tasks"], default=0.0),
        "tasks_over_50_ms": len(found["tasks"]),
    }


def slopes(fleets: Sequence[Fleet]) -> list[dict[str, float]]:
    """What 1,000 more GPUs cost, from each fleet to the next."""
    return [
        {
            "from_gpus": less.gpus,
            "to_gpus": more.gpus,
            "cores_per_1000_gpus": 1000 * (more.cpu_share - less.cpu_share) / (more.gpus - less.gpus),
            "mb_per_1000_gpus": 1000 * (more.rss_mb - less.rss_mb) / (more.gpus - less.gpus),
        }
        for less, more in pairwise(fleets)
    ]


def show(fleets: Sequence[Fleet], page: dict[str, float] | None) -> None:
    """The table."""
    print(f"{'GPUs':>6} {'CPU, cores':>11} {'memory':>9} {'fresh p50':>10} {'p99':>8} {'a tick':>9} {'behind':>9}")
    for each in fleets:
        print(
            f"{each.gpus:>6} {each.cpu_share:>11.2f} {each.rss_mb:>6.0f} MB {each.fresh_p50_ms:>7.0f} ms "
            f"{each.fresh_p99_ms:>5.0f} ms {each.tick_kb:>6.1f} kB {each.late_ms:>6.0f} ms"
        )
    for slope in slopes(fleets):
        print(
            f"from {slope['from_gpus']} to {slope['to_gpus']} GPUs: {slope['cores_per_1000_gpus']:.2f} cores and "
            f"{slope['mb_per_1000_gpus']:.0f} MB for 1,000 more"
        )
    if page:
        print(
            f"page over {page['gpus']:.0f} GPUs: {page['frames_per_s_median']:.0f} frames/s (5th percentile "
            f"{page['frames_per_s_p5']:.0f}), longest task {page['longest_task_ms']:.0f} ms"
        )


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each fleet, after warm-up")
    parser.add_argument("--page-seconds", type=float, default=30.0)
    parser.add_argument("--gpus", type=int, nargs="*", default=list(FLEETS))
    options = parser.parse_args()
    fleets = [await measure(gpus, options.seconds) for gpus in options.gpus]
    page = None
    if options.page_seconds:
        try:
            page = await measure_page(options.page_seconds)
        except BrowserUnavailable as error:
            print(f"no page: {error}", file=sys.stderr)
    show(fleets, page)
    print(json.dumps({"fleets": [asdict(each) for each in fleets], "slopes": slopes(fleets), "page": page}))


if __name__ == "__main__":
    asyncio.run(main())
