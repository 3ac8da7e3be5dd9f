"""Tests of a hot route before an answer begins: early refusals and counters."""

from types import SimpleNamespace
from typing import Any

import pytest

from libs.dispatch.ports import OneForAll
from libs.dispatch.waiting import WaitingQueue
from libs.runtime.tasks import TaskOwner
from libs.testing.wait import ManualClock
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.endpoint import CompletionEndpoint, CompletionReader
from services.gateway.request.exchange import Stalls
from services.gateway.request.formats import CompletionFormat
from services.gateway.request.parse import ParsedRequest, parse_completion
from services.gateway.request.recorder import DemandPublisher


class Known(OneForAll):
    """Separated tenants."""

    are_distinct = True


def counted(metrics: GatewayMetrics) -> dict[str, float]:
    """Return the answers by status."""
    return {
        sample.labels["status"]: sample.value
        for metric in metrics.responses.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_an_internal_error_is_counted_as_500() -> None:
    def broken(_body: bytes) -> ParsedRequest:
        raise RuntimeError("a bug")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(_message: Any) -> None:
        raise AssertionError("nothing is sent: the app around it answers")

    metrics = GatewayMetrics()
    unused: Any = None
    endpoint = CompletionEndpoint(
        "/v1/completions", reader=CompletionReader(broken, CompletionFormat), intake=unused, dispatcher=unused,
        metrics=metrics, clock=ManualClock(), tasks=TaskOwner(), stalls=Stalls(1, 1024), max_body_bytes=1024,
        demand=DemandPublisher(unused, "gateway-1", ManualClock()),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="a bug"):
        await endpoint({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive, send)
    assert counted(metrics) == {"500": 1.0}


async def test_a_tenant_without_room_is_refused_before_any_of_its_choices_is_created() -> None:
    """A refusal must cost less than a request, or refused clients take the gateway's time from others."""
    queue, sent, metrics, unused = WaitingQueue(128, Known()), [], GatewayMetrics(), None

    def check_room(count: int, _key: bytes, tenant: str | None) -> None:
        assert tenant is not None
        queue.check_tenant(tenant, count, 0)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"model": "m", "prompt": "a", "n": 128}', "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    model = SimpleNamespace(routed="m", adapter_name="")
    endpoint = CompletionEndpoint(
        "/v1/completions", reader=CompletionReader(parse_completion, CompletionFormat),
        intake=SimpleNamespace(model=lambda *_: model),  # type: ignore[arg-type]  # it makes no choices
        dispatcher=SimpleNamespace(check_room=check_room, wants_keys=False),  # type: ignore[arg-type]
        metrics=metrics, clock=ManualClock(), tasks=TaskOwner(), stalls=Stalls(1, 1024), max_body_bytes=1024,
        demand=DemandPublisher(unused, "gateway-1", ManualClock()),  # type: ignore[arg-type]
    )  # fmt: skip
    await endpoint({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive, send)
    assert counted(metrics) == {"429": 1.0}
    assert b"others need room too" in sent[-1]["body"]
