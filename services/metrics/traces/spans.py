"""Spans of a finished request: queue, prefill, KV hand-off and decode. Pure.

Ids are digests of what they name, so an event that is delivered twice makes the same spans. Attributes follow
OpenTelemetry's conventions for generative AI (`gen_ai.*`) where there is one. Times come from the clock of the
process that took them: the decode worker's for a hand-off, the gateway's for the others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, KvTransfer, RequestEvent

GATEWAY, WORKER = "fulcrum-gateway", "fulcrum-worker"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1

Attribute = str | int | bool


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request's spans in a trace. Ids are 16 and 8 bytes; without `parent_id` the span is the first."""

    trace_id: bytes
    parent_id: bytes = b""
    sampled: bool | None = None
    """Whether the client samples the trace; None if it does not say."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span in OpenTelemetry's terms; times in Unix ns."""

    name: str
    service: str
    instance: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class HandOff:
    """A KV transfer and the worker that received it."""

    worker_id: str
    transfer: KvTransfer


def trace_context(event: RequestEvent) -> TraceContext:
    """Return the client's W3C trace context, or one of the request's own."""
    found = _TRACEPARENT.fullmatch(event.traceparent)
    if found is None:
        return TraceContext(_digest(16, event.gateway_id, event.request_id))
    trace_id, parent_id, flags = (bytes.fromhex(part) for part in found.groups())
    return TraceContext(trace_id, parent_id, sampled=bool(flags[0] & _SAMPLED))


def spans(event: RequestEvent, hand_offs: Sequence[HandOff]) -> list[Span]:
    """Return the request's span followed by its parts."""
    context = trace_context(event)
    arrival, bound, first, end = _moments(event)
    span = partial(_part, event)
    found = [
        Span(
            name=f"generate {event.model}",
            service=GATEWAY,
            instance=event.gateway_id,
            trace_id=context.trace_id,
            span_id=_own_id(event),
            parent_id=context.parent_id,
            start_unix_ns=arrival,
            end_unix_ns=end,
            attributes=_request_attributes(event),
            error=(event.error_code or "failed") if event.outcome == OUTCOME_FAILED else "",
        )
    ]
    if event.queue_ns:
        found.append(span("queue", (GATEWAY, event.gateway_id), arrival, bound))
    if event.ttft_ns:
        prefill: dict[str, Attribute] = {
            "fulcrum.prompt_tokens": event.prompt_tokens, "fulcrum.cached_tokens": event.cached_tokens,
        }  # fmt: skip
        found.append(span("prefill", (WORKER, event.prefill_worker), bound, first, attributes=prefill))
    found += [hand_off_span(event, hand_off) for hand_off in hand_offs]
    if event.decode_ns:
        tokens: dict[str, Attribute] = {"fulcrum.output_tokens": event.output_tokens}
        worker = event.decode_worker or event.prefill_worker
        found.append(span("decode", (WORKER, worker), first, end, attributes=tokens))
    return found


def hand_off_span(event: RequestEvent, hand_off: HandOff) -> Span:
    """Build the span of one KV transfer, the same whether it is sent with the others or after them."""
    start, end = hand_off.transfer.start_unix_ns, hand_off.transfer.end_unix_ns
    attributes = _transfer_attributes(hand_off.transfer)
    return _part(event, "kv hand-off", (WORKER, hand_off.worker_id), start, end, attributes=attributes)


def _part(
    event: RequestEvent,
    name: str,
    process: tuple[str, str],
    start: int,
    end: int,
    *,
    attributes: Mapping[str, Attribute] | None = None,
) -> Span:
    """Build a span under the request's own; `process` is a service and the id of its instance."""
    service, instance = process
    own_id = _own_id(event)
    span_id = _digest(8, own_id.hex(), name, str(start))
    return Span(name, service, instance, trace_context(event).trace_id, span_id, own_id, start, end, attributes or {})


def _moments(event: RequestEvent) -> tuple[int, int, int, int]:
    """Return arrival, bound, first token and last token in Unix ns."""
    bound, first = event.arrival_unix_ns + event.queue_ns, event.arrival_unix_ns + event.ttft_ns
    return event.arrival_unix_ns, bound, first, first + event.decode_ns if event.ttft_ns else bound


def _own_id(event: RequestEvent) -> bytes:
    """Return the id of the request's span; choices of a request share the request id but not this one."""
    arrival, _, _, end = _moments(event)
    return _digest(8, event.gateway_id, event.request_id, str(arrival), str(end), str(event.output_tokens))


def _request_attributes(event: RequestEvent) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.request.model": event.model,
        "gen_ai.response.id": event.request_id,
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.output_tokens": event.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        "error.type": event.error_code,
        "fulcrum.finish_reason": event.finish_reason,
        "fulcrum.tenant": event.tenant,
        "fulcrum.class": event.service_class,
        "fulcrum.predicted_ttft_us": event.predicted_ttft_ns // 1000,
        "fulcrum.reroutes": event.reroutes,
        "fulcrum.moves": event.moves,
        "fulcrum.recomputes": event.recomputes,
    }
    return {name: value for name, value in attributes.items() if value != ""}


def _transfer_attributes(transfer: KvTransfer) -> dict[str, Attribute]:
    return {
        "fulcrum.from_worker": transfer.from_worker_id,
        "fulcrum.kv_blocks": transfer.blocks,
        "fulcrum.kv_bytes": transfer.bytes,
        "fulcrum.shared_memory": transfer.shared_memory,
    }


def _digest(size: int, *parts: str) -> bytes:
    return blake2b("\0".join(parts).encode(), digest_size=size).digest()
