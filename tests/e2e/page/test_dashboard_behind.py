"""Tests of the page while telemetry comes late: it shows the delay and is not labelled live."""

import re

import pytest
from playwright.async_api import expect

from tests.e2e.page.page_rig import WAIT_MS, figures, half_busy, looking, serving

BEHIND = re.compile(r"^[0-9]+ s behind$")
pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_the_page_shows_how_far_it_is_behind_until_it_is_live_again() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        await expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)
        service.held = []
        await expect(page.locator("#status")).to_have_text(BEHIND, timeout=WAIT_MS)
        await expect(page.locator("#status")).to_have_class("poor", timeout=WAIT_MS)
        await expect(page.locator("#status")).to_have_text("4 s behind", timeout=WAIT_MS)
        service.catch_up()
        await expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)


async def test_a_silent_worker_does_not_end_the_live_state_of_the_page() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        next(iter(service.workers.values())).silent = True
        await figures(page, lambda shown: shown["coverage"] < 0.9)
        await expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)
