"""Tests of one request by its id with its stages, and of the slowest requests: `GET /v1/requests` and below."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, OUTCOME_REJECTED, RequestEvent
from libs.runtime.web import make_web_app
from libs.telemetry.timeline import HISTORY_NS
from libs.testing.wait import ManualClock
from libs.testing.workers.telemetry import MS, at
from services.metrics.http.request_routes import requests_router
from services.metrics.requests import MAX_REQUESTS, RequestLog
from tests.unit.metrics.requests_rig import finished

NOW_NS = at(2_000)


class Rig:
    def __init__(self) -> None:
        self.log, self.clock = RequestLog(), ManualClock(NOW_NS)
        app = make_web_app("test", "", not_ready=lambda: None, metrics=CollectorRegistry())
        app.include_router(requests_router(self.log, self.clock))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://metrics")

    def add(self, request_id: str, **fields: Any) -> None:
        event = finished(request_id)
        event.MergeFrom(RequestEvent(**fields))
        self.log.add(event, NOW_NS)

    async def found(self, request_id: str, status: int = 200) -> Any:
        answer = await self.http.get(f"/v1/requests/{request_id}")
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    found = Rig()
    async with found.http:
        yield found


def durations_ms(detail: dict[str, Any]) -> dict[str, tuple[str, float]]:
    return {each["name"]: (each["at"], each["duration_ns"] / MS) for each in detail["stages"]}


async def test_a_request_is_found_by_its_id_with_its_stages_workers_and_targets(rig: Rig) -> None:
    start_ns = at(700)
    rig.add(
        "abcdef-1", gateway_id="gateway-0", tenant="b", service_class="online", finish_reason="stop",
        prefill_worker="p0", decode_worker="d0", second_token_ns=130 * MS, reroutes=1,
        ttft_deadline_unix_ns=start_ns + 50 * MS, tpot_target_us=30_000,
    )  # fmt: skip
    found = await rig.found("abcdef-1")
    assert durations_ms(found) == {
        "queue": ("gateway-0", 5), "prefill": ("p0", 95), "hand_off": ("d0", 30), "decode": ("d0", 170),
    }  # fmt: skip
    assert found["stages"][-1]["start_ns"] + found["stages"][-1]["duration_ns"] == 300 * MS
    assert {**found, "tenant": "b", "service_class": "online", "outcome": "ok", "finish_reason": "stop"} == found
    assert (found["ttft_ns"], found["ttft_target_ns"], found["ttft_missed"]) == (100 * MS, 50 * MS, True)
    assert (found["tpot_ns"], found["tpot_target_ns"], found["tpot_missed"]) == (20 * MS, 30 * MS, False)
    assert (found["reroutes"], found["predicted_ttft_ns"]) == (1, None)


async def test_stages_without_a_known_time_are_omitted(rig: Rig) -> None:
    rig.add("one-worker", prefill_worker="m0", decode_worker="m0", second_token_ns=130 * MS)
    assert list(durations_ms(await rig.found("one-worker"))) == ["queue", "prefill", "decode"]
    rig.add("of-an-older-gateway", prefill_worker="p0", decode_worker="d0")
    assert durations_ms(await rig.found("of-an-older-gateway"))["decode"] == ("d0", 200)
    rig.log.add(RequestEvent(request_id="never-bound", outcome=OUTCOME_REJECTED, error_code="queue_full"), 0)
    refused = await rig.found("never-bound")
    assert (refused["stages"], refused["outcome"], refused["error_code"]) == ([], "rejected", "queue_full")
    rig.log.add(RequestEvent(request_id="no-token", outcome=OUTCOME_FAILED, queue_ns=7 * MS), 0)
    assert list(durations_ms(await rig.found("no-token"))) == ["queue"]


async def test_a_request_is_found_by_the_id_in_its_answer_and_by_a_unique_prefix(rig: Rig) -> None:
    rig.add("0123456789")
    rig.add("a/b c?d%")
    for requested in ("0123456789", "chatcmpl-0123456789", "cmpl-0123456789", "012345", "chatcmpl-012345"):
        assert (await rig.found(requested))["id"] == "0123456789"
    assert (await rig.found("a%2Fb%20c%3Fd%25"))["id"] == "a/b c?d%"


async def test_a_short_prefix_finds_nothing_but_a_short_id_does(rig: Rig) -> None:
    rig.add("0123456789")
    rig.add("42")
    assert (await rig.found("42"))["id"] == "42"
    assert "needs 6 characters" in (await rig.found("01234", 404))["message"]


async def test_an_ambiguous_prefix_names_at_most_five(rig: Rig) -> None:
    for number in range(5):
        rig.add(f"thing-{number}")
    message = (await rig.found("thing-", 400))["message"]
    assert message == "several requests begin with 'thing-': thing-0, thing-1, thing-2, thing-3, thing-4"
    rig.add("thing-5")
    assert (await rig.found("thing-", 400))["message"] == f"{message} and others"
    rig.add("thing-")  # an id goes before a beginning
    assert (await rig.found("thing-"))["id"] == "thing-"


async def test_an_unknown_request_is_a_404_that_states_the_retention(rig: Rig) -> None:
    rig.add("abcdef-gone")
    later_ns = NOW_NS + HISTORY_NS
    rig.log.add(finished("later", end_ms=(later_ns - at(0)) / MS), later_ns)
    error = await rig.found("abcdef-gone", 404)
    assert error["code"] == "request_not_found"
    assert "11 minutes" in error["message"] and f"{MAX_REQUESTS:,} at most" in error["message"]
    assert rig.log.ids_from("abcdef", 9) == []


def test_the_newest_request_with_a_reused_id_is_found_until_it_is_dropped() -> None:
    log = RequestLog()
    log.add(finished("same-id", end_ms=0, tokens=3), at(0))
    log.add(finished("same-id", end_ms=600_000, tokens=5), at(600_000))
    log.add(finished("other", end_ms=700_000), at(700_000))  # with which the first one goes
    event = log.event("same-id")
    assert event is not None and event.output_tokens == 5
    log.add(finished("other", end_ms=1_300_000), at(1_300_000))
    assert log.event("same-id") is None


async def test_the_slowest_requests_are_ordered_by_ttft_within_the_window_and_optionally_by_worker(rig: Rig) -> None:
    for name, ttft_ms, worker in (("fast", 10, "p0"), ("slow", 400, "p0"), ("slower", 500, "p1"), ("none", 0, "p0")):
        event = finished(name, ttft_ms=ttft_ms)
        event.prefill_worker = worker
        rig.log.add(event, NOW_NS)

    async def listed(**query: Any) -> list[str]:
        answer = await rig.http.get("/v1/requests", params=query)
        assert answer.status_code == 200, answer.text
        return [each["id"] for each in answer.json()]

    assert await listed(slowest=2) == ["slower", "slow"]
    assert await listed(slowest=9, worker="p0") == ["slow", "fast"]
    assert await listed(slowest=9, window="500ms") == []
    assert await listed(limit=2) == ["none", "slower"]
    assert await listed() == ["none", "slower", "slow", "fast"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"slowest": 0}, "slowest"),
        ({"slowest": 3, "window": "1h"}, "window"),
        ({"slowest": 3, "limit": 2}, "limit"),
        ({"window": "1m"}, "window"),
    ],
)
async def test_contradictory_queries_are_refused(rig: Rig, query: dict[str, Any], param: str) -> None:
    answer = await rig.http.get("/v1/requests", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
