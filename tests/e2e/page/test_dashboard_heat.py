"""Tests in Chromium that the heat map's pixels show the latest state of each window."""

import asyncio
from typing import Any, Final

import pytest
from playwright.async_api import Page, expect

from tests.e2e.page.page_rig import MS, SECOND_NS, WAIT_MS, Service, Worker, figures, looking, serving

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.usefixtures("chromium")]
SHOWN_S: Final = 30
PIXELS: Final = """() => {
  const map = document.getElementById("heat"), scale = devicePixelRatio, gutter = 64;
  const width = map.clientWidth - gutter, row = map.getContext("2d").getImageData(0, 8 * scale, map.width, 1).data;
  const probe = document.getElementById("probe"), named = {};
  for (const name of ["prefill", "idle"]) {
    probe.style.color = `var(--${name})`;
    named[getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).join()] = name;
  }
  return Array.from({length: 300}, (_, window) => {
    const at = 4 * Math.floor(scale * (gutter + (window + 0.5) * width / 300));
    return named[row.slice(at, at + 3).join()] ?? "";
  });
}"""
"""Return the first row of the last 30 s by window: the name of a pure phase, or an empty string."""
HOLD_FRAMES: Final = """() => {
  const ask = requestAnimationFrame, asked = [];
  window.requestAnimationFrame = each => asked.push(each);
  window.showFrames = () => {
    window.requestAnimationFrame = ask;
    asked.forEach(each => ask(each));
  };
}"""
"""Stop drawing until `showFrames()`, as in a hidden tab."""


async def painted(page: Page, wanted: set[str], seconds: float) -> None:
    """Wait until the last `seconds`, except for windows still in transit, are painted in exactly these colours."""
    count, phases = int(10 * seconds), []
    try:
        async with asyncio.timeout(WAIT_MS / 1000):
            while not (phases := (await page.evaluate(PIXELS))[-count:-3]) or set(phases) != wanted:
                await asyncio.sleep(0.05)
    except TimeoutError:
        other = [(index, phase) for index, phase in enumerate(phases) if phase not in wanted]
        raise AssertionError(f"not {wanted} alone in {count} windows: {other or set(phases)}") from None


async def later(service: Service, seconds: float) -> None:
    """Wait until the service's windows have advanced by that time."""
    history = service.state.history
    end_ns = (history.written_to_ns or service.clock.now_ns()) + int(seconds * SECOND_NS)
    async with asyncio.timeout(seconds + WAIT_MS / 1000):
        while (history.written_to_ns or 0) < end_ns:
            await asyncio.sleep(0.02)


async def test_telemetry_that_comes_seconds_late_replaces_the_hatching() -> None:
    worker = Worker("prefill-0", "prefill", 1.0)
    async with serving(worker, lived_s=SHOWN_S) as service, looking(service, "/#range=30s") as page:
        await painted(page, {"prefill"}, SHOWN_S - 5)
        service.held = []
        await later(service, 5)
        await figures(page, lambda shown: shown["coverage"] == 0)
        assert "" in (await page.evaluate(PIXELS))[-30:]
        service.catch_up()
        await painted(page, {"prefill"}, SHOWN_S - 5)


async def test_a_hidden_tab_shows_current_data_once_it_is_visible_again() -> None:
    worker = Worker("prefill-0", "prefill", 1.0)
    async with serving(worker, lived_s=120) as service, looking(service, "/#range=30s") as page:
        await painted(page, {"prefill"}, SHOWN_S - 2)
        await expect(page.locator("#status")).to_have_text("live")
        await page.evaluate(HOLD_FRAMES)
        hidden_ns = service.clock.now_ns()
        worker.busy = 0
        await later(service, 3)
        service.held = []  # something is revised meanwhile
        await later(service, 0.5)
        service.catch_up()
        await later(service, 4)
        await page.evaluate("showFrames()")

        def seen(shown: dict[str, Any]) -> bool:
            return int(shown["asOfUnixMs"]) > hidden_ns // MS + 7_000

        await figures(page, seen)
        phases = (await page.evaluate(PIXELS))[-60:]  # at once: wrong pixels would also scroll away by themselves
        assert "idle" in phases
        assert "prefill" not in phases
