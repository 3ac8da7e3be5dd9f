"""Tests of role moves and alerts on the page in Chromium."""

from itertools import pairwise
from typing import Any

import httpx
import pytest
from playwright.async_api import Route, expect

from libs.testing.suites.browser import browser
from services.metrics.settings import MetricsSettings
from tests.e2e.page.page_rig import WAIT_MS, Worker, figures, half_busy, looking, role_moved, serving

pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_a_role_move_is_marked_on_the_time_axis_with_its_reason() -> None:
    async with serving(Worker("decode-0", "decode", 0.5)) as service, looking(service) as page:
        await expect(page.locator("#tables .table").first).to_contain_text("decode", timeout=WAIT_MS)
        service.workers["decode-0"].role = "prefill"
        role_moved(service, "decode-0", "prefill", "prompts <b>wait</b>")
        await page.locator("#moves button").click(timeout=WAIT_MS)
        await expect(page.locator("#move")).to_contain_text("prompts <b>wait</b>")
        await expect(page.locator("#move h2")).to_have_text("decode-0 moved to prefill")
        await page.keyboard.press("Escape")
        await expect(page.locator("#tables .table").first).to_contain_text("prefill", timeout=WAIT_MS)


async def test_an_alert_shows_badge_mark_reason_and_runbook_and_disappears_once_it_is_over() -> None:
    workers = Worker("prefill-0", "prefill", 1.0), Worker("decode-0", "decode", 0.05)
    settings = MetricsSettings(alert_for_ms=0, alert_clear_ms=500, alert_window_ms=500)
    async with serving(*workers, settings=settings) as service, looking(service) as page:
        await expect(page.locator("#badge")).to_have_text("1 alert", timeout=WAIT_MS)
        entry = page.locator("#alerts li")
        await expect(entry).to_contain_text("imbalance · prefill of sim")
        await expect(entry).to_contain_text("prefill 100% busy with 32 prompt tokens queued, decode 5%")
        await page.locator("#moves .alert.warning").click()
        await expect(page.locator("#move h2")).to_have_text("imbalance · prefill of sim fires")
        await expect(page.locator("#move dl")).to_contain_text("32 prompt tokens queued")
        await page.keyboard.press("Escape")
        async with httpx.AsyncClient(base_url=service.url) as http:
            answer = (await http.get("/v1/alerts")).json()
        assert [alert["name"] for alert in answer["firing"]] == ["FulcrumImbalance"]
        service.workers["prefill-0"].busy = 0.2
        await expect(page.locator("#badge")).to_be_hidden(timeout=WAIT_MS)
        await expect(page.locator("#alerts")).to_be_hidden()
        await expect(page.locator("#moves .alert.over")).to_be_visible()
        await page.goto(f"{service.url}/")  # events from before the page was opened are shown too
        await page.locator("#moves .alert.over").click(timeout=WAIT_MS)
        await expect(page.locator("#move dl")).to_contain_text("prefill 20% busy")
        await page.locator("#move a").click()
        await expect(page.locator("article h1")).to_have_text("FulcrumImbalance")


async def test_changes_close_together_share_a_mark_that_lists_each() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        for number in range(60):
            role_moved(service, "decode-0", ("prefill", "decode")[number % 2], f"reason {number}")
        marks = page.locator("#moves button")
        await expect(marks.first).to_contain_text("▼", timeout=WAIT_MS)
        assert 1 <= await marks.count() <= 3
        await marks.first.click()
        await expect(page.locator("#move h2")).to_contain_text("changes: decode-0 moved to prefill")
        await expect(page.locator("#move dl")).to_contain_text("decode-0 moved to decode: reason 1")


async def test_marks_never_overlap() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        for number in range(80, 0, -1):
            role_moved(service, "decode-0", "prefill", f"reason {number}", ago_ms=101 * number)
        marks = page.locator("#moves button")
        await expect(marks.nth(3)).to_be_visible(timeout=WAIT_MS)
        boxes = await marks.evaluate_all("found => found.map(each => each.getBoundingClientRect().toJSON())")
        boxes.sort(key=lambda box: float(box["left"]))
        assert all(left["right"] <= right["left"] for left, right in pairwise(boxes)), boxes


async def test_the_worst_of_thousands_of_alerts_are_listed_and_the_rest_counted() -> None:
    def alert(number: int) -> dict[str, Any]:
        return {
            "number": number, "id": f"alert-{number}", "name": "FulcrumWorkerStuck", "state": "firing",
            "severity": "critical" if number == 7 else "warning", "labels": {"worker": f"worker-{number}"},
            "reason": "no step ends", "ended_because": "", "started_unix_ms": 1_700_000_000_000 + number,
            "ended_unix_ms": None, "runbook_url": "",
        }  # fmt: skip

    async def thousands(route: Route) -> None:
        await route.fulfill(json={"firing": [alert(number) for number in range(3_000)], "recent": []})

    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        await page.route("**/v1/alerts?**", thousands)
        await page.goto(service.url)
        await expect(page.locator("#badge")).to_have_text("3000 alerts", timeout=WAIT_MS)
        await expect(page.locator("#alerts li")).to_have_count(2)
        await expect(page.locator("#alerts li").first).to_contain_text("worker stuck · worker-7")
        await expect(page.locator("#alerts li").last).to_contain_text("worker stuck × 2999")
        await expect(page.locator("#alerts li").last).to_contain_text("worker-2999, worker-2998")
        await expect(page.locator("#alerts li").last).to_contain_text("and 2991 more")
