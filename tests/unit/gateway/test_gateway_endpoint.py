"""What a hot route counts when it fails in a way that nobody foresaw."""

from typing import Any

import pytest

from libs.runtime.tasks import TaskOwner
from libs.testing.wait import ManualClock
from services.gateway.dispatch.demand import DemandTeller
from services.gateway.http.endpoint import CompletionEndpoint, CompletionReader
from services.gateway.http.formats import CompletionFormat
from services.gateway.http.stalls import Stalls
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompt.parse import Asked


async def test_a_fault_of_the_gateways_own_is_counted_as_500() -> None:
    def broken(_body: bytes) -> Asked:
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
        demand=DemandTeller(unused, "gateway-1", ManualClock()),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="a bug"):
        await endpoint({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive, send)
    counted = {
        sample.labels["status"]: sample.value
        for metric in metrics.responses.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert counted == {"500": 1.0}
