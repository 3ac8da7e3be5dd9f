"""Pictures of the page for the documentation: a simulated suite under load, light, dark, wide and on a phone.

`make screenshots` writes docs/images/*.png, with few colours so that they stay small.
"""

import argparse
import asyncio
import io
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import httpx
from PIL import Image
from playwright.async_api import Browser, ViewportSize

from libs.testing.browser import PHONE, WIDE, browser, listen_for_errors
from libs.testing.suite import Suite, running_suite

WORKERS: Final = ("--engine", "sim", "--prefill", "3", "--decode", "4", "--mixed", "1")
LAPTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
PICTURES: Final[tuple[tuple[str, ViewportSize, Literal["light", "dark"], str], ...]] = (
    ("page-light", WIDE, "light", ""),
    ("page-dark", WIDE, "dark", ""),
    ("page-phone", PHONE, "light", ""),
    ("page-readme", LAPTOP, "light", ""),
)
COLORS: Final = 128
CLIENTS: Final = 8
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


async def take(running: Browser, url: str, folder: Path) -> None:
    """Every picture; raises when a page complains of something."""
    for name, viewport, scheme, path in PICTURES:
        page = await running.new_page(viewport=viewport, color_scheme=scheme)
        errors = listen_for_errors(page)
        await page.goto(f"{url}/{path}")
        await page.wait_for_timeout(SETTLED_MS)
        taken = await page.screenshot(full_page=viewport is not LAPTOP)
        await page.close()
        if errors:
            raise RuntimeError(f"{name}: {errors[0]}")
        file = folder / f"{name}.png"
        Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLORS).save(file, optimize=True)
        print(f"{file} {file.stat().st_size / 1024:.0f} kB")


async def run(suite: Suite, folder: Path) -> None:
    """Load, a role move, pictures."""
    async with waves(suite.gateway), browser() as running:
        await asyncio.sleep(LOADED_S / 2)
        await asyncio.to_thread(suite.fulcrum, "role", "decode-2", "prefill", "--reason", "prompts wait")
        await asyncio.sleep(LOADED_S / 2)
        await take(running, suite.ready["metrics"], folder)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as place, running_suite(Path(place), *WORKERS, env={"FULCRUM_CACHE": place}) as suite:
        httpx.get(suite.ready["metrics"]).raise_for_status()
        asyncio.run(run(suite, folder))


if __name__ == "__main__":
    main()
