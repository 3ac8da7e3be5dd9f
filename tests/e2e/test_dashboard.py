"""The page in a real Chromium, over the metrics service's own app, tick and stream."""

import asyncio
import csv
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.async_api import Page, Route, expect
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Compute, Load
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_ROLE_MOVED, Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent, Step, StepBatch
from libs.contracts.roles import role_from_name
from libs.contracts.topics import DECISIONS, REQUESTS, STEPS
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.telemetry import fleet
from libs.telemetry.members import Member
from libs.telemetry.rollups import Kept
from libs.telemetry.split import prefill_share
from libs.testing.browser import browser, listen_for_errors
from libs.testing.wait import until
from services.metrics import hub as hub_module
from services.metrics.alerts.desk import AlertDesk
from services.metrics.api import make_api
from services.metrics.hub import Hub
from services.metrics.live import TICK_NS, tick_forever
from services.metrics.prometheus import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.ticks import TickWriter

MS = 1_000_000
LAG_NS, LIVE_LAG_NS = 400 * MS, 100 * MS
BATCH_NS = 100 * MS
WAIT_MS = 10_000
SECOND_NS = 1_000 * MS
MINUTE_NS = 60 * SECOND_NS
FIGURE_WINDOWS = 20
KEYS = ("space", "← →", "g", "p", "1–6", "t", "s", "/", "u", "?")
pytestmark = pytest.mark.suite


@dataclass
class Worker:
    """Sends a batch every 100 ms, with a step of `busy` of it."""

    id: str
    role: str
    busy: float
    gpus: int = 1
    node: str = "node-a"
    sequence: int = 0
    silent: bool = False
    leaves: bool = False
    compute: Compute | None = None

    def batch(self, start_ns: int, length_ns: int = BATCH_NS) -> StepBatch:
        role, budget = role_from_name(self.role)
        self.sequence += 1
        prefill = self.role == "prefill"
        step = Step(
            start_unix_ns=start_ns, end_unix_ns=start_ns + int(self.busy * length_ns),
            prefill_tokens=64 * prefill, prefill_sequences=int(prefill), decode_sequences=int(not prefill),
        )  # fmt: skip
        return StepBatch(
            worker_id=self.id, incarnation=1, sequence=self.sequence, node=self.node, gpus=self.gpus, engine="sim",
            assignment=Assignment(model="sim", role=role, budget_tokens=budget, epoch=1),
            covered_from_unix_ns=start_ns, covered_to_unix_ns=start_ns + length_ns, steps=[step],
            load=Load(running=2, waiting=3, waiting_prefill_tokens=40), last=self.leaves, compute=self.compute,
        )  # fmt: skip


@dataclass
class Service:
    """The metrics service, with workers that send straight into its state."""

    state: MetricsState
    clock: SystemClock
    url: str = ""
    workers: dict[str, Worker] = field(default_factory=dict)

    def take(self, topic: Any, value: Any) -> None:
        self.state.take(Record(topic, "key", value, 0, 0), self.clock.now_ns())

    def live_through(self, seconds: int) -> None:
        """The workers have been there for so long."""
        now_ns = self.clock.now_ns() // BATCH_NS * BATCH_NS
        self.state.history.resume(now_ns - seconds * SECOND_NS)
        for start_ns in range(now_ns - seconds * SECOND_NS, now_ns, SECOND_NS):
            for worker in self.workers.values():
                self.take(STEPS, worker.batch(start_ns, SECOND_NS))
            self.state.history.advance(start_ns + SECOND_NS)

    async def send_forever(self) -> None:
        start_ns = self.clock.now_ns() // BATCH_NS * BATCH_NS
        while True:
            while start_ns + BATCH_NS <= self.clock.now_ns():
                for worker in self.workers.values():
                    if not worker.silent:
                        self.take(STEPS, worker.batch(start_ns))
                start_ns += BATCH_NS
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    *workers: Worker, settings: MetricsSettings | None = None, lived_s: int = 0
) -> AsyncIterator[Service]:
    clock, hub, tasks = SystemClock(), Hub(), TaskOwner()
    state = MetricsState(prefill_share, RequestMetrics(CollectorRegistry()))
    service = Service(state, clock, workers={worker.id: worker for worker in workers})
    writer = TickWriter(window_ns=TICK_NS, settled_ns=LAG_NS)
    desk = AlertDesk(state, (settings or MetricsSettings()).alert_limits(), lag_ns=LIVE_LAG_NS)
    api = make_api(state, hub, desk.book, clock, CollectorRegistry(), lag_ns=LAG_NS, live_lag_ns=LIVE_LAG_NS)
    if lived_s:
        service.live_through(lived_s)
    try:
        tasks.spawn("workers", service.send_forever())
        tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=LIVE_LAG_NS))
        async with serve_http(api, bind("127.0.0.1", 0, "PORT"), tasks=tasks) as service.url:
            try:
                yield service
            finally:
                hub.close()
    finally:
        await tasks.close()
    assert tasks.error is None


@asynccontextmanager
async def looking(service: Service, path: str = "/", **options: Any) -> AsyncIterator[Page]:
    """The page, which must not complain of anything."""
    async with browser() as running:
        page = await running.new_page(**options)
        errors = listen_for_errors(page)
        await page.goto(service.url + path)
        yield page
        assert errors == []


async def figures(page: Page, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """What the page says at its top, once something holds of it."""
    async with asyncio.timeout(WAIT_MS / 1000):
        while not ((shown := await _figures(page)) and holds(shown)):
            await asyncio.sleep(0.02)
        return shown


async def _figures(page: Page) -> dict[str, Any] | None:
    data = json.loads(await page.evaluate("JSON.stringify({...document.getElementById('figures').dataset})"))
    if not data:
        return None
    names = ("covered", "prefill", "decode", "kv_wait", "idle")
    data["gpu_ns"] = dict(zip(names, map(int, data["gpuNs"].split(",")), strict=True))
    data["coverage"] = float(data["coverage"])
    return data


async def occupancy(service: Service, shown: dict[str, Any]) -> dict[str, Any]:
    """What the API says of the window that the page shows."""
    window = {"window": f"{shown['windowMs']}ms", "end_unix_ms": shown["asOfUnixMs"]}
    async with httpx.AsyncClient() as http:
        body: dict[str, Any] = (await http.get(f"{service.url}/v1/occupancy", params=window)).json()
    assert body["as_of_unix_ns"] == int(shown["asOfUnixMs"]) * MS
    return body


@pytest.fixture(autouse=True)
def _needs_a_browser(chromium: str) -> None:
    """Skipped where there is none."""


async def test_figures_equal_the_api_and_go_on_live() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service, looking(service) as page:
        first = await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 5 * 2_000 * MS)
        await figures(page, lambda shown: int(shown["asOfUnixMs"]) >= int(first["asOfUnixMs"]) + 1000)
        await page.keyboard.press(" ")
        await expect(page.locator("#pause")).to_have_text("go on")
        shown = await figures(page, bool)
        told = await occupancy(service, shown)
        assert shown["gpu_ns"] == told["gpu_ns"]
        assert shown["coverage"] == told["coverage"] == 1.0
        ratio = float(await page.locator("#ratio").inner_text())
        assert ratio == pytest.approx(told["ratio"], rel=0.01) == pytest.approx(8.0)
        assert await page.locator("#share-prefill").inner_text() == f"{100 * told['prefill']:.1f} %"
        assert "3 requests · 40 tokens" in await page.locator("#queue-prefill").inner_text()
        await page.keyboard.press(" ")
        await figures(page, lambda later: int(later["asOfUnixMs"]) > int(shown["asOfUnixMs"]))


async def test_what_else_of_the_view_changes_while_a_later_time_is_loaded_does_not_hold_it_back() -> None:
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


async def test_a_link_shows_the_same_moment_and_scope_again() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service:
        async with looking(service, "/#range=30s") as page:
            await page.get_by_role("button", name="decode-0").click()
            await expect(page.locator("#trail")).to_have_text("clusternode node-aworker decode-0")
            await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 2_000 * MS)
            await page.locator("#pause").click()
            await expect(page).to_have_url(re.compile("end="))
            shown, link = await figures(page, bool), await page.evaluate("location.hash")
        async with looking(service, f"/{link}") as page:
            assert shown["scope"] == "worker:decode-0"
            assert shown == await figures(page, lambda again: again["gpu_ns"] == shown["gpu_ns"])


async def test_a_worker_that_stops_sending_lowers_coverage_and_does_not_become_idle() -> None:
    workers = Worker("prefill-0", "prefill", 1.0), Worker("decode-0", "decode", 1.0)
    async with serving(*workers) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        service.workers["decode-0"].silent = True
        shown = await figures(page, lambda shown: shown["coverage"] == 0.5)
        assert shown["gpu_ns"]["idle"] == 0
        told = await occupancy(service, shown)
        assert (told["coverage"], told["gpus"], told["gpu_ns"]) == (0.5, 2, shown["gpu_ns"])
        assert await page.locator("#share-idle").inner_text() == "0.0 %"
        assert await page.locator("#coverage").inner_text() == "50 %"
        await expect(page.locator("tr.uncovered", has_text="decode-0")).to_be_visible(timeout=WAIT_MS)


async def test_a_role_move_stands_on_the_time_axis_and_tells_its_reason() -> None:
    async with serving(Worker("decode-0", "decode", 0.5)) as service, looking(service) as page:
        await expect(page.locator("#tables .table").first).to_contain_text("decode", timeout=WAIT_MS)
        service.workers["decode-0"].role = "prefill"
        role, budget = role_from_name("prefill")
        service.take(
            DECISIONS,
            Decision(
                planner_id="planner", incarnation=1, sequence=1, decided_unix_ns=service.clock.now_ns(),
                action=ACTION_ROLE_MOVED, reason="prompts <b>wait</b>", actor="somebody", worker_id="decode-0",
                assignment=Assignment(model="sim", role=role, budget_tokens=budget, epoch=2),
            ),
        )  # fmt: skip
        await page.locator("#moves button").click(timeout=WAIT_MS)
        await expect(page.locator("#move")).to_contain_text("prompts <b>wait</b>")
        await expect(page.locator("#move h2")).to_have_text("decode-0 moved to prefill")
        await page.keyboard.press("Escape")
        await expect(page.locator("#tables .table").first).to_contain_text("prefill", timeout=WAIT_MS)


async def saved(page: Page, kind: str) -> str:
    """What the browser keeps as a file."""
    async with page.expect_download() as download:
        await page.locator(f"#{kind}").click()
    done = await download.value
    assert done.suggested_filename.endswith(f".{kind}")
    return (await done.path()).read_text()


async def history_rows(service: Service, query: dict[str, str]) -> list[dict[str, Any]]:
    """What the API says of the same windows, as the page's files have it."""
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"{service.url}/v1/occupancy/history", params=query)).json()
    parts = ("covered", "prefill", "decode", "kv_wait", "idle")
    return [
        {"start_unix_ms": start, **{f"{part}_gpu_ns": told["gpu_ns"][part][at] for part in parts},
         "gpus": told["gpus"][at], "coverage": told["coverage"][at]}
        for at, start in enumerate(told["starts_unix_ms"])
    ]  # fmt: skip


async def test_files_hold_what_is_shown_and_what_the_api_says_of_it() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service, looking(service) as page:
        for scope in ("cluster", "pool:prefill"):
            await figures(page, lambda shown: shown["coverage"] == 1)
            await page.locator("#pause").click()
            await expect(page.locator("#pause")).to_have_text("go on")
            shown = await figures(page, lambda shown, scope=scope: shown["scope"] == scope)
            rows = json.loads(await saved(page, "json"))
            last = rows[-FIGURE_WINDOWS:]
            summed = {part: sum(row[f"{part}_gpu_ns"] for row in last) for part in shown["gpu_ns"]}
            assert summed == shown["gpu_ns"]
            assert last[-1]["start_unix_ms"] + 100 == int(shown["asOfUnixMs"])
            query = {"window": "100ms", "span": "30s", "scope": scope, "end_unix_ms": shown["asOfUnixMs"]}
            told = {row["start_unix_ms"]: row for row in await history_rows(service, query)}
            assert [{name: row[name] for name in row if name != "provisional"} for row in rows] == [
                told[row["start_unix_ms"]] for row in rows
            ]
            table = list(csv.DictReader((await saved(page, "csv")).splitlines()))
            assert [{name: json.loads(value) for name, value in row.items()} for row in table] == rows
            await page.locator("#pause").click()
            await page.get_by_role("button", name="prefill", exact=True).first.click()


async def test_the_past_hours_are_replayed_as_the_api_tells_them() -> None:
    workers = Worker("prefill-0", "prefill", 0.6, gpus=4), Worker("decode-0", "decode", 0.3)
    async with serving(*workers) as service:
        now_ns = service.clock.now_ns() // MINUTE_NS * MINUTE_NS
        service.state.members.enter(Member(worker.id, worker.node, "sim", worker.gpus) for worker in workers)
        for back in range(3 * 360, 0, -1):
            start_ns, busy = now_ns - back * 10 * SECOND_NS, (back % 100) * SECOND_NS // 20
            times = np.array([[10 * SECOND_NS, busy, 0, 0], [10 * SECOND_NS, 0, 2 * SECOND_NS, 0]], np.int64)
            kept = Kept(10 * SECOND_NS, start_ns, [worker.id for worker in workers], times, np.array([1, 2], np.uint8))
            service.state.rollups.restore(kept)
        async with looking(service, "/#range=1h") as page:
            live = await figures(page, lambda shown: shown["coverage"] == 1)
            for _ in range(3):
                before = await figures(page, bool)
                await page.keyboard.press("ArrowLeft")
                past = await figures(page, lambda shown, before=before: shown["asOfUnixMs"] < before["asOfUnixMs"])
            assert int(live["asOfUnixMs"]) - int(past["asOfUnixMs"]) == pytest.approx(90 * 60_000, abs=20_000)
            past = await figures(page, lambda shown: shown["windowMs"] == "10000" and shown["coverage"] == 1)
            await expect(page.locator("#queue-prefill")).to_have_text("–")  # of which nothing is kept
            assert past["gpu_ns"] == await _told_of(service, past)
            assert past["gpu_ns"]["prefill"] == 4 * _busy(now_ns, past)
            await expect(page.locator("tr", has_text="prefill-0")).to_contain_text("100 %")

            await page.keyboard.press("p")
            later = await figures(page, lambda shown: int(shown["asOfUnixMs"]) >= int(past["asOfUnixMs"]) + 100_000)
            await page.keyboard.press("p")
            await expect(page.locator("#replay")).to_have_text("replay")
            later = await figures(page, bool)
            assert later["gpu_ns"] == await _told_of(service, later)
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
    """Prefill of each GPU in a window of the past, in ns."""
    return (now_ns // SECOND_NS - int(shown["asOfUnixMs"]) // 1000 + 10) // 10 % 100 * SECOND_NS // 20


async def _told_of(service: Service, shown: dict[str, Any]) -> dict[str, int]:
    """What the API says of the window that the page shows of the past."""
    query = {"window": "10s", "span": "10s", "scope": shown["scope"], "end_unix_ms": shown["asOfUnixMs"]}
    (row,) = await history_rows(service, query)
    return {name: row[f"{name}_gpu_ns"] for name in shown["gpu_ns"]}


async def test_every_key_does_what_the_help_says_of_it() -> None:
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


async def test_a_link_brings_back_everything_about_the_view() -> None:
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


async def test_an_alert_has_a_badge_a_mark_its_reason_and_its_runbook_and_goes_when_it_is_over() -> None:
    workers = Worker("prefill-0", "prefill", 1.0), Worker("decode-0", "decode", 0.05)
    settings = MetricsSettings(alert_for_ms=0, alert_clear_ms=500, alert_window_ms=500)
    async with serving(*workers, settings=settings) as service, looking(service) as page:
        await expect(page.locator("#badge")).to_have_text("1 alert", timeout=WAIT_MS)
        entry = page.locator("#alerts li")
        await expect(entry).to_contain_text("imbalance · prefill")
        await expect(entry).to_contain_text("prefill 100% busy with 32 prompt tokens queued, decode 5%")
        await page.locator("#moves .alert.warning").click()
        await expect(page.locator("#move h2")).to_have_text("imbalance · prefill fires")
        await expect(page.locator("#move dl")).to_contain_text("32 prompt tokens queued")
        await page.keyboard.press("Escape")
        async with httpx.AsyncClient(base_url=service.url) as http:
            told = (await http.get("/v1/alerts")).json()
        assert [alert["name"] for alert in told["firing"]] == ["FulcrumImbalance"]
        service.workers["prefill-0"].busy = 0.2
        await expect(page.locator("#badge")).to_be_hidden(timeout=WAIT_MS)
        await expect(page.locator("#alerts")).to_be_hidden()
        await expect(page.locator("#moves .alert.over")).to_be_visible()
        await page.goto(f"{service.url}/")  # what came before the page was opened is told all the same
        await page.locator("#moves .alert.over").click(timeout=WAIT_MS)
        await expect(page.locator("#move dl")).to_contain_text("prefill 20% busy")
        await page.locator("#move a").click()
        await expect(page.locator("article h1")).to_have_text("FulcrumImbalance")


def half_busy() -> tuple[Worker, Worker]:
    return Worker("prefill-0", "prefill", 0.6, gpus=8), Worker("decode-0", "decode", 0.3)


async def go_to(page: Page, unix_ms: int) -> None:
    """By the field for it, which is by the reader's own clock."""
    field = "ms => new Date(ms - 60000 * new Date(ms).getTimezoneOffset()).toISOString().slice(0, 19)"
    before = page.url
    await page.locator("#when").fill(await page.evaluate(field, unix_ms))
    assert page.url == before  # while it is typed
    await page.locator("#when").press("Enter")


async def test_a_time_long_past_is_shown_from_what_is_kept_of_it_by_field_key_and_link() -> None:
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


async def test_a_worker_that_has_gone_counts_with_all_its_gpus_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LEFT_NS", 100 * MS)
    async with serving(*half_busy()) as service:
        async with looking(service) as page:
            await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 9 * 2_000 * MS)
            await page.locator("#pause").click()
            shown, link = await figures(page, bool), await page.evaluate("location.hash")
        service.workers["prefill-0"].leaves = True
        await until(lambda: (facts := service.state.fleet.facts("prefill-0")) and facts.left)
        service.workers["prefill-0"].silent = True
        await until(lambda: len(list(service.state.fleet.listed(service.clock.now_ns()))) == 1)
        async with looking(service, f"/{link}") as page:
            assert shown == await figures(page, lambda again: again["gpu_ns"] == shown["gpu_ns"])
            assert await page.locator("#gpus").inner_text() == "9"
            await expect(page.locator("#tables .table").nth(2)).to_contain_text("node-a")
            assert "not heard of" not in await page.locator("#tables").inner_text()
            await page.locator("#pause").click()
            await figures(page, lambda later: later["gpu_ns"]["covered"] == 2_000 * MS)
            await expect(page.locator("#tables tr", has_text="prefill-0")).to_have_count(0)


async def test_a_first_load_that_fails_is_tried_again_for_the_same_time() -> None:
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


async def test_a_reader_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_READERS", 0)
    async with serving(*half_busy()) as service, browser() as running:
        page = await running.new_page()
        await page.goto(service.url)
        await expect(page.locator("#status")).to_contain_text("readers hold the stream already", timeout=WAIT_MS)


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
