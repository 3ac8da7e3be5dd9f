"""Tests in Chromium of the page's views of forecast demand and of the models of a pool."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from libs.testing.suites.browser import PHONE
from tests.e2e.page.page_rig import WAIT_MS, half_busy, looking, serving
from tests.e2e.page.tabs_rig import answers, catalogue, forecast, plan

pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_the_forecast_shows_fans_the_trend_and_needed_against_present_gpus(tmp_path: Path) -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        calls = await answers(page, forecast=forecast(), plans=[plan(tmp_path)])
        await page.get_by_role("button", name="Forecast").click()
        await expect(page.locator("#live")).to_be_hidden()
        await expect(page.locator("#forecast-said")).to_contain_text("llama-70b", timeout=WAIT_MS)
        await expect(page.locator("#fans canvas")).to_have_count(3)
        await expect(page.locator("#forecast-trends li").first).to_contain_text("prompts of all tenants grew")
        await expect(page.locator("#capacity-note")).to_contain_text("prefill is short by")
        rows = page.locator("#capacity-table tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first.locator("td").nth(1)).to_have_text("4")
        await expect(page.locator("#needs canvas")).to_have_count(2)
        plot = page.locator("#fans .u-over").first
        await plot.hover(position={"x": 250, "y": 40})
        await expect(page.locator("#fans h3 small").first).to_contain_text("90 %:")
        assert any("horizon=24h" in url for url in calls)
        async with page.expect_request("**/v1/forecast?**horizon=7d**"):
            await page.locator("#forecast-horizon").select_option("7d")
        await page.reload()  # the URL names the view
        await expect(page.locator("#forecast")).to_be_visible(timeout=WAIT_MS)
        await page.get_by_role("button", name="Live").click()
        await expect(page.locator("#verdict")).to_be_visible()


async def test_the_view_without_demand_or_a_plan_gives_advice_and_makes_a_plan_on_request(tmp_path: Path) -> None:
    async with serving(*half_busy()) as service, looking(service, "/#tab=forecast", refused=True) as page:
        await answers(page, forecast="no demand is known yet: ask again after some requests", plans=[])
        await page.locator("#forecast-horizon").select_option("6h")
        await expect(page.locator("#forecast-said")).to_contain_text("no demand is known yet", timeout=WAIT_MS)
        await expect(page.locator("#forecast-charts")).to_be_hidden()
        await expect(page.locator("#capacity-note")).to_contain_text("FULCRUM_METRICS_CAPACITY_SLO")
        await expect(page.locator("#capacity-table")).to_be_hidden()
        calls = await answers(page, capacity=plan(tmp_path))
        await page.locator("#capacity-slo").fill("ttft=1s,tpot=40ms")
        await page.get_by_role("button", name="plan", exact=True).click()
        await expect(page.locator("#capacity-table")).to_be_visible(timeout=WAIT_MS)
        assert "ttft%3D1s%2Ctpot%3D40ms" in calls[-1]


async def test_models_show_state_load_next_use_and_the_next_eviction() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await answers(page, models=catalogue())
        await page.get_by_role("button", name="Models").click()
        rows = page.locator("#models-table tbody tr")
        await expect(rows).to_have_count(5, timeout=WAIT_MS)
        await expect(rows.first).to_contain_text("coder-34b")
        await expect(page.locator("#models-table")).to_contain_text("rare <b>70b</b>")
        await expect(rows.filter(has_text="rare")).to_contain_text("12 s reckoned")
        await expect(rows.filter(has_text="chat-8b")).to_contain_text("in 42 s")
        await expect(rows.filter(has_text="night")).to_contain_text("floor 1, 1 GPU 22:00 to 06:00 UTC")
        broken = rows.filter(has_text="broken").locator(".state")
        await expect(broken).to_have_attribute("title", "its weights are not a safetensors file")
        await expect(page.locator("#models-figures")).to_contain_text("p50 1 · p90 2 · p99 2")
        await expect(page.locator("#evictions li")).to_contain_text("chat-8b on pool-2: nobody uses it")


async def test_a_suite_without_a_pool_or_a_planner_is_explained() -> None:
    async with serving(*half_busy()) as service, looking(service, refused=True) as page:
        await answers(page, models="this metrics service knows no planner: set FULCRUM_METRICS_PLANNER_URL")
        await page.get_by_role("button", name="Models").click()
        await expect(page.locator("#models-note")).to_contain_text("FULCRUM_METRICS_PLANNER_URL", timeout=WAIT_MS)
        await expect(page.locator("#models-panel")).to_be_hidden()


@pytest.mark.parametrize("tab", ["forecast", "models"])
async def test_nothing_overflows_on_a_phone(tab: str, tmp_path: Path) -> None:
    async with serving(*half_busy()) as service, looking(service, viewport=PHONE) as page:
        await answers(page, forecast=forecast(), plans=[plan(tmp_path)], models=catalogue())
        await page.goto(f"{service.url}/#tab={tab}")
        await page.reload()
        await expect(page.locator(f"#{tab} :is(canvas, tbody tr)").first).to_be_visible(timeout=WAIT_MS)
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
