"""Pictures of each planted situation on a live suite: the page light, dark and on a phone, and `fulcrum top` in 80
columns and 24 lines.

`python -m load.verdict.pictures --folder FOLDER` writes FOLDER/NUMBER-light.png and so on, by numbers that do not say
what is planted, and FOLDER/key.json, which does. FOLDER/situations-light.png and -top.png are sheets of all six, in the
order of `NAMES`, and situation-dark.png and -phone.png one of them, as docs/images has them.
"""

import argparse
import asyncio
import io
import json
import random
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from playwright.async_api import Browser, ViewportSize

from libs.cli.top.feed import Feed
from libs.cli.top.screen import Top
from libs.testing.suites.browser import PHONE, browser
from libs.testing.suites.suite import RunningSuite
from load.verdict.bench_verdict import live_suite
from load.verdict.clients import Clients
from load.verdict.drawn import DrawnSuite
from load.verdict.situations import Planted, Situations, arrivals
from load.verdict.trial import BEFORE_S, Bench

NAMES: Final = ("prefill_bound", "decode_bound_tpot", "slow_link", "slow_worker", "too_small", "busy")
LAPTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
TERMINAL: Final = (80, 24)
SETTLED_S: Final = 2.0
MOST_S: Final = 20.0
QUIET_S: Final = 90.0
"""How long alerts of one situation may take to be over before the next is planted."""
COLORS: Final = 128
SHEET_WIDTHS: Final = {"light": 640, "top": 520}
"""Of one picture on a sheet of six."""
SHOWN: Final = {"light": (78, 798), "top": (0, 10_000)}
"""What of a picture is on a sheet, from and to, in pixels: of a page verdict, alerts and pressure, not its toolbar."""
GAP: Final = 8
ONE: Final = {"dark": "slow_worker", "phone": "too_small"}
"""Situations that are shown alone."""


class Photographer(Bench):
    """Takes pictures once the verdict names what is planted, and while requests still come."""

    async def pictures(self, planted: Planted, seed: int, running: Browser, to: Path) -> dict[str, Any]:
        """Files beginning with `to`; what the verdict said."""
        await self._calm()
        await self._quiet()
        workers = await self._split(planted.prefill)
        clients = Clients(self._suite.gateway, "sim")
        try:
            if planted.before is not None:
                clients.play(arrivals(planted.before, seed, 120), seed)
                await asyncio.sleep(BEFORE_S)
            if planted.faults:
                self._faults.write_text(json.dumps(self._planted_faults(planted, workers)))
            if planted.before is None:
                clients.play(arrivals(planted.load, seed, 120), seed)
            verdict = await self._named(planted)
            await asyncio.sleep(SETTLED_S)
            await self._take(running, to)
            return verdict
        finally:
            self._faults.write_text("{}")
            await clients.stop()

    async def _quiet(self) -> None:
        """Until no alert fires."""
        end_s = time.monotonic() + QUIET_S
        while time.monotonic() < end_s:
            found = (await self._http.get(f"{self._suite.ready['metrics']}/v1/alerts?limit=0")).json()
            if not found["firing"]:
                return
            await asyncio.sleep(0.5)

    async def _named(self, planted: Planted) -> dict[str, Any]:
        end_s = time.monotonic() + MOST_S
        verdict: dict[str, Any] = {}
        while time.monotonic() < end_s:
            verdict = (await self._http.get(f"{self._suite.ready['metrics']}/v1/status")).json()["verdict"]
            if verdict["code"] in planted.wanted:
                break
            await asyncio.sleep(0.1)
        return verdict

    async def _take(self, running: Browser, to: Path) -> None:
        url = self._suite.ready["metrics"]
        page = await running.new_page(viewport=LAPTOP)
        await page.goto(url)
        await page.wait_for_timeout(SETTLED_S * 1e3)
        for name, scheme, size in (("light", "light", LAPTOP), ("dark", "dark", LAPTOP), ("phone", "light", PHONE)):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            await page.set_viewport_size(size)
            await page.wait_for_timeout(300)
            keep(await page.screenshot(), to.with_name(f"{to.name}-{name}.png"))
        await page.close()
        app = Top(Feed(url))
        async with app.run_test(size=TERMINAL) as pilot:
            await pilot.pause(SETTLED_S)
            drawn = re.sub(r"@font-face {.*?}", "", app.export_screenshot(title="fulcrum top"), flags=re.DOTALL)
        page = await running.new_page(viewport=LAPTOP)
        await page.set_content(f"<body style='margin: 0'>{drawn.replace('Fira Code', 'DejaVu Sans Mono')}")
        keep(await page.locator("svg").first.screenshot(), to.with_name(f"{to.name}-top.png"))
        await page.close()


def keep(taken: bytes, file: Path) -> None:
    """Write it with few colours."""
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)


def sheets(folder: Path, places: Mapping[str, int]) -> None:
    """Six pictures on one, two a row, from where each situation's pictures are; and those that are shown alone."""
    for name, width in SHEET_WIDTHS.items():
        taken = [Image.open(folder / f"{places[each]}-{name}.png").convert("RGB") for each in NAMES]
        above, below = SHOWN[name]
        folded = [each.crop((0, above, each.width, min(each.height, below))) for each in taken]
        sizes = [(width, round(each.height * width / each.width)) for each in folded]
        small = [each.resize(size, Image.Resampling.LANCZOS) for each, size in zip(folded, sizes, strict=True)]
        height = max(each.height for each in small)
        sheet = Image.new("RGB", (2 * width + GAP, 3 * height + 2 * GAP), "white")
        for place, each in enumerate(small):
            sheet.paste(each, (place % 2 * (width + GAP), place // 2 * (height + GAP)))
        sheet.quantize(COLORS, dither=Image.Dither.NONE).save(folder / f"situations-{name}.png", optimize=True)
    for name, situation in ONE.items():
        shutil.copy(folder / f"{places[situation]}-{name}.png", folder / f"situation-{name}.png")


async def photograph(suite: RunningSuite, drawn: DrawnSuite, faults: Path, folder: Path, seed: int) -> None:
    """All situations, in an order drawn by seed."""
    names, key = list(NAMES), {}
    random.Random(seed).shuffle(names)
    async with httpx.AsyncClient(timeout=10) as http, browser() as running:
        bench = Photographer(suite, drawn, faults, http)
        for number, name in enumerate(names, start=1):
            planted = Situations(drawn.device, seed * 1_000 + number).of(name)
            verdict = await bench.pictures(planted, seed * 1_000 + number, running, folder / str(number))
            key[number] = {"planted": planted.name, "verdict": verdict.get("code"), "said": verdict.get("sentence")}
            (folder / "key.json").write_text(json.dumps(key, indent=1))
            print(number, key[number], flush=True)
    sheets(folder, {name: number for number, name in enumerate(names, start=1)})


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=31)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with live_suite(seed=asked.seed, little_kv=False) as (suite, drawn, faults):
        asyncio.run(photograph(suite, drawn, faults, asked.folder, asked.seed))


if __name__ == "__main__":
    main()
