"""Tests in Chromium of the past on the page: files, replay and jumps in time."""

import asyncio
import csv
import json
import re
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.async_api import Error, Page, Route, expect

from libs.telemetry import directory as roll
from libs.telemetry.rollups import StoredWindow
from libs.telemetry.workers import Member
from libs.testing.wait import until
from tests.e2e.page.page_rig import (
    MS,
    SECOND_NS,
    WAIT_MS,
    Service,
    Worker,
    figures,
    half_busy,
    looking,
    occupancy,
    serving,
)

MINUTE_NS = 60 * SECOND_NS
FIGURE_WINDOWS = 20
pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def saved(page: Page, kind: str) -> str:
    """Return the file that the browser saves."""
    async with page.expect_download() as download:
        await page.locator(f"#{kind}").click()
    done = await download.value
    assert done.suggested_filename.endswith(f".{kind}")
    return (await done.path()).read_text()


async def history_rows(service: Service, query: dict[str, str]) -> list[dict[str, Any]]:
    """Return the API's data of the same windows, in the format of the page's files."""
    async with httpx.AsyncClient() as http:
        answer = (await http.get(f"{service.url}/v1/occupancy/history", params=query)).json()
    parts = ("covered", "prefill", "decode", "kv_wait", "idle", "encode")
    return [
        {"start_unix_ms": start, **{f"{part}_gpu_ns": answer["gpu_ns"][part][at] for part in parts},
         "gpus": answer["gpus"][at], "coverage": answer["coverage"][at]}
        for at, start in enumerate(answer["starts_unix_ms"])
    ]  # fmt: skip


async def test_downloaded_files_match_the_page_and_the_api() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service, looking(service) as page:
        for scope in ("cluster", "pool:prefill"):
            await figures(page, lambda shown: shown["coverage"] == 1)
            await expect(page.locator(".encodes")).to_be_hidden()
            await page.locator("#pause").click()
            await expect(page.locator("#pause")).to_have_text("go on")
            shown = await figures(page, lambda shown, scope=scope: shown["scope"] == scope)
            rows = json.loads(await saved(page, "json"))
            last = rows[-FIGURE_WINDOWS:]
            summed = {part: sum(row[f"{part}_gpu_ns"] for row in last) for part in shown["gpu_ns"]}
            assert summed == shown["gpu_ns"]
            assert last[-1]["start_unix_ms"] + 100 == int(shown["asOfUnixMs"])
            query = {"window": "100ms", "span": "30s", "scope": scope, "end_unix_ms": shown["asOfUnixMs"]}
            reported = {row["start_unix_ms"]: row for row in await history_rows(service, query)}
            assert [{name: row[name] for name in row if name != "provisional"} for row in rows] == [
                reported[row["start_unix_ms"]] for row in rows
            ]
            table = list(csv.DictReader((await saved(page, "csv")).splitlines()))
            assert [{name: json.loads(value) for name, value in row.items()} for row in table] == rows
            await page.locator("#pause").click()
            if scope == "cluster":  # one pool alone makes no table
                await page.locator(".of-pool tbody").get_by_role("button", name="prefill").click()


async def test_a_replay_of_past_hours_shows_what_the_api_returns() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service:
        now_ns = service.clock.now_ns() // MINUTE_NS * MINUTE_NS
        service.state.members.enter(Member(worker.id, worker.node, "sim", worker.gpus) for worker in workers)
        for back in range(3 * 360, 0, -1):
            start_ns, busy = now_ns - back * 10 * SECOND_NS, (back % 100) * SECOND_NS // 20
            times = np.array([[10 * SECOND_NS, busy, 0, 0], [10 * SECOND_NS, 0, 2 * SECOND_NS, 0]], np.int64)
            roles, encode = np.array([1, 2], np.uint8), np.array([busy // 2, 0], np.int64)
            kept = StoredWindow(10 * SECOND_NS, start_ns, [worker.id for worker in workers], times, roles, encode)
            service.state.rollups.restore(kept)
        async with looking(service, "/#range=1h") as page:
            live = await figures(page, lambda shown: shown["coverage"] == 1)
            await expect(page.locator(".encodes")).to_be_visible()
            for _ in range(3):
                before = await figures(page, bool)
                await page.keyboard.press("ArrowLeft")
                past = await figures(page, lambda shown, before=before: shown["asOfUnixMs"] < before["asOfUnixMs"])
            assert int(live["asOfUnixMs"]) - int(past["asOfUnixMs"]) == pytest.approx(90 * 60_000, abs=20_000)
            past = await figures(page, lambda shown: shown["windowMs"] == "10000" and shown["coverage"] == 1)
            await expect(page.locator("#queue-prefill")).to_have_text("–")  # of which nothing is kept
            assert past["gpu_ns"] == await _reported_of(service, past)
            assert past["gpu_ns"]["prefill"] == 4 * _busy(now_ns, past)
            await expect(page.locator("tr", has_text="prefill-0")).to_contain_text("100 %")

            await page.keyboard.press("p")
            later = await figures(page, lambda shown: int(shown["asOfUnixMs"]) >= int(past["asOfUnixMs"]) + 100_000)
            await page.keyboard.press("p")
            await expect(page.locator("#replay")).to_have_text("replay")
            later = await figures(page, lambda shown: shown["coverage"] == 1)
            assert later["gpu_ns"] == await _reported_of(service, later)
            rows = json.loads(await saved(page, "json"))
            query = {"window": "10s", "span": "1h", "scope": "cluster", "end_unix_ms": later["asOfUnixMs"]}
            assert [{name: row[name] for name in row if name != "provisional"} for row in rows] == (
                await history_rows(service, query)
            )
            link = await page.evaluate("location.hash")
            await page.locator("#pause").click()
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) > int(live["asOfUnixMs"]))
        async with looking(service, f"/{link}") as page:
            await figures(page, lambda again: again == later)


def _busy(now_ns: int, shown: dict[str, Any]) -> int:
    """Return the prefill of each GPU in a past window, in ns."""
    return (now_ns // SECOND_NS - int(shown["asOfUnixMs"]) // 1000 + 10) // 10 % 100 * SECOND_NS // 20


async def _reported_of(service: Service, shown: dict[str, Any]) -> dict[str, int]:
    """Return what the API reports for the past window that the page shows."""
    query = {"window": "10s", "span": "10s", "scope": shown["scope"], "end_unix_ms": shown["asOfUnixMs"]}
    (row,) = await history_rows(service, query)
    return {name: row[f"{name}_gpu_ns"] for name in shown["gpu_ns"]}


async def go_to(page: Page, unix_ms: int) -> None:
    """Go to a time by the input field, which uses the reader's own clock."""
    field = "ms => new Date(ms - 60000 * new Date(ms).getTimezoneOffset()).toISOString().slice(0, 19)"
    before = page.url
    await page.locator("#when").fill(await page.evaluate(field, unix_ms))
    assert page.url == before  # while it is typed
    await page.locator("#when").press("Enter")


async def test_a_time_long_past_is_reached_by_field_key_and_link() -> None:
    async with serving(*half_busy(), lived_s=400) as service:
        then_ms = (service.clock.now_ns() // MS - 300_000) // 1000 * 1000
        async with looking(service) as page:
            await figures(page, lambda shown: shown["coverage"] == 1)
            await page.keyboard.press("g")
            await expect(page.locator("#when")).to_be_focused()
            await go_to(page, then_ms)
            shown = await figures(page, lambda shown: int(shown["asOfUnixMs"]) == then_ms and shown["coverage"] == 1)
            assert shown["gpu_ns"] == (await occupancy(service, shown))["gpu_ns"]
            assert await page.locator("#ratio").inner_text() == "16.0"
            await expect(page.locator("#tables tr", has_text="prefill-0")).to_contain_text("60 %")
            await expect(page.locator("#status")).to_have_text("paused")  # older windows load after the newest
            assert await page.evaluate("(() => document.querySelector('#stack canvas').getContext('2d')"
                                       ".getImageData(400, 150, 1, 1).data[3])()") == 255  # fmt: skip
            await expect(page.locator("#queue-prefill")).to_have_text("–")
            await go_to(page, then_ms - 60_000)
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) == then_ms - 60_000 and shown["coverage"] == 1)
            link = await page.evaluate("location.hash")
            await page.go_back()
            assert shown == await figures(page, lambda again: again == shown)
            await page.go_back()
            await expect(page.locator("#pause")).to_have_text("pause")
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) > then_ms + 290_000)
            await page.evaluate("link => { location.hash = link }", link)  # pasted into the open page
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) == then_ms - 60_000 and shown["coverage"] == 1)
            await expect(page.locator("#pause")).to_have_text("go on")


async def test_a_worker_that_has_left_counts_with_all_its_gpus_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "LEFT_NS", 100 * MS)
    async with serving(*half_busy()) as service:
        async with looking(service) as page:
            await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 9 * 2_000 * MS)
            await page.locator("#pause").click()
            shown, link = await figures(page, bool), await page.evaluate("location.hash")
        service.workers["prefill-0"].leaves = True
        await until(lambda: (facts := service.state.fleet.directory.facts("prefill-0")) and facts.left)
        service.workers["prefill-0"].silent = True
        await until(lambda: len(list(service.state.fleet.directory.listed(service.clock.now_ns()))) == 1)
        async with looking(service, f"/{link}") as page:
            assert shown == await figures(page, lambda again: again["gpu_ns"] == shown["gpu_ns"])
            assert await page.locator("#gpus").inner_text() == "9"
            await expect(page.locator("#tables .table").nth(2)).to_contain_text("node-a")
            assert "is not known" not in await page.locator("#tables").inner_text()
            await page.locator("#pause").click()
            await figures(page, lambda later: later["gpu_ns"]["covered"] == 2_000 * MS)
            await expect(page.locator("#tables tr", has_text="prefill-0")).to_have_count(0)


async def test_other_changes_of_the_view_do_not_delay_the_load_of_a_later_time() -> None:
    async with serving(*half_busy(), lived_s=400) as service:
        end_ms = (service.clock.now_ns() // MS - 300_000) // 1000 * 1000
        async with looking(service, f"/#range=15m&end={end_ms}") as page:
            await figures(page, lambda shown: shown["coverage"] == 1)
            loading, go_on = asyncio.Event(), asyncio.Event()

            async def hold(route: Route) -> None:
                loading.set()
                await go_on.wait()
                await route.continue_()

            await page.route("**/v1/occupancy/windows?**", hold)
            await page.keyboard.press("ArrowRight")
            await loading.wait()
            await page.keyboard.press("s")
            await expect(page).to_have_url(re.compile("sort=pool"))
            go_on.set()
            await figures(page, lambda shown: int(shown["asOfUnixMs"]) > end_ms + 200_000)


async def test_a_window_that_arrives_after_the_replay_was_stopped_is_not_shown() -> None:
    async with serving(*half_busy(), lived_s=400) as service:
        end_ms = (service.clock.now_ns() // MS - 300_000) // 10_000 * 10_000
        async with looking(service, f"/#range=1h&end={end_ms}") as page:
            await figures(page, lambda shown: shown["windowMs"] == "10000" and shown["coverage"] == 1)
            before = await figures(page, bool)
            loading, go_on, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def hold(route: Route) -> None:
                loading.set()
                await go_on.wait()
                with suppress(Error):  # the page may have given it up
                    await route.continue_()

            page.on("requestfinished", lambda _: over.set())
            page.on("requestfailed", lambda _: over.set())
            await page.route("**/v1/occupancy/windows?**", hold)
            await page.keyboard.press("p")
            await loading.wait()
            over.clear()
            await page.keyboard.press("p")
            await expect(page.locator("#replay")).to_have_text("replay")
            go_on.set()
            await over.wait()
            await page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            await page.keyboard.press("t")  # has the page drawn whatever has come
            after = await figures(page, lambda shown: shown["coverage"] == 1)
            assert after["asOfUnixMs"] == before["asOfUnixMs"]
            assert f"end={end_ms}" in await page.evaluate("location.hash")


async def test_tables_of_a_past_time_show_the_roles_of_that_time() -> None:
    async with serving(*half_busy(), lived_s=60) as service, looking(service) as page:
        pools, workers = page.locator(".of-pool tbody tr"), page.locator(".of-worker tbody tr")
        await expect(pools).to_have_count(2, timeout=WAIT_MS)
        service.workers["decode-0"].role = "prefill"
        await expect(pools).to_have_count(1, timeout=WAIT_MS)
        await expect(workers.first.locator(".c-role")).to_have_text("prefill")
        await page.keyboard.press("ArrowLeft")
        await expect(pools).to_have_count(2, timeout=WAIT_MS)
        await expect(pools.first).to_contain_text("decode")
        await expect(workers.first.locator(".c-role")).to_have_text("decode")


async def test_page_and_api_agree_on_every_part_across_a_role_move() -> None:
    mover = Worker("w-0", "decode", 0.7, gpus=2)
    others = Worker("w-1", "prefill", 0.4, node="node-b"), Worker("w-2", "decode", 0.3, model="other")
    async with serving(mover, *others, lived_s=5) as service:
        mover.role = "prefill"
        moved_ns = service.clock.now_ns()
        await until(lambda: (service.state.history.written_to_ns or 0) > moved_ns + 3 * SECOND_NS)
        async with looking(service, f"/#range=30s&end={(moved_ns // MS // 100 + 10) * 100}") as page:
            answer = await occupancy(service, await figures(page, lambda shown: shown["coverage"] == 1))
            parts = {
                "pools": ("pool", "role"),
                "nodes": ("node", "node"),
                "models": ("model", "model"),
                "workers": ("worker", "id"),
            }
            for name, (kind, named) in parts.items():
                for part in answer[name]:
                    scope = f"{kind}:{part[named]}"
                    await page.locator(f'#tables [data-scope="{scope}"]').click()
                    shown = await figures(page, lambda shown, scope=scope: shown["scope"] == scope)
                    assert (scope, shown["gpu_ns"], shown["coverage"]) == (scope, part["gpu_ns"], part["coverage"])
                    await page.locator("#trail button").first.click()
                    await figures(page, lambda shown: shown["scope"] == "cluster")
            assert {pool["role"]: pool["gpus"] for pool in answer["pools"]} == {"prefill": 3, "decode": 3}
            assert (await figures(page, bool))["gpu_ns"] == answer["gpu_ns"]
            async with httpx.AsyncClient() as http:
                query = {"window": "100ms", "span": "2s", "end_unix_ms": answer["as_of_unix_ns"] // MS}
                for pool in answer["pools"]:
                    scope = {"scope": f"pool:{pool['role']}"}
                    windows = (await http.get(f"{service.url}/v1/occupancy/history", params=query | scope)).json()
                    totals = {part: sum(each) for part, each in windows["gpu_ns"].items()}
                    assert totals.pop("encode") == 0
                    assert totals == pool["gpu_ns"]
