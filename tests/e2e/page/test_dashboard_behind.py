"""The page while telemetry comes late: it says how late, and calls nothing live that is not."""

import re

import pytest
from playwright.async_api import expect

from tests.e2e.page.page_rig import WAIT_MS, figures, half_busy, looking, serving

BEHIND = re.compile(r"^[0-9]+ s behind$")
pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_the_page_says_how_far_it_is_behind_until_it_is_live_again() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        await expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)
        service.held = []
        await expect(page.locator("#status")).to_have_text(BEHIND, timeout=WAIT_MS)
        await expect(page.locator("#status")).to_have_class("poor", timeout=WAIT_MS)
        await expect(page.locator("#status")).to_have_text("4 s behind", timeout=WAIT_MS)
        service.catch_up()
        await expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)


async def test_a_worker_that_is_silent_makes_the_page_no_less_live() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        next(iter(service.workers.values())).silent = True
        await figures(page, lambda shown: shown["coverage"] < 0.9)
        await expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)
