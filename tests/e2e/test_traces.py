"""Test of traces of a real suite as an OpenTelemetry collector receives them."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from libs.testing.suites.suite import running_suite
from libs.testing.wait import until

TRACE, PARENT = "ab" * 16, "cd" * 8


def reads_all(metrics: str) -> bool:
    """Return whether the service has the last second of both workers, and so receives what they send from now on."""
    answer = httpx.get(f"{metrics}/v1/occupancy", params={"window": "1s"}, trust_env=False)
    return [worker["coverage"] == 1 for worker in answer.json()["workers"]] == [True, True]


class Collector:
    """The requests to an OTLP/HTTP endpoint, whose first answer is 503, as during a restart."""

    def __init__(self):
        self.spans = {}
        self.refused = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if not collector.refused:
                    collector.refused = 1
                    self.send_response(503)
                else:
                    assert self.path == "/v1/traces"
                    assert self.headers["content-type"] == "application/x-protobuf"
                    collector.take(ExportTraceServiceRequest.FromString(body))
                    self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, message):
        for resource in message.resource_spans:
            instance = {a.key: a.value.string_value for a in resource.resource.attributes}["service.instance.id"]
            for span in resource.scope_spans[0].spans:
                self.spans.setdefault(span.trace_id.hex(), {})[span.name] = (instance, span)


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


async def test_a_request_is_traced_through_gateway_prefill_hand_off_and_decode(tmp_path, collector):
    env = {"FULCRUM_METRICS_TRACES_URL": collector.url}
    with running_suite(tmp_path, "--engine", "sim", env=env) as suite:
        await until(lambda: reads_all(suite.ready["metrics"]), timeout_s=30, what="reading telemetry of both workers")
        body = {"model": suite.ready["model"], "prompt": "word " * 200, "max_tokens": 8}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = httpx.post(f"{suite.gateway}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text
        await until(lambda: len(collector.spans.get(TRACE, {})) == 5, timeout_s=20, what="the whole trace")
    assert collector.refused == 1
    spans = collector.spans[TRACE]
    whole = next(span for name, (_, span) in spans.items() if name.startswith("generate "))
    assert set(spans) == {whole.name, "queue", "prefill", "kv hand-off", "decode"}
    assert whole.parent_span_id.hex() == PARENT
    usage = {attribute.key: attribute.value.int_value for attribute in whole.attributes}
    assert usage["gen_ai.usage.output_tokens"] == 8
    for instance, span in spans.values():
        assert instance
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span is whole or span.parent_span_id == whole.span_id
    assert spans["prefill"][0] != spans["decode"][0] == spans["kv hand-off"][0]
