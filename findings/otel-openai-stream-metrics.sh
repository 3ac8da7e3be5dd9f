#!/usr/bin/env bash
# opentelemetry-instrumentation-openai-v2: a stream's gen_ai.client.operation.duration ends with the response headers.
# Met by: latency dashboards and objectives on the gen_ai metrics. Streams of any length count as milliseconds and their
# tokens not at all, while the spans of the same requests are right.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
# The package names no upper bound for util-genai and imports httpx without asking for it.
"$T/v/bin/python" -m pip install -q openai==3.51.0 httpx2==2.16.2 httpcore2==2.16.2 httpx==0.28.1 \
    opentelemetry-instrumentation-openai-v2==2.4b0 opentelemetry-util-genai==0.4b0 opentelemetry-sdk==1.45.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SECONDS = 3
USAGE = {"prompt_tokens": 70, "completion_tokens": 30, "total_tokens": 100}
HEAD = {"id": "c", "created": 1, "model": "m"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        if body.get("stream"):
            self.stream()
        else:
            time.sleep(SECONDS)
            message = {"role": "assistant", "content": "a" * 30}
            choices = [{"index": 0, "finish_reason": "stop", "message": message}]
            data = json.dumps({**HEAD, "object": "chat.completion", "choices": choices, "usage": USAGE}).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def stream(self):
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for token in range(30):
            time.sleep(SECONDS / 30)
            self.event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop" if token == 29 else None}]})
        self.event({"choices": [], "usage": USAGE})
        for part in ("data: [DONE]\n\n", ""):
            self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())

    def event(self, fields):
        part = f"data: {json.dumps({**HEAD, 'object': 'chat.completion.chunk', **fields})}\n\n"
        self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


def measure(**fields):
    """Send one request under a new instrumentation; return its metrics and its span."""
    reader, exporter, traces = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = OpenAIInstrumentor()
    instrumentor.instrument(tracer_provider=traces, meter_provider=MeterProvider([reader]))
    import openai

    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x") as client:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], **fields)
            if fields:
                list(answer)
    finally:
        instrumentor.uninstrument()
    (span,) = exporter.get_finished_spans()
    points = [(metric.name, point) for resource in reader.get_metrics_data().resource_metrics
              for scope in resource.scope_metrics for metric in scope.metrics for point in metric.data.data_points]
    return {
        "metric: seconds": [round(point.sum, 2) for name, point in points if name == "gen_ai.client.operation.duration"],
        "metric: tokens": sorted(point.sum for name, point in points if name == "gen_ai.client.token.usage"),
        "span: seconds": round((span.end_time - span.start_time) / 1e9, 2),
        "span: tokens": sorted(value for name, value in span.attributes.items() if name.startswith("gen_ai.usage.")),
    }


whole, stream = measure(), measure(stream=True, stream_options={"include_usage": True})
print("versions:    opentelemetry-instrumentation-openai-v2", metadata.version("opentelemetry-instrumentation-openai-v2"),
      "openai", metadata.version("openai"))
print(f"expectation: a {SECONDS} s answer is {SECONDS} s and 70 + 30 tokens in metrics and spans, streamed or not")
print("behaviour:   the stream's duration is taken when create() returns, and no tokens are recorded for it;")
print("             OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental takes another path, which is right")
print("output:      whole ", whole)
print("             stream", stream)
(duration,) = stream["metric: seconds"]
assert whole["metric: seconds"][0] >= SECONDS and whole["metric: tokens"] == [30, 70], "the behaviour has changed"
assert duration < SECONDS / 2 and stream["metric: tokens"] == [], "the behaviour has changed"
assert stream["span: seconds"] >= SECONDS and stream["span: tokens"] == [30, 70], "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
