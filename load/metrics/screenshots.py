"""Pictures for the documentation: the page over a simulated suite under load, light, dark, wide and on a phone, a
worker's steps, 1,000 GPUs that do not exist, and `fulcrum top`.

`make screenshots` writes docs/images/*.png, with few colours so that they stay small.
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
from tempfile import TemporaryDirectory
from typing import Final, Literal

import httpx
from PIL import Image
from playwright.async_api import Browser, ViewportSize

from libs.cli.top.feed import Feed
from libs.cli.top.screen import Top
from libs.testing.suites.browser import PHONE, WIDE, browser, listen_for_errors
from libs.testing.suites.suite import Suite, running_suite
from load.metrics.bench_occupancy import service

WORKERS: Final = ("--engine", "sim", "--prefill", "3", "--decode", "4", "--mixed", "1")
LAPTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
Picture = tuple[str, ViewportSize, Literal["light", "dark"], str]
"""Name, size, colours, and what follows the address."""
PICTURES: Final[tuple[Picture, ...]] = (
    ("page-light", WIDE, "light", ""),
    ("page-dark", WIDE, "dark", ""),
    ("page-phone", PHONE, "light", ""),
    ("page-readme", LAPTOP, "light", ""),
    ("page-worker", LAPTOP, "light", "#scope=worker%3Adecode-1"),
)
FLEET: Final[tuple[Picture, ...]] = (("page-1000-gpus", WIDE, "dark", "#sort=pool"),)
FLEET_GPUS: Final = 1_000
TERMINAL: Final = (120, 30)
"""Cells and lines."""
COLORS: Final = 128
CLIENTS: Final = 4
LOADED_S: Final = 25.0
"""Nearly a whole range of 30 s."""
SETTLED_MS: Final = 3_000.0


@asynccontextmanager
async def waves(url: str) -> AsyncIterator[None]:
    """Clients whose prompts grow and shrink by the seconds, while the context is open."""

    async def client(http: httpx.AsyncClient) -> None:
        while True:
            words = 100 + int(900 * abs(math.sin(time.monotonic() / 7)))
            body = {"model": "sim", "prompt": "word " * words, "max_tokens": 60, "ignore_eos": True}
            body["prompt"] = f"{time.monotonic_ns()} {body['prompt']}"  # nothing is found cached
            await http.post(f"{url}/v1/completions", json=body)

    async with httpx.AsyncClient(timeout=60) as http:
        clients = [asyncio.create_task(client(http)) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def take(running: Browser, url: str, folder: Path, pictures: Sequence[Picture]) -> None:
    """Every picture; raises when a page complains of something."""
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
    """Write it with few colours."""
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLORS).save(file, optimize=True)
    print(f"{file} {file.stat().st_size / 1024:.0f} kB")


async def take_top(running: Browser, url: str, file: Path) -> None:
    """`fulcrum top`, as a terminal shows it."""
    app = Top(Feed(url))
    async with app.run_test(size=TERMINAL) as pilot:
        await pilot.pause(SETTLED_MS / 1e3)
        drawn = re.sub(r"@font-face {.*?}", "", app.export_screenshot(title="fulcrum top"), flags=re.DOTALL)
    page = await running.new_page(viewport=LAPTOP)
    await page.set_content(f"<body style='margin: 0'>{drawn.replace('Fira Code', 'DejaVu Sans Mono')}")
    keep(await page.locator("svg").first.screenshot(), file)
    await page.close()


async def run(suite: Suite, folder: Path) -> None:
    """Load, a role move, pictures."""
    async with waves(suite.gateway), browser() as running:
        await asyncio.sleep(LOADED_S / 2)
        await asyncio.to_thread(suite.fulcrum, "role", "decode-2", "prefill", "--reason", "prompts wait")
        await asyncio.sleep(LOADED_S / 2)
        await take(running, suite.ready["metrics"], folder, PICTURES)
        await take_top(running, suite.ready["metrics"], folder / "top.png")


async def run_fleet(folder: Path) -> None:
    """Pictures of many GPUs."""
    async with service(FLEET_GPUS, []) as url, browser() as running:
        await asyncio.sleep(LOADED_S)
        await take(running, url, folder, FLEET)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    parser.add_argument("--fleet", action="store_true", help="only those of 1,000 GPUs; needs a machine to itself")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.fleet:
        asyncio.run(run_fleet(folder))
        return
    with TemporaryDirectory() as place, running_suite(Path(place), *WORKERS, env={"FULCRUM_CACHE": place}) as suite:
        httpx.get(suite.ready["metrics"]).raise_for_status()
        asyncio.run(run(suite, folder))


if __name__ == "__main__":
    main()
