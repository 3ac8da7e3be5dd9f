"""Spans of finished requests, matched with their KV transfers and exported to an OpenTelemetry collector.

Ids are digests of what they name, so an event that is delivered twice makes the same spans. Attributes follow
OpenTelemetry's conventions for generative AI (`gen_ai.*`) where there is one. Times come from the clock of the process
that measured them: the decode worker's for a hand-off, the gateway's for the others.
"""

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Final

import httpx
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.bus.port import Record
from libs.contracts import metric_names as names
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, KvTransfer, RequestEvent, StepBatch
from libs.runtime.clock import Clock
from libs.runtime.web import MakeClient

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
    """True if the client samples the trace; None if it leaves the choice open."""


@dataclass(frozen=True, slots=True)
class RequestSpan:
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


def spans(event: RequestEvent, hand_offs: Sequence[HandOff]) -> list[RequestSpan]:
    """Return the request's span followed by its parts."""
    context = trace_context(event)
    arrival, bound, first, end = _moments(event)
    span = partial(_part, event)
    found = [
        RequestSpan(
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


def hand_off_span(event: RequestEvent, hand_off: HandOff) -> RequestSpan:
    """Build the span of one KV transfer, which is the same whether sent with the other spans or later."""
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
) -> RequestSpan:
    """Build a span under the request's own; `process` is a service and the id of its instance."""
    service, instance = process
    own_id = _own_id(event)
    span_id = _digest(8, own_id.hex(), name, str(start))
    trace_id = trace_context(event).trace_id
    return RequestSpan(name, service, instance, trace_id, span_id, own_id, start, end, attributes or {})


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


SETTLE_NS: Final = 1_000_000_000
"""The time for which a finished request waits for its transfers, which workers report ten times a second. A later
transfer is sent when it arrives, as a span of the same trace.
"""
MAX_REQUESTS: Final = 20_000
"""The maximum number of finished requests that wait; beyond it the oldest is dropped and counted."""
MAX_TRANSFERS: Final = 50_000
"""The bound on transfers whose request has not ended; beyond it the oldest is dropped. It may belong to an unsampled
request.
"""
MAX_LACKING: Final = 5_000
"""The bound on requests sent without all their transfers; beyond it those of the oldest are no longer awaited."""
MAX_HAND_OFFS: Final = 64
"""The maximum number of transfers of one request, whose choices share its id; the rest get no span."""
_SHARES: Final = 1 << 64


class TraceBuffer:
    """The buffer of finished requests until their spans are taken.

    `share`, 0..1, is the kept part of the traces that start here. A request with a trace context is kept if its client
    samples it.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests: deque[tuple[int, RequestEvent]] = deque()
        self._transfers: OrderedDict[str, list[HandOff]] = OrderedDict()
        self._lacking: OrderedDict[str, list[RequestEvent]] = OrderedDict()
        self._late: deque[RequestSpan] = deque(maxlen=MAX_TRANSFERS)
        self.dropped_requests = 0

    def enter(self, record: Record, now_ns: int) -> None:
        """Record a worker's transfers or a finished request; other records are ignored."""
        value = record.value
        if isinstance(value, StepBatch):
            for transfer in value.kv_transfers:
                self._transfer(value.worker_id, transfer)
        elif isinstance(value, RequestEvent):
            self._request(value, now_ns)

    def _transfer(self, worker_id: str, transfer: KvTransfer) -> None:
        if lacking := self._lacking.get(transfer.request_id):
            event = next((one for one in lacking if one.decode_worker == worker_id), lacking[0])
            self._late.append(hand_off_span(event, HandOff(worker_id, transfer)))
            lacking.remove(event)
            if not lacking:
                del self._lacking[transfer.request_id]
            return
        held = self._transfers.setdefault(transfer.request_id, [])
        if len(held) < MAX_HAND_OFFS:
            held.append(HandOff(worker_id, transfer))
        if len(self._transfers) > MAX_TRANSFERS:
            self._transfers.popitem(last=False)

    def _request(self, event: RequestEvent, now_ns: int) -> None:
        context = trace_context(event)
        kept = context.sampled
        if kept is None:
            kept = int.from_bytes(context.trace_id[8:]) < self._share * _SHARES
        if not kept:
            self._transfers.pop(event.request_id, None)
            return
        self._requests.append((now_ns + SETTLE_NS, event))
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popleft()
            self.dropped_requests += 1

    def take(self, now_ns: int, most: int) -> list[RequestSpan]:
        """Return late transfers' spans, and those of at most `most` requests that have waited long enough, oldest
        first.
        """
        found = [self._late.popleft() for _ in range(min(most, len(self._late)))]
        while most and self._requests and self._requests[0][0] <= now_ns:
            _, event = self._requests.popleft()
            hand_offs = self._hand_offs(event)
            found += spans(event, hand_offs)
            self._lack(event, _transfers_of(event) - len(hand_offs))
            most -= 1
        return found

    def _lack(self, event: RequestEvent, transfers: int) -> None:
        """Remember a request once for each transfer that is still to come."""
        if transfers > 0:
            self._lacking.setdefault(event.request_id, []).extend([event] * min(transfers, MAX_HAND_OFFS))
        if len(self._lacking) > MAX_LACKING:
            self._lacking.popitem(last=False)

    def _hand_offs(self, event: RequestEvent) -> list[HandOff]:
        """Return the hand-offs of one choice, but not those of other choices, which share the request's id."""
        come = sorted(self._transfers.pop(event.request_id, []), key=lambda one: one.transfer.start_unix_ns)
        own = [one for one in come if one.worker_id == event.decode_worker] or come
        if event.moves or event.reroutes:
            return come
        if len(come) > 1:
            self._transfers[event.request_id] = [one for one in come if one is not own[0]]
        return own[:1]


def _transfers_of(event: RequestEvent) -> int:
    """Return the minimum number of transfers for the request."""
    return event.moves + (event.decode_worker not in {"", event.prefill_worker})


log = structlog.get_logger()

EVERY_S: Final = 0.5
MAX_REQUESTS_A_POST: Final = 500
TIMEOUT_S: Final = 5.0
TRIES: Final = 3
RETRY_S: Final = 1.0
RETRIED: Final = frozenset({429, 502, 503, 504})
"""The statuses after which OTLP's specification requires a retry."""


class TraceExporter(Collector):
    """The exporter of the buffer's spans. Undeliverable spans are dropped and counted, with one log line per outage."""

    def __init__(self, book: TraceBuffer, url: str, clock: Clock, make_client: MakeClient = httpx.AsyncClient) -> None:
        self.book = book
        self._url = url
        self._clock = clock
        self._make_client = make_client
        self._failing = False
        self._sent = self._lost = 0

    async def run(self) -> None:
        async with self._make_client(timeout=TIMEOUT_S, trust_env=False) as client:
            while True:
                spans = self.book.take(self._clock.now_ns(), MAX_REQUESTS_A_POST)
                if spans:
                    await self._post(client, spans)
                else:
                    await asyncio.sleep(EVERY_S)

    async def _post(self, client: httpx.AsyncClient, spans: list[RequestSpan]) -> None:
        body = export_request(spans).SerializeToString()
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(RETRY_S)
            try:
                answer = await client.post(self._url, content=body, headers={"content-type": "application/x-protobuf"})
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = repr(error)
                continue
            if answer.is_success:
                self._sent += len(spans)
                self._failing = False
                return
            problem = f"HTTP {answer.status_code}"
            if answer.status_code not in RETRIED:
                break
        self._lost += len(spans)
        if not self._failing:
            log.warning("traces cannot be delivered", url=self._url, problem=problem)
        self._failing = True

    def collect(self) -> Iterable[CounterMetricFamily]:
        spans = CounterMetricFamily(names.TRACE_SPANS_TOTAL, "Spans for the trace collector.", labels=("result",))
        spans.add_metric(("sent",), self._sent)
        spans.add_metric(("lost",), self._lost)
        yield spans
        yield CounterMetricFamily(
            names.TRACE_DROPPED_REQUESTS_TOTAL, "Requests left out of traces.", self.book.dropped_requests
        )


def export_request(spans: list[RequestSpan]) -> ExportTraceServiceRequest:
    """Build the message for spans, grouped by the process that each describes. Pure."""

    def process(span: RequestSpan) -> tuple[str, str]:
        return span.service, span.instance

    groups = groupby(sorted(spans, key=process), key=process)
    return ExportTraceServiceRequest(
        resource_spans=[
            otlp.ResourceSpans(
                resource=Resource(
                    attributes=_key_values({"service.name": service, "service.instance.id": instance}.items())
                ),
                scope_spans=[
                    otlp.ScopeSpans(
                        scope=InstrumentationScope(name="fulcrum"), spans=[_otlp_span(span) for span in of_process]
                    )
                ],
            )
            for (service, instance), of_process in groups
        ]
    )


def _otlp_span(span: RequestSpan) -> otlp.Span:
    first = span.service == GATEWAY and span.name != "queue"
    return otlp.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        name=span.name,
        kind=otlp.Span.SPAN_KIND_SERVER if first else otlp.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_unix_ns,
        end_time_unix_nano=span.end_unix_ns,
        attributes=_key_values(span.attributes.items()),
        status=otlp.Status(code=otlp.Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
    )


def _key_values(attributes: Iterable[tuple[str, Attribute]]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes]


def _value(value: Attribute) -> AnyValue:
    if isinstance(value, bool):  # bool is a subclass of int
        return AnyValue(bool_value=value)
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value)
