"""Tests of undeclared query parameters on every route of planner and metrics service."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.unit.keys.doors_rig import TOKEN, Served, serving, there

PAGES_AND_PROBES = {
    ("GET", path)
    for path in (
        "/healthz", "/health", "/readyz", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc",
        "/login", "/runbook/{name}",
    )
} | {("POST", "/login"), ("POST", "/logout"), ("MOUNT", ""), ("MOUNT", "/static-offline-docs")}  # fmt: skip


@pytest.fixture(params=("metrics", "planner"))
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with serving(request.param) as found:
        yield found


def client(served: Served) -> httpx.AsyncClient:
    key = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://127.0.0.1", headers=key)


async def test_an_unknown_parameter_is_refused_by_name_on_every_rest_route(served: Served) -> None:
    strict = served.routes - PAGES_AND_PROBES
    assert len(strict) > 10
    async with client(served) as http:
        for method, path in strict:
            answer = await http.request(method, f"{there(path)}?reqeust=x", json=None if method == "GET" else {})
            assert answer.status_code == 400, (method, path)
            error = answer.json()["error"]
            assert error["param"] == "reqeust", (method, path)
            assert f"{method} {there(path)} has no query parameter 'reqeust': it takes " in error["message"]


async def test_pages_probes_and_scrapes_accept_unknown_parameters(served: Served) -> None:
    async with client(served) as http:
        for method, path in served.routes & PAGES_AND_PROBES:
            if method == "GET":
                answer = await http.get(f"{there(path)}?name[]=up")
                assert answer.status_code in (200, 303, 404 if "runbook" in path else 503), path


async def test_the_declared_parameters_of_a_route_are_listed_and_accepted() -> None:
    async with serving("metrics") as served, client(served) as http:
        refused = await http.get("/v1/steps?worker=a&windw=1s")
        assert refused.json()["error"]["message"] == (
            "GET /v1/steps has no query parameter 'windw': it takes worker, window, end_unix_ms, limit"
        )
        assert (await http.head("/v1/events?limt=1")).status_code == 400
        # These the page and the commands send.
        for path in (
            "/v1/events?limit=1", "/v1/alerts?limit=0", "/v1/decisions?limit=1&keeps=true", "/v1/occupancy?window=2s",
            "/v1/requests/summary?window=1m&end_unix_ms=1", "/v1/occupancy/efficiency?scope=cluster&end_unix_ms=1",
            "/v1/occupancy/windows?window=100ms&span=2s&end_unix_ms=1", "/v1/requests?slowest=3&window=10m",
            "/v1/status/history?window=1s&span=15m&end_unix_ms=1", "/v1/requests?worker=a&limit=5",
        ):  # fmt: skip
            answer = await http.get(path)
            assert answer.status_code == 200, (path, answer.text)
