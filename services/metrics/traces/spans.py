"""A finished request as spans: queue, prefill, KV hand-off, decode. Pure; ids follow from what they name, so that an
event that is delivered twice makes the same spans.

Attributes are OpenTelemetry's for generative AI (`gen_ai.*`) where it has one. Times are those of the process that
took them: a hand-off's are the decode worker's, the others the gateway's.
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
    """Where a request's spans belong. Ids are 16 and 8 bytes; without `parent_id` it is the trace's first span."""

    trace_id: bytes
    parent_id: bytes = b""
    sampled: bool | None = None
    """As the client says; None: it says nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span in OpenTelemetry's words; times in Unix ns."""

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
    """The client's W3C trace context; without one a trace of the request's own."""
    found = _TRACEPARENT.fullmatch(event.traceparent)
    if found is None:
        return TraceContext(_digest(16, event.gateway_id, event.request_id))
    trace_id, parent_id, flags = (bytes.fromhex(part) for part in found.groups())
    return TraceContext(trace_id, parent_id, sampled=bool(flags[0] & _SAMPLED))


def spans(event: RequestEvent, hand_offs: Sequence[HandOff]) -> list[Span]:
    """The request's span, then what it consists of."""
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
    """The span of one KV transfer of the request: the same whether it is sent with the others or after them."""
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
    """A span under the request's own; `process` is a service and which one of it."""
    service, instance = process
    own_id = _own_id(event)
    span_id = _digest(8, own_id.hex(), name, str(start))
    return Span(name, service, instance, trace_context(event).trace_id, span_id, own_id, start, end, attributes or {})


def _moments(event: RequestEvent) -> tuple[int, int, int, int]:
    """Arrival, bound, first token, last token; in Unix ns."""
    bound, first = event.arrival_unix_ns + event.queue_ns, event.arrival_unix_ns + event.ttft_ns
    return event.arrival_unix_ns, bound, first, first + event.decode_ns if event.ttft_ns else bound


def _own_id(event: RequestEvent) -> bytes:
    """Id of the request's span; choices share a request id."""
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
