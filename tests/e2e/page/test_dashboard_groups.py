"""Tests in Chromium of data-parallel groups on the page: one row that opens on its ranks, and a scope of its own."""

import pytest
from playwright.async_api import expect

from tests.e2e.page.page_rig import WAIT_MS, Service, Worker, figures, looking, occupancy, serving

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.usefixtures("chromium")]
GROUP = "10.0.0.1:29550"


def ranks() -> list[Worker]:
    return [
        Worker(f"decode-dp{rank}", "decode", busy, gpus=2, node=f"node-{rank}", group=GROUP)
        for rank, busy in enumerate((0.5, 0.2, 0.0))
    ]


async def shown_group(service: Service, scope: str, shown: dict[str, object]) -> tuple[dict[str, int], float]:
    """Return GPU-nanoseconds and coverage of the group, or of a worker, from the API."""
    body = await occupancy(service, shown)
    found = next(each for each in (*body["groups"], *body["workers"]) if scope in {each.get("scope"), each.get("id")})
    return found["gpu_ns"], found["coverage"]


async def test_a_group_is_one_row_that_opens_on_its_ranks_and_closes() -> None:
    async with serving(*ranks(), Worker("prefill-0", "prefill", 0.6)) as service, looking(service) as page:
        rows = page.locator(".of-worker tbody tr")
        await expect(rows).to_have_count(2, timeout=WAIT_MS)
        await expect(rows.first).to_contain_text(GROUP)
        await expect(rows.first).to_contain_text("3 nodes")
        await expect(rows.first.locator(".c-gpus")).to_have_text("6", timeout=WAIT_MS)
        await expect(rows.first.locator(".c-running")).to_have_text("6")
        button = rows.first.locator(".ranks")
        await expect(button).to_have_text("▸ 3 ranks")
        await button.click()
        await expect(rows).to_have_count(5)
        await expect(page.locator(".of-worker tr.inside")).to_have_count(3)
        await expect(rows.nth(1)).to_contain_text("decode-dp0")
        await expect(button).to_have_attribute("aria-expanded", "true")
        await button.click()
        await expect(rows).to_have_count(2)


async def test_the_filter_finds_a_group_by_its_ranks() -> None:
    async with serving(*ranks(), Worker("prefill-0", "prefill", 0.6)) as service, looking(service) as page:
        rows = page.locator(".of-worker tbody tr")
        await expect(rows).to_have_count(2, timeout=WAIT_MS)
        await page.fill("#filter", "dp2")
        await expect(rows).to_have_count(1, timeout=WAIT_MS)
        await expect(rows.first).to_contain_text(GROUP)


async def test_a_groups_figures_equal_the_services_and_the_breadcrumb_leads_from_a_rank_to_its_group() -> None:
    async with serving(*ranks(), Worker("prefill-0", "prefill", 0.6)) as service, looking(service) as page:
        rows = page.locator(".of-worker tbody tr")
        await expect(rows).to_have_count(2, timeout=WAIT_MS)
        await rows.first.locator("th button").first.click()
        scope = f"group:sim/{GROUP}"
        shown = await figures(page, lambda found: found["scope"] == scope and found["coverage"] == 1)
        assert (shown["gpu_ns"], shown["coverage"]) == await shown_group(service, scope, shown)
        await expect(rows).to_have_count(3, timeout=WAIT_MS)
        await page.locator(".of-worker tbody th button", has_text="decode-dp1").click()
        shown = await figures(page, lambda found: found["scope"] == "worker:decode-dp1" and found["coverage"] == 1)
        assert (shown["gpu_ns"], shown["coverage"]) == await shown_group(service, "decode-dp1", shown)
        await expect(page.locator("#trail button")).to_have_text(["cluster", f"group sim/{GROUP}", "worker decode-dp1"])


async def test_the_page_of_a_node_lists_its_ranks_as_rows_with_their_own_gpus() -> None:
    async with serving(*ranks(), Worker("prefill-0", "prefill", 0.6)) as service, looking(service) as page:
        rows = page.locator(".of-worker tbody tr")
        await expect(rows).to_have_count(2, timeout=WAIT_MS)
        await page.locator(".of-node tbody th button", has_text="node-1").click()
        await expect(rows).to_have_count(1, timeout=WAIT_MS)
        await expect(rows.first).to_contain_text("decode-dp1")
        await expect(rows.first.locator(".c-gpus")).to_have_text("2", timeout=WAIT_MS)
