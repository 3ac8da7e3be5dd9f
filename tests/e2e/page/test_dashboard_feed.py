"""Tests in Chromium of the page beside a service that fails, restarts or loses messages."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from playwright.async_api import Route, expect

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute
from libs.runtime.net.ports import held_port
from libs.testing.suites.browser import browser
from libs.testing.wait import until
from services.metrics import stream as stream_module
from tests.e2e.page.page_rig import (
    MS,
    SECOND_NS,
    WAIT_MS,
    Service,
    figures,
    half_busy,
    looking,
    occupancy,
    role_moved,
    serving,
)

HOUR_NS = 3_600 * SECOND_NS

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_a_failed_first_load_is_retried_for_the_same_time() -> None:
    async with serving(*half_busy(), lived_s=400) as service:
        end_ms = service.clock.now_ns() // MS - 300_000
        async with browser() as running:
            page = await running.new_page()
            failures = iter([True])

            async def fail_once(route: Route) -> None:
                await (route.abort() if next(failures, False) else route.continue_())

            await page.route("**/v1/occupancy/windows?**", fail_once)
            await page.goto(f"{service.url}/#range=15m&end={end_ms}")
            shown = await figures(page, lambda shown: shown["coverage"] == 1)
            assert end_ms - 1000 < int(shown["asOfUnixMs"]) <= end_ms


async def test_a_reader_over_the_limit_sees_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_READERS", 0)
    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        await page.goto(service.url)
        await expect(page.locator("#status")).to_contain_text("readers hold the stream already", timeout=WAIT_MS)


async def lose_ticks(service: Service, seconds: float) -> None:
    """Make the stream skip the messages of that many seconds."""
    service.hub.loses = True
    until_ns = service.clock.now_ns() + int(seconds * SECOND_NS)
    await until(lambda: service.clock.now_ns() > until_ns)
    service.hub.loses = False


async def test_updates_missed_while_the_page_was_paused_are_loaded_when_it_resumes() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        await page.locator("#pause").click()
        await expect(page.locator("#pause")).to_have_text("go on")
        service.hub.loses = True
        number = service.state.events.count
        role_moved(service, "decode-0", "prefill")
        await until(lambda: service.state.events.count > number and not service.state.unsent_events())
        await lose_ticks(service, 0.3)
        await page.locator("#pause").click()
        await expect(page.locator("#moves button")).to_have_count(1, timeout=WAIT_MS)


async def test_ticks_skipped_while_windows_load_leave_no_gap() -> None:
    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        held, go_on = asyncio.Event(), asyncio.Event()

        async def answer_late(route: Route) -> None:
            answer = await route.fetch()
            held.set()
            await go_on.wait()
            await route.fulfill(response=answer)

        await page.route("**/v1/occupancy/windows?**", answer_late)
        await page.goto(service.url)
        await held.wait()
        await lose_ticks(service, 1.0)
        await lose_ticks(service, 0.2)
        go_on.set()
        shown = await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 9 * 2_000 * MS)
        assert shown["gpu_ns"] == (await occupancy(service, shown))["gpu_ns"]


async def test_the_page_follows_a_restarted_service_whose_clock_was_set_back() -> None:
    async with AsyncExitStack() as stack:
        port, running = stack.enter_context(held_port()), await stack.enter_async_context(browser())
        page = await running.new_page()
        async with serving(*half_busy(), port=port) as service:
            await page.goto(service.url)
            before = await figures(page, lambda shown: shown["coverage"] == 1)
        await expect(page.locator("#status")).to_contain_text("does not answer", timeout=WAIT_MS)
        await expect(page.locator("#stale")).to_contain_text("Not live")
        async with serving(*half_busy(), port=port, shift_ns=-HOUR_NS):
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) < int(before["asOfUnixMs"]) - 3_000_000)
            first = await figures(page, lambda shown: shown["coverage"] == 1)
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) > int(first["asOfUnixMs"]) + 1000)
            await expect(page.locator("#status")).to_have_text("live")
            await expect(page.locator("#stale")).to_be_hidden()


async def test_a_stream_that_falls_silent_is_reported_and_reopened() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        service.hub.loses = True
        await expect(page.locator("#stale")).to_contain_text(
            "Not live: the metrics service does not answer", timeout=WAIT_MS
        )
        before = await figures(page, bool)
        service.hub.loses = False
        await expect(page.locator("#stale")).to_be_hidden(timeout=WAIT_MS)
        await figures(page, lambda shown: int(shown["asOfUnixMs"]) > int(before["asOfUnixMs"]) + 1000)
        await figures(page, lambda shown: shown["coverage"] == 1)


async def test_a_refusal_without_a_body_does_not_stop_the_page_from_retrying() -> None:
    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        requested = 0

        async def refuse_then_hang(route: Route) -> None:
            nonlocal requested
            requested += 1
            if requested == 1:
                await route.fulfill(status=503, json={"error": {"message": "no room"}})
            elif requested > 2:  # the second request, which asks for the reason, is never answered
                await route.continue_()

        await page.route("**/v1/occupancy/stream", refuse_then_hang)
        await page.goto(service.url)
        await expect(page.locator("#status")).to_contain_text("does not answer", timeout=2 * WAIT_MS)
        await figures(page, lambda shown: shown["coverage"] == 1)


COUNT_STREAMS = """
window.openedMs = [];
window.EventSource = class extends EventSource {
  constructor(url) {
    super(url);
    openedMs.push(performance.now());
  }
};
"""


async def test_a_page_backs_off_while_its_stream_is_refused() -> None:
    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        await page.add_init_script(COUNT_STREAMS)
        await page.route("**/v1/occupancy/stream", lambda route: route.fulfill(status=204))
        await page.goto(service.url)
        await page.wait_for_function("() => openedMs.length >= 3", timeout=2 * WAIT_MS)
        await page.unroute("**/v1/occupancy/stream")
        await figures(page, lambda shown: shown["coverage"] == 1)
        first, second, third, *_ = await page.evaluate("openedMs")
        assert second - first >= 999 and third - second >= 1999


async def test_polled_figures_are_unknown_while_the_service_refuses_them() -> None:
    compute = Compute(layer_parameters=1_000_000, parameter_bytes=2, peak_flops_per_s=1e10, peak_bytes_per_s=1e9)
    async with serving(*half_busy()) as service, browser() as running:
        for worker in service.workers.values():
            worker.compute = compute
        page = await running.new_page()
        await page.goto(service.url)
        rows, tiles, note = page.locator("#latency tr"), page.locator("#efficiency"), page.locator("#latency-note")
        await expect(rows).to_have_count(3, timeout=WAIT_MS)
        await expect(tiles).to_contain_text("prefill MFU", timeout=WAIT_MS)
        polled = "**/v1/requests/summary?**", "**/v1/occupancy/efficiency?**"
        for path in polled:
            await page.route(path, lambda route: route.fulfill(status=503, json={"error": {"message": "not now"}}))
        await expect(note).to_have_text("not known now", timeout=WAIT_MS)
        await expect(rows).to_have_count(0)
        await expect(tiles).to_be_hidden(timeout=WAIT_MS)
        for path in polled:
            await page.unroute(path)
        await expect(rows).to_have_count(3, timeout=WAIT_MS)
        await expect(tiles).to_be_visible(timeout=WAIT_MS)
