"""Make a moving picture for README and front page: the page during a flood of long prompts that one command ends.

`make moving-picture` writes docs/images/page-flood.gif from a suite of simulated GPUs, and page-flood.png, its last
frame before the command. With `--frames FOLDER` it also writes each frame as a PNG. The planner only advises here. The
command below the verdict is run as `fulcrum advice --apply`.
"""

import argparse
import asyncio
import io
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import httpx
import psutil
from PIL import Image
from playwright.async_api import Page, ViewportSize

from libs.testing.suites.browser import PROGRAMS, browser, listen_for_errors
from libs.testing.suites.suite import RunningSuite
from load.gateway.http_load import running_clients
from load.lab.fidelity import BYTES
from load.metrics.screenshots import keep
from load.setup import bench_suite

# A large model on slow GPUs has long steps and few requests a second, so that two cores are enough for suite and
# browser.
SPEEDUP: Final = "0.4"
WORKERS: Final = (
    "--engine", "sim", "--sim-profile", "llama3.1-70b-h100-tp4-aic",
    "--prefill", "1", "--decode", "4", "--workers-per-process", "5",
)  # fmt: skip
VIEW: Final[ViewportSize] = {"width": 1000, "height": 640}
COLORS: Final = 64
PALETTE_FRAMES: Final = 8
BROWSER_NICENESS: Final = 15
MOST_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Clients:
    """Clients that send their next request as soon as they have an answer. All requests have the given lengths."""

    count: int
    prompt_tokens: int
    output_tokens: int


QUIET: Final = Clients(2, 400, 200)
FLOOD: Final = Clients(10, 7_000, 8)
EVERY_S: Final = 1.0
SHOWN_MS: Final = 400
LAST_SHOWN_MS: Final = 3_000
"""The time for which the last frame is shown before the picture starts again."""
WARM_S, FLOOD_AT_S, COMMAND_AT_S, CALM_AT_S, END_S = 30.0, 3.0, 7.0, 16.0, 26.0
"""The duration of the quiet load before the first frame, and times after the first frame."""


@asynccontextmanager
async def load(url: str, clients: Clients) -> AsyncIterator[None]:
    async def client(http: httpx.AsyncClient, number: int) -> None:
        chance = Random(number)
        while True:
            # The gateway need not tokenise ids, and random ones are never cached.
            prompt = [chance.randrange(BYTES) for _ in range(clients.prompt_tokens)]
            body = {"model": "sim", "prompt": prompt, "max_tokens": clients.output_tokens, "ignore_eos": True}
            answer = await http.post(f"{url}/v1/completions", json=body)
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                await asyncio.sleep(float(answer.headers["retry-after"]))

    async with running_clients(clients.count, client):
        yield


async def frames_of(page: Page, until_s: float) -> list[bytes]:
    """Capture a frame every `EVERY_S` until a time of the monotonic clock."""
    taken: list[bytes] = []
    next_s = time.monotonic()
    while next_s < until_s:
        await asyncio.sleep(max(next_s - time.monotonic(), 0))
        taken.append(await page.screenshot())
        next_s = max(next_s + EVERY_S, time.monotonic())
    return taken


def yield_to_suite() -> None:
    """Lower the browser's priority. It draws on the CPU, and workers that wait for a core would change the verdict."""
    for process in psutil.Process().children(recursive=True):
        if any(name in process.name() for name in PROGRAMS):
            process.nice(BROWSER_NICENESS)


def apply_advice(suite: RunningSuite) -> None:
    """Run `fulcrum advice --apply`, and confirm it."""
    command = [sys.executable, "-m", "libs.cli.main", "advice", "--apply"]
    done = subprocess.run(command, env=suite.env, input="y\n", capture_output=True, text=True, timeout=60, check=False)
    print(done.stdout, end="", file=sys.stderr)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


async def film(suite: RunningSuite) -> tuple[list[bytes], bytes]:
    """Return all frames, and the last one before the command."""
    async with load(suite.gateway, QUIET), browser() as running:
        page = await running.new_page(viewport=VIEW, color_scheme="light")
        errors = listen_for_errors(page)
        await page.goto(suite.ready["metrics"])
        yield_to_suite()
        await asyncio.sleep(WARM_S)
        start_s = time.monotonic()
        taken = await frames_of(page, start_s + FLOOD_AT_S)
        async with load(suite.gateway, FLOOD):
            taken += await frames_of(page, start_s + COMMAND_AT_S)
            flooded = taken[-1]
            applied = asyncio.create_task(asyncio.to_thread(apply_advice, suite))
            taken += await frames_of(page, start_s + CALM_AT_S)
            await applied
        taken += await frames_of(page, start_s + END_S)
        if errors:
            raise RuntimeError(errors[0])
        return taken, flooded


def write(taken: list[bytes], file: Path) -> None:
    """Write frames with one palette, so that the file contains only changes between frames."""
    pictures = [Image.open(io.BytesIO(each)).convert("RGB") for each in taken]
    drawn = pictures[:: len(pictures) // PALETTE_FRAMES]
    sheet = Image.new("RGB", (VIEW["width"], VIEW["height"] * len(drawn)))
    for at, picture in enumerate(drawn):
        sheet.paste(picture, (0, at * VIEW["height"]))
    palette = sheet.quantize(COLORS)
    first, *rest = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
    shown_ms = [SHOWN_MS] * len(rest) + [LAST_SHOWN_MS]
    first.save(file, save_all=True, append_images=rest, duration=shown_ms, loop=0, optimize=True)
    size = file.stat().st_size
    print(f"{file} {size / 1000:.0f} kB, {len(pictures)} frames")
    if size > MOST_BYTES:
        raise RuntimeError(f"{file} has {size:,} bytes, more than {MOST_BYTES:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("docs/images/page-flood.gif"))
    parser.add_argument("--frames", type=Path, help="a folder that gets each frame as a PNG too")
    options = parser.parse_args()
    with bench_suite(*WORKERS, env={"FULCRUM_WORKER_NAMES": "gpu", "FULCRUM_WORKER_SIM_SPEEDUP": SPEEDUP}) as suite:
        taken, flooded = asyncio.run(film(suite))
    if options.frames:
        options.frames.mkdir(parents=True, exist_ok=True)
        for at, each in enumerate(taken):
            (options.frames / f"{at:03}.png").write_bytes(each)
    write(taken, options.file)
    keep(flooded, options.file.with_suffix(".png"))


if __name__ == "__main__":
    main()
