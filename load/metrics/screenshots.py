"""Take the pictures for the documentation: the page over a simulated suite, a worker's steps, a fleet, `fulcrum top`.

`make screenshots` writes docs/images/*.png with few colours, so that the files are small. The page is taken in light
and dark colours, wide, and on a phone. The fleet has 1,000 synthetic GPUs.
"""

import argparse
import asyncio
import io
import math
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import httpx
from PIL import Image
from playwright.async_api import Browser, ViewportSize

from libs.cli.top.feed import Feed
from libs.cli.top.screen import Top
from libs.runtime.net.ports import held_port
from libs.testing.suites.browser import PHONE, WIDE, browser, listen_for_errors
from libs.testing.suites.suite import RunningSuite
from load.gateway.http_load import running_clients
from load.metrics.bench_occupancy import service
from load.setup import bench_suite

WORKERS: Final = ("--engine", "sim", "--prefill", "3", "--decode", "4", "--mixed", "1")
LAPTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
# (name, size, colours, rest of the address)
Picture = tuple[str, ViewportSize, Literal["light", "dark"], str]
PICTURES: Final[tuple[Picture, ...]] = (
    ("page-light", WIDE, "light", ""),
    ("page-dark", WIDE, "dark", ""),
    ("page-phone", PHONE, "light", ""),
    ("page-worker", LAPTOP, "light", "#scope=worker%3Adecode-1"),
)
FLEET: Final[tuple[Picture, ...]] = (("page-1000-gpus", WIDE, "dark", "#sort=pool"),)
VIEW: Final[ViewportSize] = {"width": 1280, "height": 560}
VIEWS: Final[tuple[Picture, ...]] = (
    ("page-forecast", VIEW, "light", "#tab=forecast"),
    ("page-models", VIEW, "light", "#tab=models"),
)
MODELS: Final = ("chat-8b", "coder-34b", "night-70b")
POOL: Final = ("--engine", "sim", "--pool", "2", *(word for model in MODELS for word in ("--model", model)))
HISTORY_DAYS, BIN_S = 6, 900.0
FLEET_GPUS: Final = 1_000
# (columns, lines)
TERMINAL: Final = (120, 30)
COLORS: Final = 128
CLIENTS: Final = 4
# Nearly the whole range of 30 s.
LOADED_S: Final = 25.0
SETTLED_MS: Final = 3_000.0


@asynccontextmanager
async def waves(url: str) -> AsyncIterator[None]:
    """Run clients while the context is open. Their prompts grow and shrink over the seconds."""

    async def client(http: httpx.AsyncClient, _number: int) -> None:
        while True:
            words = 100 + int(900 * abs(math.sin(time.monotonic() / 7)))
            body = {"model": "sim", "prompt": "word " * words, "max_tokens": 60, "ignore_eos": True}
            body["prompt"] = f"{time.monotonic_ns()} {body['prompt']}"  # so that nothing is cached
            await http.post(f"{url}/v1/completions", json=body)

    async with running_clients(CLIENTS, client):
        yield


async def take(running: Browser, url: str, folder: Path, pictures: Sequence[Picture]) -> None:
    """Take every picture. Raise an error if a page logs one."""
    for name, viewport, scheme, path in pictures:
        page = await running.new_page(viewport=viewport, color_scheme=scheme)
        errors = listen_for_errors(page)
        await page.goto(f"{url}/{path}")
        await page.wait_for_timeout(SETTLED_MS)
        taken = await page.screenshot(full_page=viewport is not LAPTOP)
        await page.close()
        if errors:
            raise RuntimeError(f"{name}: {errors[0]}")
        keep(taken, folder / f"{name}.png")


def keep(taken: bytes, file: Path) -> None:
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLORS).save(file, optimize=True)
    print(f"{file} {file.stat().st_size / 1024:.0f} kB")


async def take_top(running: Browser, url: str, file: Path) -> None:
    """Take a picture of `fulcrum top` as a terminal shows it."""
    app = Top(Feed(url))
    async with app.run_test(size=TERMINAL) as pilot:
        await pilot.pause(SETTLED_MS / 1e3)
        drawn = re.sub(r"@font-face {.*?}", "", app.export_screenshot(title="fulcrum top"), flags=re.DOTALL)
    page = await running.new_page(viewport=LAPTOP)
    await page.set_content(f"<body style='margin: 0'>{drawn.replace('Fira Code', 'DejaVu Sans Mono')}")
    keep(await page.locator("svg").first.screenshot(), file)
    await page.close()


async def run(suite: RunningSuite, folder: Path) -> None:
    async with waves(suite.gateway), browser() as running:
        await asyncio.sleep(LOADED_S / 2)
        await asyncio.to_thread(suite.fulcrum, "role", "decode-2", "prefill", "--reason", "prompts wait")
        await asyncio.sleep(LOADED_S / 2)
        await take(running, suite.ready["metrics"], folder, PICTURES)
        await take_top(running, suite.ready["metrics"], folder / "top.png")


def made_history() -> dict[str, Any]:
    """Return six days that end now, with a peak in the afternoon, and prompts twice as long in the last two days."""
    bins = round(HISTORY_DAYS * 86_400 / BIN_S)
    start_s = time.time() // BIN_S * BIN_S - bins * BIN_S
    chance, requests, prompts = Random(1), [], []
    for at in range(bins):
        hour = (start_s + at * BIN_S) / 3600 % 24
        rate = (4 + 12 * math.exp(-(((hour - 14) / 3.5) ** 2))) * math.exp(chance.gauss(0, 0.12))
        requests.append(rate)
        prompts.append(rate * (800 if at < bins - 192 else 1_600))
    outputs = [200 * each for each in requests]
    rates = {"requests_per_s": requests, "prefill_tokens_per_s": prompts, "decode_tokens_per_s": outputs}
    return {"model": MODELS[0], "start_unix_s": start_s, "step_s": BIN_S, **rates}


async def run_views(suite: RunningSuite, folder: Path) -> None:
    token = {"authorization": f"Bearer {suite.ready['token']}"}
    async with httpx.AsyncClient(timeout=60) as http, browser() as running:
        brought = await http.post(f"{suite.ready['metrics']}/v1/demand", json=made_history(), headers=token)
        brought.raise_for_status()
        until_s = time.monotonic() + LOADED_S
        while time.monotonic() < until_s:
            body = {"prompt": "word " * 50, "max_tokens": 40, "ignore_eos": True}
            each = [http.post(f"{suite.gateway}/v1/completions", json=body | {"model": name}) for name in MODELS[:2]]
            await asyncio.gather(*each)
        await http.post(f"{suite.gateway}/v1/completions", json=body | {"model": MODELS[2]})
        await take(running, suite.ready["metrics"], folder, VIEWS)


async def run_fleet(folder: Path) -> None:
    async with service(FLEET_GPUS, []) as url, browser() as running:
        await asyncio.sleep(LOADED_S)
        await take(running, url, folder, FLEET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    parser.add_argument("--fleet", action="store_true", help="only those of 1,000 GPUs; needs a machine to itself")
    parser.add_argument("--views", action="store_true", help="only those of forecast and models")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.fleet:
        asyncio.run(run_fleet(folder))
        return
    if options.views:
        views(folder)
        return
    with bench_suite(*WORKERS) as suite:
        httpx.get(suite.ready["metrics"]).raise_for_status()
        asyncio.run(run(suite, folder))
    views(folder)


def views(folder: Path) -> None:
    """Take pictures of the views other than the live one."""
    with (
        held_port() as port,  # the page needs a planner with a known port
        bench_suite(*POOL, "--gateway-port", str(port), env={"FULCRUM_PLANNER_MODE": "auto"}) as suite,
    ):
        asyncio.run(run_views(suite, folder))


if __name__ == "__main__":
    main()
