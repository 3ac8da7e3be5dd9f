"""Tests of the page in Chromium: live figures, links and keys."""

import asyncio
import re

import pytest
from playwright.async_api import expect

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_OK,
    GatewayQueues,
    ModelQueue,
    RequestEvent,
)
from libs.contracts.topics import QUEUES, REQUESTS
from libs.runtime.tasks import TaskOwner
from tests.e2e.page.page_rig import MS, WAIT_MS, Worker, figures, half_busy, looking, occupancy, serving

KEYS = ("space", "← →", "g", "p", "1–6", "t", "s", "/", "u", "?")
pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_figures_equal_the_api_and_stay_live() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service, looking(service) as page:
        first = await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 5 * 2_000 * MS)
        await figures(page, lambda shown: int(shown["asOfUnixMs"]) >= int(first["asOfUnixMs"]) + 1000)
        await page.keyboard.press(" ")
        await expect(page.locator("#pause")).to_have_text("go on")
        shown = await figures(page, bool)
        answer = await occupancy(service, shown)
        assert shown["gpu_ns"] == answer["gpu_ns"]
        assert shown["coverage"] == answer["coverage"] == 1.0
        ratio = float(await page.locator("#ratio").inner_text())
        assert ratio == pytest.approx(answer["ratio"], rel=0.01) == pytest.approx(8.0)
        assert await page.locator("#share-prefill").inner_text() == f"{100 * answer['prefill']:.1f} %"
        assert "3 requests · 40 tokens" in await page.locator("#queue-prefill").inner_text()
        await page.keyboard.press(" ")
        await figures(page, lambda later: int(later["asOfUnixMs"]) > int(shown["asOfUnixMs"]))


async def test_queues_show_waiting_requests_of_gateways_and_are_unknown_without_telemetry() -> None:
    async with serving(Worker("prefill-0", "prefill", 0.6), Worker("decode-0", "decode", 0.3)) as service:
        queue = ModelQueue(model="sim", prefill_requests=1_200, prefill_tokens=90_000, decode_requests=7)

        async def gateway() -> None:
            while True:
                reported_ns = service.clock.now_ns()
                service.take(QUEUES, GatewayQueues(gateway_id="g", told_unix_ns=reported_ns, queues=[queue]))
                await asyncio.sleep(0.1)

        async with looking(service) as page:
            tasks = TaskOwner()
            tasks.spawn("gateway", gateway())
            await expect(page.locator("#queue-prefill")).to_have_text("1,203 requests · 90,040 tokens", timeout=WAIT_MS)
            await tasks.close()
            await expect(page.locator("#queue-prefill")).to_have_text("unknown", timeout=WAIT_MS)


async def test_a_link_shows_the_same_time_and_scope_again() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service:
        async with looking(service, "/#range=30s") as page:
            await page.get_by_role("button", name="decode-0").click()
            await expect(page.locator("#trail")).to_have_text("clusternode node-aworker decode-0")
            await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 2_000 * MS)
            await page.locator("#pause").click()
            await expect(page).to_have_url(re.compile("end="))
            link = await page.evaluate("location.hash")
            (end_unix_ms,) = re.findall(r"end=(\d+)", link)
            shown = await figures(page, lambda shown: shown["asOfUnixMs"] == end_unix_ms)
        async with looking(service, f"/{link}") as page:
            assert shown["scope"] == "worker:decode-0"
            await figures(page, lambda again: again == shown)


async def test_a_link_restores_the_whole_view() -> None:
    workers = Worker("prefill-0", "prefill", 0.6), Worker("decode-0", "decode", 0.3)
    link = "#range=15m&scope=pool%3Adecode&sort=busy&theme=dark&filter=decode-0"
    async with serving(*workers) as service, looking(service, f"/{link}", color_scheme="light") as page:
        shown = await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 2_000 * MS)
        assert shown["scope"] == "pool:decode"
        await expect(page.locator("#ranges [aria-pressed=true]")).to_have_text("15m")
        await expect(page.locator("#sort")).to_have_value("busy")
        await expect(page.locator("#filter")).to_have_value("decode-0")
        await expect(page.locator("#theme")).to_have_text("light")
        await expect(page.get_by_role("button", name="prefill-0")).to_have_count(0)
        assert await page.evaluate("location.hash") == link


async def test_a_worker_that_stops_sending_lowers_coverage_and_does_not_become_idle() -> None:
    workers = Worker("prefill-0", "prefill", 1.0), Worker("decode-0", "decode", 1.0)
    async with serving(*workers) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        service.workers["decode-0"].silent = True
        shown = await figures(page, lambda shown: shown["coverage"] == 0.5)
        assert shown["gpu_ns"]["idle"] == 0
        answer = await occupancy(service, shown)
        assert (answer["coverage"], answer["gpus"], answer["gpu_ns"]) == (0.5, 2, shown["gpu_ns"])
        assert await page.locator("#share-idle").inner_text() == "0.0 %"
        assert await page.locator("#coverage").inner_text() == "50 %"
        await expect(page.locator("tr.uncovered", has_text="decode-0")).to_be_visible(timeout=WAIT_MS)


async def test_every_key_does_as_the_help_says() -> None:
    workers = Worker("prefill-0", "prefill", 0.6), Worker("decode-0", "decode", 0.3, node="node-b")
    async with serving(*workers) as service, looking(service, "/#theme=light") as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        for key, said in (("3", "range=15m"), ("6", "range=2d"), ("s", "sort=pool"), ("t", "theme=dark")):
            await page.keyboard.press(key)
            await expect(page).to_have_url(re.compile(said))
        await page.keyboard.press("1")
        await page.keyboard.press("/")
        await page.keyboard.type("node-b 3")  # in a field keys are letters
        await expect(page).to_have_url(re.compile(r"filter=node-b\+3"))
        assert "range" not in page.url
        await page.keyboard.press("Control+a")
        await page.keyboard.press("Delete")
        await page.keyboard.press("?")
        await expect(page.locator("#filter")).to_have_value("?")
        await page.keyboard.press("Delete")
        await page.locator("#filter").fill("")

        await page.locator("#heat").focus()
        await page.keyboard.press("ArrowDown")
        await expect(page.locator("#heat-point")).to_contain_text("decode-0 on node-b, decode")
        await page.keyboard.press("Enter")
        await expect(page.locator("#trail")).to_have_text("clusternode node-bworker decode-0")
        assert "end=" not in page.url  # there arrows point, and do not move the time
        for scope in ("node:node-b", "cluster"):
            await page.keyboard.press("u")
            await figures(page, lambda shown, scope=scope: shown["scope"] == scope)
        await page.go_back()
        await figures(page, lambda shown: shown["scope"] == "node:node-b")

        await page.locator("#pause").focus()
        await page.keyboard.press(" ")  # once, by the button
        await expect(page.locator("#pause")).to_have_text("go on")
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("p")
        await expect(page.locator("#replay")).to_have_text("stop")
        await page.locator("#pause").press(" ")
        await expect(page.locator("#pause")).to_have_text("pause")
        assert "end=" not in page.url
        await page.locator("#heat").focus()
        await page.keyboard.press("?")
        await expect(page.locator("#help")).to_be_visible()
        assert await page.locator("#keys dt").all_inner_texts() == list(KEYS)
        await page.keyboard.press("Escape")
        await expect(page.locator("#help")).to_be_hidden()


async def test_utilisation_by_phase_targets_and_clocks_are_shown() -> None:
    async with serving(*half_busy()) as service:
        compute = Compute(layer_parameters=1_000_000, parameter_bytes=2, peak_flops_per_s=1e10, peak_bytes_per_s=1e9)
        for worker in service.workers.values():
            worker.compute = compute
        for number in range(4):
            arrival_ns = service.clock.now_ns() - 800 * MS
            service.take(
                REQUESTS,
                RequestEvent(
                    request_id=f"r{number}", model="sim", outcome=OUTCOME_OK, arrival_unix_ns=arrival_ns,
                    ttft_ns=(100 + 100 * number) * MS, decode_ns=200 * MS, output_tokens=11,
                    ttft_deadline_unix_ns=arrival_ns + 350 * MS, tpot_target_us=30_000,
                ),
            )  # fmt: skip
        async with looking(service) as page:
            await expect(page.locator("#latency tr").first).to_contain_text("≤ 350 ms75.0 %", timeout=WAIT_MS)
            await expect(page.locator("#latency tr").nth(1)).to_contain_text("≤ 30 ms100.0 %")
            # 64 tokens of 2 MFLOP in 60 ms of 8 GPUs; one step of 2 MB in 30 ms.
            await expect(page.locator("#efficiency")).to_contain_text("prefill MFU · MBU2.7 %", timeout=WAIT_MS)
            await expect(page.locator("#efficiency")).to_contain_text("decode MFU · MBU0.7 % · 6.7 %")
            nodes = page.locator("#tables .table").nth(2)
            await expect(nodes).to_contain_text("clock ahead")
            await expect(nodes.locator("tbody tr")).to_contain_text("0.0 ms")
