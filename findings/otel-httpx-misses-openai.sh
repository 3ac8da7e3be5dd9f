#!/usr/bin/env bash
# openai-python sends no traceparent under opentelemetry-instrumentation-httpx, as it has moved to httpx2.
# Met by: clients whose traces should continue in a gateway and its engines. The instrumentation reports itself active
# and traces other httpx requests. anthropic-python, on httpx2 too, sends the header by itself.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q openai==3.51.0 anthropic==2.10.0 httpx2==2.16.2 httpcore2==2.16.2 httpx==0.28.1 \
    opentelemetry-instrumentation-httpx==0.66b2 opentelemetry-sdk==1.45.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry import trace
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.sdk.trace import TracerProvider

OPENAI = {"id": "a", "object": "chat.completion", "created": 1, "model": "m",
          "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}]}
ANTHROPIC = {"id": "a", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "ok"}],
             "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
received = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        received[self.path] = self.headers["traceparent"]
        data = json.dumps(ANTHROPIC if self.path == "/v1/messages" else OPENAI).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"

trace.set_tracer_provider(TracerProvider())
instrumentor = HTTPXClientInstrumentor()
instrumentor.instrument()
import anthropic, httpx, openai

message = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
with trace.get_tracer("app").start_as_current_span("handle a user's request") as span:
    httpx.post(url + "/v1/embeddings", json={})
    openai.OpenAI(base_url=url + "/v1", api_key="x").chat.completions.create(**message)
    anthropic.Anthropic(base_url=url, api_key="x").messages.create(max_tokens=5, **message)
    trace_id = f"{span.get_span_context().trace_id:032x}"

seen = {path: trace_id in (header or "") for path, header in received.items()}
print("versions:   ", *(f"{name} {metadata.version(name)}" for name in (
    "openai", "anthropic", "httpx2", "httpx", "opentelemetry-instrumentation-httpx")))
print("expectation: all three requests carry the trace of the caller's span, as both SDKs are known to stand on httpx")
print("behaviour:   the OpenAI request carries none, without a word: both SDKs stand on httpx2, which is left alone,")
print("             and only Anthropic's has tracing of its own")
print("output:      instrumented:", instrumentor.is_instrumented_by_opentelemetry, "| same trace arrives:", seen)
assert instrumentor.is_instrumented_by_opentelemetry, "the behaviour has changed"
assert seen == {"/v1/embeddings": True, "/v1/chat/completions": False, "/v1/messages": True}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
