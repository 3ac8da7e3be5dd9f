"""Tests of requests that the metrics service forwards to the planner for its page."""

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from libs.runtime.web import make_web_app
from services.metrics.http.planner_routes import PlannerRoutes

LOCAL = "http://127.0.0.1:8001"


class Planner:
    """A planner with scripted answers that records its requests."""

    def __init__(self, url: str = LOCAL, *, plaintext: bool = False) -> None:
        self.requests: list[httpx.Request] = []
        self.away = False
        self.status = 200
        app = make_web_app("test", "", not_ready=lambda: None, metrics=CollectorRegistry())
        app.include_router(PlannerRoutes(url, self._client, token="t", plaintext=plaintext).router())
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m")

    def _client(self, **_: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.away:
            raise httpx.ConnectError("nobody listens")
        return httpx.Response(self.status, json={"path": request.url.raw_path.decode()})

    async def move(self, worker: str = "gpu-1", token: str = "secret", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        wanted = {"role": "prefill", **body}
        return await self.http.put(f"/v1/workers/{worker}/role", json=wanted, headers=headers)


async def test_models_are_returned_as_the_planner_returns_them() -> None:
    planner = Planner()
    assert (await planner.http.get("/v1/models")).json() == {"path": "/v1/models"}
    planner.status = 404
    assert (await planner.http.get("/v1/models")).status_code == 404


async def test_a_role_change_goes_to_the_planner_with_the_callers_token_and_no_other_path_does() -> None:
    planner = Planner()
    assert (await planner.move("gpu-1%3Fx", reason="why")).json()["path"] == "/v1/workers/gpu-1%3Fx/role"
    assert (await planner.move("..%2F..%2Fmode")).status_code == 404
    (request,) = planner.requests
    assert (request.method, request.headers["authorization"]) == ("PUT", "Bearer secret")
    assert b'"reason":"why"' in request.content


async def test_without_a_token_no_request_is_forwarded() -> None:
    planner = Planner()
    assert (await planner.move(token="")).status_code == 401
    assert planner.requests == []


@pytest.mark.parametrize(
    ("url", "plaintext", "status"),
    [
        ("http://planner:8001", False, 401), ("http://planner:8001", True, 200), ("https://planner:8001", False, 200),
        ("http://[::1]:8001", False, 200), ("http://localhost:8001", False, 200),
    ],
)  # fmt: skip
async def test_a_token_is_sent_to_another_host_in_plaintext_only_if_that_is_allowed(
    url: str, plaintext: bool, status: int
) -> None:
    planner = Planner(url, plaintext=plaintext)
    answer = await planner.move()
    assert answer.status_code == status
    assert bool(planner.requests) == (status == 200)
    if status == 401:
        assert "FULCRUM_ALLOW_PLAINTEXT_TOKEN" in answer.json()["error"]["message"]


async def test_a_missing_or_unreachable_planner_is_reported_with_a_message() -> None:
    answer = await Planner("").http.get("/v1/models")
    assert answer.status_code == 503
    assert "FULCRUM_METRICS_PLANNER_URL" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    planner = Planner()
    planner.away = True
    answer = await planner.http.get("/v1/models")
    assert answer.json()["error"]["code"] == "planner_unavailable" and "nobody listens" in answer.text
    assert int(answer.headers["retry-after"]) >= 1


async def test_an_invalid_body_is_refused_without_a_call_to_the_planner() -> None:
    planner = Planner()
    assert (await planner.move(role="x" * 30)).status_code == 400
    assert planner.requests == []


async def test_models_are_read_with_the_suites_token_if_it_may_be_sent() -> None:
    near, far = Planner(), Planner("http://planner:8001")
    await near.http.get("/v1/models")
    await far.http.get("/v1/models")
    assert near.requests[0].headers["authorization"] == "Bearer t"
    assert "authorization" not in far.requests[0].headers
