"""Tests of refused requests: counted by status and code whichever part refuses them, bounded and published."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from libs.contracts.errors import HeadersTooLarge
from libs.testing.wait import ManualClock
from libs.testing.workers.hosts import RecordingBus
from services.gateway.refusals import MAX_REASONS, RefusalCounts, RefusalMiddleware, error_code
from services.gateway.request.recorder import QueueReporter
from tests.unit.gateway.test_isolation import World, world  # noqa: F401 - a fixture

QUESTION = {"model": "open", "prompt": "a"}


def counted(counts: RefusalCounts) -> dict[tuple[int, str], int]:
    return {(row.status, row.code): row.count for row in counts.rows()}


async def test_refusals_by_key_gate_parser_and_catalogue_are_counted_and_published(world: World) -> None:  # noqa: F811
    counts, bus = RefusalCounts(), RecordingBus()
    transport = httpx.ASGITransport(RefusalMiddleware(world.gate, counts))
    own = {"authorization": world.b.headers["authorization"]}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=own) as http:

        async def post(path: str = "/v1/completions", **requested: Any) -> int:
            return (await http.post(path, **requested)).status_code

        assert await post(json=QUESTION, headers={"authorization": "Bearer wrong"}) == 401
        assert await post(json=QUESTION, headers={"x-fulcrum-tenant": "a"}) == 403
        assert [await post(json={**QUESTION, "model": "absent"}) for _ in range(2)] == [404, 404]
        assert await post(content=b"{", headers={"content-type": "application/json"}) == 400
        assert await post(content=b" " * 10**6, headers={"content-type": "application/json"}) == 413
        assert await post("/v1/absent") == 404
        assert (await http.get("/v1/responses/resp_absent")).status_code == 404, "a poll creates no work"
        assert (await http.post("/detokenize", json={"model": "open", "tokens": [65]})).status_code == 200
    expected = {
        (401, "invalid_api_key"): 1,
        (403, "permission_denied"): 1,
        (404, "model_not_found"): 2,
        (400, "invalid_request"): 1,
        (413, "body_too_large"): 1,
        (404, "not_found"): 1,
    }
    assert counted(counts) == expected
    dispatcher = SimpleNamespace(live=0, queues=list, awaited=dict)
    QueueReporter(bus, dispatcher, counts, "gw", ManualClock(1)).report([])
    (message,) = bus.published
    assert message.posts == 8
    assert {(row.status, row.code): row.count for row in message.refused} == expected


def test_requests_that_reach_no_route_are_counted_too() -> None:
    counts = RefusalCounts()
    counts.turned_away(HeadersTooLarge("too large"))
    assert (counts.posts, counted(counts)) == (1, {(431, "headers_too_large"): 1})


def test_reasons_are_bounded_and_the_rest_share_one_row() -> None:
    counts = RefusalCounts()
    for number in range(MAX_REASONS + 5):
        counts.refuse(400, f"code_{number}")
    counts.refuse(400, "code_0")
    found = counted(counts)
    assert len(found) == MAX_REASONS + 1
    assert (found[0, "other"], found[400, "code_0"]) == (5, 2)


@pytest.mark.parametrize(
    ("status", "code"), [(500, "internal_error"), (503, "sequence_failed"), (500, "answer_failed")]
)
def test_an_accepted_request_that_failed_does_not_count_as_refused(status: int, code: str) -> None:
    counts = RefusalCounts()
    counts.refuse(status, code)
    assert counted(counts) == {}


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"error": "text"}', b'{"error": {}}', b'{"error": {"code": null}}', b"[]"]
)
def test_an_error_without_a_code_is_counted_as_unknown(body: bytes) -> None:
    assert error_code(body) == "unknown"
