"""Tests in Chromium of the path from the cluster down to the engine steps behind a worker's figures."""

import asyncio
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, Route, expect

from libs.testing.suites.browser import browser
from tests.e2e.page.page_rig import MS, WAIT_MS, figures, half_busy, looking, serving

pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def steps_shown(page: Page, as_of_unix_ms: str) -> dict[str, Any]:
    """Return the page's table of the steps up to a time, once it is there."""
    await expect(page.locator("#steps")).to_have_attribute("data-as-of-unix-ms", as_of_unix_ms, timeout=WAIT_MS)
    found: dict[str, Any] = await page.evaluate("({...document.getElementById('steps').dataset})")
    return found


async def figures_and_steps_agree(page: Page) -> bool:
    """Return whether page and API now show the same time and the same steps."""
    shown = await figures(page, bool)
    steps: dict[str, Any] = await page.evaluate("({...document.getElementById('steps').dataset})")
    ours = steps.get("asOfUnixMs") == shown["asOfUnixMs"]
    return ours and int(steps["gpuNs"].split(",")[2]) == shown["gpu_ns"]["decode"] > 0


async def test_a_click_leads_from_a_gpu_to_the_steps_behind_its_figures() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 9 * 2_000 * MS)
        await expect(page.locator("#steps")).to_be_hidden()
        await page.locator("#heat").click(position={"x": 300, "y": 60})  # one of the eight rows of a worker
        await expect(page.locator("#trail")).to_have_text("clusternode node-aworker prefill-0")
        await expect(page.locator("#steps .sums")).to_contain_text("steps in 2 s to", timeout=WAIT_MS)
        live = await page.locator("#steps").get_attribute("data-as-of-unix-ms")
        await expect(page.locator("#steps")).not_to_have_attribute("data-as-of-unix-ms", str(live), timeout=WAIT_MS)

        await page.locator("#pause").click()
        await expect(page.locator("#pause")).to_have_text("go on")
        shown = await figures(page, bool)
        steps = await steps_shown(page, shown["asOfUnixMs"])
        parts = shown["gpu_ns"]
        assert steps["gpuNs"] == ",".join(str(parts[name]) for name in parts)
        assert steps["stepNs"] == f"{parts['prefill']},{parts['decode']}"
        assert steps["steps"] == "20"
        rows = page.locator("#steps tbody tr")
        await expect(rows).to_have_count(20)
        assert (await rows.first.locator("td").all_inner_texts())[1:5] == ["60.00 ms", "prefill", "64", "1"]
        async with httpx.AsyncClient(base_url=service.url) as http:
            answer = (await http.get(str(await page.locator("#steps a").get_attribute("href")))).json()
        assert sum(step["prefill_ns"] for step in answer["steps"]) * 8 == parts["prefill"]

        await page.locator("#steps canvas").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#steps .readout")).to_contain_text("60.00 ms: 64 prompt tokens of 1 prompt")
        await expect(rows.first).to_have_class("pointed")


async def test_a_window_of_an_open_worker_leads_to_the_steps_up_to_it() -> None:
    async with (
        serving(*half_busy(), lived_s=5) as service,
        looking(service, "/#scope=worker%3Adecode-0") as page,
    ):
        await figures(page, lambda shown: shown["coverage"] == 1)
        await page.locator("#heat").focus()
        for _ in range(8):
            await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("Enter")
        await expect(page.locator("#pause")).to_have_text("go on")
        async with asyncio.timeout(WAIT_MS / 1000):
            while not await figures_and_steps_agree(page):
                await asyncio.sleep(0.02)
        await page.keyboard.press("u")
        await expect(page.locator("#steps")).to_be_hidden()


async def test_steps_that_have_been_dropped_are_reported_as_gone() -> None:
    async with serving(*half_busy(), lived_s=400) as service:
        then_ms = service.clock.now_ns() // MS - 3_600_000
        async with browser() as running:
            page = await running.new_page()
            await page.goto(f"{service.url}/#scope=worker%3Adecode-0&range=15m&end={then_ms}")
            await expect(page.locator("#steps .note")).to_contain_text("are no longer stored", timeout=WAIT_MS)
            await expect(page.locator("#steps a")).to_be_hidden()


async def test_steps_that_are_never_answered_are_requested_again() -> None:
    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        hangs = iter([True])

        async def hang_once(route: Route) -> None:
            if not next(hangs, False):
                await route.continue_()

        await page.route("**/v1/steps?**", hang_once)
        await page.goto(f"{service.url}/#scope=worker%3Adecode-0")
        await expect(page.locator("#steps .note")).to_have_text("the metrics service does not answer", timeout=WAIT_MS)
        await expect(page.locator("#steps .sums")).to_contain_text("steps in 2 s to", timeout=WAIT_MS)
