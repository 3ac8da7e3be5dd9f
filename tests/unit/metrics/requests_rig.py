"""Builders of requests that have ended."""

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_OK,
    RequestEvent,
)
from libs.testing.workers.telemetry import MS, at


def finished(request_id="r1", *, model="sim", outcome=OUTCOME_OK, ttft_ms=100, tokens=11, decode_ms=200, end_ms=1000):
    return RequestEvent(
        request_id=request_id,
        model=model,
        outcome=outcome,
        arrival_unix_ns=at(end_ms - ttft_ms - decode_ms),
        prompt_tokens=50,
        cached_tokens=16,
        output_tokens=tokens,
        queue_ns=5 * MS,
        ttft_ns=ttft_ms * MS,
        decode_ns=decode_ms * MS,
    )
