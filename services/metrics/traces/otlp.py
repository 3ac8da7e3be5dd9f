"""Export of spans to an OpenTelemetry collector: OTLP over HTTP, as binary protobuf."""

import asyncio
from collections.abc import Iterable
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

from libs.contracts import metric_names as names
from libs.runtime.clock import Clock
from services.metrics.outgoing import MakeClient
from services.metrics.traces.buffer import TraceBuffer
from services.metrics.traces.spans import GATEWAY, Attribute, Span

log = structlog.get_logger()

EVERY_S: Final = 0.5
MAX_REQUESTS_A_POST: Final = 500
TIMEOUT_S: Final = 5.0
TRIES: Final = 3
RETRY_S: Final = 1.0
RETRIED: Final = frozenset({429, 502, 503, 504})
"""Statuses that OTLP's specification says to retry."""


class TraceExporter(Collector):
    """The exporter of the buffer's spans. Spans that no try delivers are dropped and counted, with one log line an
    outage.
    """

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

    async def _post(self, client: httpx.AsyncClient, spans: list[Span]) -> None:
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


def export_request(spans: list[Span]) -> ExportTraceServiceRequest:
    """Build the message for spans, grouped by the process that each describes. Pure."""

    def process(span: Span) -> tuple[str, str]:
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


def _otlp_span(span: Span) -> otlp.Span:
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
