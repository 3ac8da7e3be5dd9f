"""Tests of every route of planner and metrics service against every role; a route without a case fails."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import REQUESTS
from libs.keys.book import Role
from tests.unit.keys.doors_rig import ROLES, TOKEN, Served, serving, there
from tests.unit.routes import head_differs, request_head

MODEL: Final[dict[str, Any]] = {"source": "builtin:sim"}
ROLE: Final[dict[str, Any]] = {"role": "prefill"}
HISTORY: Final[dict[str, Any]] = {
    "model": "m", "start_unix_s": 0, "step_s": 60, "requests_per_s": [1], "prefill_tokens_per_s": [1],
    "decode_tokens_per_s": [1],
}  # fmt: skip

Cases = dict[tuple[str, str], tuple[Role | None, dict[str, Any] | None]]
"""The minimum role by method and path, None for open routes, and a body if one is needed."""

SHARED: Final[Cases] = {
    ("GET", "/healthz"): (None, None),
    ("GET", "/health"): (None, None),
    ("GET", "/readyz"): (None, None),
    ("GET", "/openapi.json"): (None, None),
    ("GET", "/docs"): (None, None),
    ("GET", "/docs/oauth2-redirect"): (None, None),
    ("GET", "/redoc"): (None, None),
    ("MOUNT", "/static-offline-docs"): (None, None),
    ("GET", "/metrics"): ("operator", None),
}
PLANNER: Final[Cases] = SHARED | {
    ("GET", "/v1/workers"): ("operator", None),
    ("GET", "/v1/planner"): ("operator", None),
    ("GET", "/v1/decisions"): ("operator", None),
    ("GET", "/v1/decisions/{decision_id}"): ("operator", None),
    ("GET", "/v1/regret"): ("operator", None),
    ("GET", "/v1/mode"): ("operator", None),
    ("PUT", "/v1/mode"): ("operator", {"mode": "recommend"}),
    ("GET", "/v1/limits"): ("operator", None),
    ("PUT", "/v1/limits"): ("operator", {}),
    ("PUT", "/v1/workers/{worker_id}/role"): ("operator", ROLE),
    ("GET", "/v1/models"): ("operator", None),
    ("PUT", "/v1/models/{name:path}"): ("admin", MODEL),
    ("PUT", "/v1/models/{name:path}/reservations"): ("admin", {"gpus": 0}),
    ("DELETE", "/v1/models/{name:path}"): ("admin", None),
}
METRICS: Final[Cases] = SHARED | {
    ("GET", "/login"): (None, None),
    ("POST", "/login"): ("operator", None),
    ("POST", "/logout"): (None, None),
    ("MOUNT", ""): ("operator", None),
    ("GET", "/runbook/{name}"): ("operator", None),
    ("GET", "/v1/occupancy"): ("operator", None),
    ("GET", "/v1/occupancy/efficiency"): ("operator", None),
    ("GET", "/v1/occupancy/history"): ("operator", None),
    ("GET", "/v1/occupancy/windows"): ("operator", None),
    ("GET", "/v1/occupancy/stream"): ("operator", None),
    ("GET", "/v1/requests"): ("operator", None),
    ("GET", "/v1/requests/summary"): ("operator", None),
    ("GET", "/v1/requests/{request_id:path}"): ("operator", None),
    ("GET", "/v1/steps"): ("operator", None),
    ("GET", "/v1/links"): ("operator", None),
    ("GET", "/v1/events"): ("operator", None),
    ("GET", "/v1/advice"): ("operator", None),
    ("GET", "/v1/status"): ("operator", None),
    ("GET", "/v1/status/history"): ("operator", None),
    ("GET", "/v1/decisions"): ("operator", None),
    ("GET", "/v1/alerts"): ("operator", None),
    ("POST", "/v1/alerts/silences"): ("operator", {"alert_name": "a", "for_s": 60}),
    ("POST", "/v1/alerts/acks"): ("operator", {"alert_id": "a"}),
    ("DELETE", "/v1/alerts/silences/{silence_id}"): ("operator", None),
    ("GET", "/v1/audit"): ("operator", None),
    ("GET", "/v1/demand"): ("operator", None),
    ("POST", "/v1/demand"): ("admin", HISTORY),
    ("GET", "/v1/forecast"): ("operator", None),
    ("GET", "/v1/capacity"): ("operator", None),
    ("GET", "/v1/capacity/input"): ("operator", None),
    ("GET", "/v1/capacity/plans"): ("operator", None),
    ("GET", "/v1/models"): ("operator", None),
    ("PUT", "/v1/workers/{worker_id}/role"): ("operator", ROLE),
}
CASES: Final[dict[str, Cases]] = {"planner": PLANNER, "metrics": METRICS}
OWN_DOOR: Final = (("POST", "/login"), ("PUT", "/v1/workers/{worker_id}/role"))
"""Exempt routes of the metrics service: a login has its key in the form, and the planner checks roles."""
STREAM: Final = "/v1/occupancy/stream"
ENDLESS: Final = (("GET", "/v1/occupancy/stream"), ("GET", "/v1/capacity"))
"""Routes on which an admitted caller would wait."""


@pytest.fixture(params=sorted(CASES))
async def service(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Served]]:
    async with serving(request.param) as served:
        yield request.param, served


async def test_every_route_has_a_case(service: tuple[str, Served]) -> None:
    name, served = service
    assert served.routes == set(CASES[name])


async def test_each_route_admits_its_role_and_those_above_it(service: tuple[str, Served]) -> None:
    name, served = service
    for case, (least, body) in CASES[name].items():
        nobody = await served.ask(case, body, None)
        if least is None:
            assert nobody.status_code not in (401, 403), case
            continue
        assert nobody.status_code == 401, case
        assert (await served.ask(case, body, "sk-fulcrum-wrong")).status_code == 401, case
        if case in OWN_DOOR and name == "metrics":
            continue
        for role in ROLES:
            if ROLES.index(role) >= ROLES.index(least):
                if case not in ENDLESS:
                    assert (await served.ask(case, body, served.secrets[role])).status_code not in (401, 403), case
                continue
            refused = await served.ask(case, body, served.secrets[role])
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), case


async def test_a_tenant_that_is_not_the_keys_is_refused_on_every_route(service: tuple[str, Served]) -> None:
    name, served = service
    for case, (least, body) in CASES[name].items():
        if least is None or case in OWN_DOOR:
            continue
        refused = await served.ask(case, body, served.secrets["operator"], **{"x-fulcrum-tenant": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), case
        if least == "operator" and case not in ENDLESS:
            own = await served.ask(case, body, served.secrets["operator"], **{"x-fulcrum-tenant": "a"})
            assert own.status_code != 403, case


async def test_an_operator_finds_another_tenants_request_and_a_user_not_even_its_own() -> None:
    case = ("GET", "/v1/requests/{request_id:path}")
    async with serving("metrics") as served:
        for tenant, request_id in (("b", "thing"), ("a", "things-of-a")):
            ended = RequestEvent(request_id=request_id, tenant=tenant, arrival_unix_ns=time.time_ns())
            served.bus.publish(REQUESTS, ended)
        async with asyncio.timeout(10):
            while (found := await served.ask(case, None, served.secrets["operator"])).status_code == 404:
                await asyncio.sleep(0)
        assert (found.status_code, found.json()["tenant"]) == (200, "b")  # the operator's key is of tenant a
        refused = await served.ask(case, None, served.secrets["user"])
        assert (refused.status_code, "thing" in refused.text) == (403, False)


async def test_head_is_answered_like_get_on_every_route(service: tuple[str, Served]) -> None:
    name, served = service
    gets = {there(path) for method, path in CASES[name] if method in ("GET", "MOUNT")}
    posts = {there(path) for method, path in CASES[name] if method not in ("GET", "MOUNT")}
    for path in {*gets, *posts, "/nowhere", "/docs/", "/static-offline-docs/favicon.png", "/style.css"}:
        key = {"authorization": f"Bearer {served.secrets['admin']}"}
        for headers in ({}, {"accept": "text/html"}, key):
            if path == "/v1/capacity" and headers is key:
                continue  # its answer takes as long as the lab does
            assert await head_differs(served.app, path, headers) == "", (path, headers)


async def test_head_of_an_event_stream_takes_no_reader_slot() -> None:
    async with serving("metrics") as served:
        for _ in range(100):  # more than there are places
            head = await request_head(served.app, "HEAD", STREAM, {"authorization": f"Bearer {TOKEN}"})
            assert (head.status, head.body) == (200, b"")
            assert head.headers[b"content-type"].startswith(b"text/event-stream")
        assert (await request_head(served.app, "GET", STREAM, {"authorization": f"Bearer {TOKEN}"})).status == 200


async def test_a_session_of_the_page_reads_and_changes_nothing() -> None:
    async with serving("metrics") as served:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.post("/login", data={"key": served.secrets["admin"]})).status_code == 303
            assert (await http.get("/v1/alerts")).status_code == 200
            for (method, path), (_, body) in METRICS.items():
                if method in ("POST", "PUT", "DELETE") and path not in ("/login", "/logout"):
                    there = path.replace("{silence_id}", "x").replace("{worker_id}", "x")
                    assert (await http.request(method, there, json=body)).status_code == 401, path
