"""Tests in Chromium of the top of the page: verdict, pressure, recent events and decisions."""

import asyncio
from typing import Any, Final

import pytest
from playwright.async_api import Page, Route, expect

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_SET_ROLE,
    MODE_AUTO,
    Candidate,
    Decision,
    Measured,
    Seen,
    WorkerChange,
)
from libs.contracts.roles import role_from_name
from libs.contracts.topics import DECISIONS
from libs.testing.suites.browser import PHONE
from tests.e2e.page.page_rig import SECOND_NS, WAIT_MS, Worker, figures, half_busy, looking, role_moved, serving
from tests.status_rig import answer

POLL_S: Final = 3.2
"""Slightly longer than the page waits between two polls of decisions without an event."""

pytestmark = [pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def show_status(page: Page, status: dict[str, Any], history: dict[str, Any] | None = None) -> None:
    """Set the status that the service reports from now on."""

    async def say(route: Route) -> None:
        past = "/history" in route.request.url
        await (route.continue_() if past and history is None else route.fulfill(json=history if past else status))

    await page.unroute("**/v1/status**")
    await page.route("**/v1/status**", say)


async def test_the_verdict_comes_first_with_its_advice_and_an_old_one_is_not_shown_as_live() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await show_status(page, answer())
        sentence = page.locator("#verdict-sentence")
        await expect(sentence).to_have_text("Prefill-bound: pressure 1.8 against 0.2.", timeout=WAIT_MS)
        await expect(page.locator("#verdict")).to_have_class("panel wrong")
        await expect(page.locator("#verdict-command")).to_have_text("fulcrum role gpu-4 gpu-6 prefill")
        await expect(page.locator("#verdict-causes li")).to_contain_text("gpu-7 takes 2.4 times as long.")
        await expect(page.locator("#planner-line")).to_contain_text("Planner advisory, moves nothing by itself")
        gauges = page.locator("#pressures .gauge")
        await expect(gauges.nth(0).locator("b")).to_have_text("1.80")
        await expect(gauges.nth(0)).to_contain_text(
            "41 requests wait, 90k tokens: 3.7 s of work · busy 99 % of the time"
        )
        await expect(gauges.nth(0).get_by_role("meter")).to_have_attribute("aria-valuenow", "1.80")
        await expect(gauges.nth(1)).to_contain_text("6 sequences, room for 160 within TPOT (192 slots)")
        seeing = answer()
        seeing["models"][0]["prefill"] |= {"busy": 0.75, "encode": 0.25}
        await show_status(page, seeing)
        await expect(gauges.nth(0)).to_contain_text(
            "busy 75 % of the time · encode 25 %, the rest 50 %", timeout=WAIT_MS
        )
        await expect(gauges.nth(1)).not_to_contain_text("encode")
        await expect(page.locator("#advice-kept")).to_be_hidden()
        counts = [("pressure", 9, 10), ("backlog", 4, 5), ("ttft", 4, 5)]
        kept = [{"figure": figure, "kept": kept, "of": of, "by_cause": []} for figure, kept, of in counts]
        await show_status(page, answer(advice_kept=kept))
        said = "advice kept: pressure 9 of 10, backlog 4 of 5, TTFT 4 of 5"
        await expect(page.locator("#advice-kept")).to_have_text(said, timeout=WAIT_MS)
        above = [(await page.locator(each).bounding_box() or {})["y"] for each in ("#verdict", "#pressures", "#charts")]
        assert above == sorted(above)
        await show_status(page, answer(live=False, not_live_because="nothing came for 95 s", age_ms=95_000))
        await expect(page.locator("#verdict-facts")).to_contain_text("Not live: nothing came for 95 s", timeout=WAIT_MS)
        await expect(page.locator("#verdict")).to_have_class("panel unknown")


async def test_the_past_shows_the_verdict_of_that_time() -> None:
    async with serving(*half_busy(), lived_s=60) as service, looking(service) as page:
        end_ms = service.clock.now_ns() // SECOND_NS * 1000 - 20_000
        empty: dict[str, list[None]] = {name: [None] for name in ("requests_per_s", "too_many_per_s", "errors_per_s")}
        model = {"prefill": [0.7], "decode": [1.4], "cluster": [0.9], "waiting_tokens": [0.0], "running": [3.0]}
        history = {
            "window_ms": 1000, "first_start_unix_ms": end_ms - 1000, "models": {"sim": model}, "traffic": empty,
            "verdicts": [{
                "unix_ms": end_ms - 5000, "code": "decode_bound_tpot", "sentence": "Decode-bound.",
                "command": "fulcrum role gpu-1 decode",
            }],
        }  # fmt: skip
        await show_status(page, answer(), history)
        await page.goto(f"{service.url}/#end={end_ms}")
        await page.reload()
        await expect(page.locator("#verdict-sentence")).to_have_text("Decode-bound.", timeout=WAIT_MS)
        await expect(page.locator("#verdict-then")).to_have_text("advised then")
        await expect(page.locator("#pressures .gauge b").nth(1)).to_have_text("1.40")
        await expect(page.locator("#age")).to_contain_text("ago")
        await page.locator("#pause").click()
        await expect(page.locator("#verdict-sentence")).to_have_text(
            "Prefill-bound: pressure 1.8 against 0.2.", timeout=WAIT_MS
        )


async def test_events_and_decisions_are_listed_with_their_outcomes() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        role, _ = role_from_name("prefill")
        now_ns = service.clock.now_ns()
        service.take(
            DECISIONS,
            Decision(
                planner_id="planner", incarnation=1, sequence=7, decided_unix_ns=now_ns, action=ACTION_SET_ROLE,
                mode=MODE_AUTO, reason="prompts <i>press</i>", model="sim",
                changes=[WorkerChange(worker_id="decode-0", assignment=Assignment(model="sim", role=role))],
                candidates=[Candidate(prefill=2, decode=1, prompt_pressure=0.9, decode_pressure=0.4)],
                measured=Measured(before=Seen(prompt_pressure=1.8), after=Seen(prompt_pressure=0.95), after_ms=2000),
            ),
        )  # fmt: skip
        role_moved(service, "decode-0", "prefill")
        service.workers["prefill-0"].incarnation = now_ns
        events = page.locator("#events li")
        await expect(events).to_have_count(3, timeout=WAIT_MS)
        await expect(page.locator("#events")).to_contain_text("prefill-0 restarted: back after")
        await page.locator("#event-kind").select_option("moves")
        await expect(events).to_have_count(1)
        await expect(events).to_contain_text("decode-0 moved to prefill: prompts wait")
        decisions = page.locator("#decisions tr")
        await expect(decisions).to_have_count(1, timeout=WAIT_MS)
        await expect(decisions).to_contain_text("prompts <i>press</i>")
        await expect(decisions).to_contain_text("1.80 → 0.90, seen 0.95")
        await decisions.get_by_role("button").click()
        await expect(page.locator("#move dl")).to_contain_text("this is no proof")


async def test_a_decision_and_its_outcome_are_fetched_as_soon_as_the_stream_announces_them() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        await expect(page.locator("#decisions-note")).to_contain_text("none has changed", timeout=WAIT_MS)
        # From here on no timer of the page fires but those that are as short as a frame or so.
        await page.evaluate("""() => {
            const later = window.setTimeout;
            window.setTimeout = (call, ms, ...more) => (ms > 500 ? 0 : later(call, ms, ...more));
        }""")
        await asyncio.sleep(POLL_S)  # the poll in progress is over, and the next one never comes
        role, _ = role_from_name("prefill")
        decided = Decision(
            planner_id="planner", incarnation=1, sequence=7, decided_unix_ns=service.clock.now_ns(),
            action=ACTION_SET_ROLE, mode=MODE_AUTO, reason="prompts press", model="sim",
            changes=[WorkerChange(worker_id="decode-0", assignment=Assignment(model="sim", role=role))],
            candidates=[Candidate(prefill=2, decode=1, prompt_pressure=0.9, decode_pressure=0.4)],
        )  # fmt: skip
        service.take(DECISIONS, decided)
        row = page.locator("#decisions tr")
        await expect(row).to_contain_text("prompts press", timeout=WAIT_MS)
        seen = Measured(before=Seen(prompt_pressure=1.8), after=Seen(prompt_pressure=0.95), after_ms=2000)
        decided.measured.CopyFrom(seen)
        service.take(DECISIONS, decided)
        await expect(row).to_contain_text("1.80 → 0.90, seen 0.95", timeout=WAIT_MS)
        await expect(page.locator("#events")).to_contain_text("2.0 s later prefill pressure 1.80 → 0.95")


async def test_the_toolbar_of_a_phone_is_one_row_and_nothing_overflows() -> None:
    async with serving(*half_busy()) as service, looking(service, viewport=PHONE) as page:
        await show_status(page, answer())
        await expect(page.locator("#pressures")).to_be_visible(timeout=WAIT_MS)
        boxes = [
            await page.locator(each).bounding_box() for each in ("#state", "#range-choice", "#pause", "#help-open")
        ]
        middles = [box["y"] + box["height"] / 2 for box in boxes if box]
        assert len(middles) == 4
        assert max(middles) - min(middles) < 4
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        await page.locator("#range-choice").select_option("2m")
        await expect(page.locator("#ranges [aria-pressed=true]")).to_have_text("2m")


async def test_a_single_pool_or_node_has_no_table() -> None:
    async with serving(Worker("decode-0", "decode", 0.5)) as service, looking(service) as page:
        await expect(page.locator(".of-worker tbody tr")).to_have_count(1, timeout=WAIT_MS)
        for kind in ("pool", "model", "node"):
            await expect(page.locator(f".of-{kind}")).to_be_hidden()
        assert "∞" not in await page.locator("main").inner_text()
