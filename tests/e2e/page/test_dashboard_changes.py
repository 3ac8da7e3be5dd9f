"""Tests of what an operator changes on the page: roles of workers and silences of alerts."""

import json
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from services.metrics.settings import MetricsSettings
from tests.e2e.page.page_rig import WAIT_MS, Worker, half_busy, looking, serving

pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]
TOKEN = "the-suites-token"
WORKER = "/#scope=worker%3Adecode-0"


async def the_planner(page: Page, requested: list[dict[str, Any]]) -> None:
    """Accept role changes from callers with the token."""

    async def answer(route: Route) -> None:
        request = route.request
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            await route.fulfill(status=401, json={"error": {"message": "changing a role needs the token"}})
            return
        requested.append(json.loads(request.post_data or ""))
        moved = {"worker": "decode-0", "role": "prefill", "budget_tokens": 0, "epoch": 5, "changed": True}
        await route.fulfill(json=moved | {"effect_ms": 12.5, "gateways_behind": 0})

    await page.route("**/v1/workers/decode-0/role", answer)


async def test_a_role_change_needs_a_confirmation_and_the_token() -> None:
    calls: list[dict[str, Any]] = []
    async with serving(*half_busy()) as service, looking(service, WORKER, refused=True) as page:
        await the_planner(page, calls)
        await expect(page.locator("#role-now")).to_contain_text("decode-0 is decode", timeout=WAIT_MS)
        buttons = page.locator("#role-buttons")
        await expect(buttons.get_by_role("button", name="decode")).to_have_attribute("aria-pressed", "true")
        await buttons.get_by_role("button", name="prefill").click()
        await expect(page.locator("#ask-role h2")).to_have_text("decode-0 → prefill?")
        await page.get_by_role("button", name="cancel").click()
        await expect(page.locator("#ask-role")).to_be_hidden()
        await buttons.get_by_role("button", name="prefill").click()
        await page.locator("#ask-role-token").fill("wrong")
        await page.locator("#ask-role-yes").click()
        await expect(page.locator("#ask-role-refused")).to_contain_text("Not done: changing a role needs the token")
        assert calls == []
        await page.locator("#ask-role-reason").fill("prompts wait")
        await page.locator("#ask-role-token").fill(TOKEN)
        await page.locator("#ask-role-yes").click()
        said = "decode-0 is prefill since epoch 5, in effect after 12.5 ms"
        await expect(page.locator("#role-now")).to_contain_text(said)
        assert calls == [{"role": "prefill", "actor": "the page", "reason": "prompts wait"}]
        await buttons.get_by_role("button", name="standby").click()  # the token was right, so the page stores it
        await expect(page.locator("#ask-role-token")).to_have_value(TOKEN)


async def test_only_a_worker_that_still_runs_has_role_buttons() -> None:
    async with serving(*half_busy(), lived_s=30) as service, looking(service) as page:
        await expect(page.locator(".of-worker tbody tr").first).to_be_visible(timeout=WAIT_MS)
        await expect(page.locator("#role")).to_be_hidden()
        await page.locator(".of-worker tbody button").first.click()
        await expect(page.locator("#role")).to_be_visible()
        await page.locator("#pause").click()
        await expect(page.locator("#role")).to_be_hidden()


async def test_an_alert_can_be_opened_silenced_and_unsilenced() -> None:
    workers = Worker("prefill-0", "prefill", 1.0), Worker("decode-0", "decode", 0.05)
    settings = MetricsSettings(alert_for_ms=0, alert_clear_ms=500, alert_window_ms=500, token=TOKEN)
    async with serving(*workers, settings=settings) as service, looking(service, refused=True) as page:
        badge, entry = page.locator("#badge"), page.locator("#alerts li")
        await expect(badge).to_have_text("1 alert", timeout=WAIT_MS)
        await entry.get_by_role("button").click()
        await page.locator("#quiet-token").fill("wrong")
        await page.locator("#quiet-silence").click()
        await expect(page.locator("#quiet-refused")).to_contain_text("needs the suite's token")
        await page.locator("#quiet-reason").fill("I <b>look</b>")
        await page.locator("#quiet-token").fill(TOKEN)
        await page.locator("#quiet-ack").click()
        await expect(entry.locator(".quiet")).to_contain_text("acknowledged by token (the page)")
        await expect(entry.locator(".quiet")).to_contain_text("I <b>look</b>")
        await expect(badge).to_be_hidden()
        await entry.get_by_role("button").click()
        await page.locator("#quiet-end").click()
        await expect(badge).to_have_text("1 alert")
        await entry.get_by_role("button").click()
        await page.locator("#quiet-for").select_option("14400")
        await page.locator("#quiet-silence").click()
        await expect(entry).to_have_class("warning silent")
        await expect(entry.locator(".quiet")).to_contain_text("silent for 3 h more, by token (the page)")
        await page.reload()
        await expect(entry).to_have_class("warning silent", timeout=WAIT_MS)
        await expect(badge).to_be_hidden()
