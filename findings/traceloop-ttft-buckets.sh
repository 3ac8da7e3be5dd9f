#!/usr/bin/env bash
# OpenLLMetry's metrics of the OpenAI client give seconds in OpenTelemetry's default buckets, which are meant for
# milliseconds: the first bound above zero is 5 s. A TTFT of 100 ms and one of 4 s are the same to a dashboard.
# Met by: SLOs drawn from gen_ai.server.time_to_first_token or gen_ai.client.operation.duration. Any quantile of answers
# within 5 s is interpolated between 0 and 5 s. A view with bounds of one's own in the MeterProvider mends it.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q openai==3.51.0 opentelemetry-sdk==1.45.2 opentelemetry-instrumentation-openai==0.62.4
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
waits = iter((0.1, 0.4, 1.6))


class Server(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        time.sleep(next(waits))
        for content, finish in (("one", None), (" two", "stop")):
            choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
            self.wfile.write(f"data: {json.dumps({**CHUNK, 'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
reader = InMemoryMetricReader()
OpenAIInstrumentor().instrument(meter_provider=MeterProvider(metric_readers=[reader]))
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x")
for _ in range(3):
    list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True))

seen = {}
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            if metric.unit == "s":
                (point,) = metric.data.data_points
                filled = [i for i, count in enumerate(point.bucket_counts) if count]
                bounds = [0, *point.explicit_bounds]
                seen[metric.name] = {
                    "seconds": [round(point.min, 1), round(point.max, 1)],
                    "buckets": {f"{bounds[i]:g} to {bounds[i + 1]:g} s": point.bucket_counts[i] for i in filled},
                }
print("versions:    opentelemetry-instrumentation-openai", metadata.version("opentelemetry-instrumentation-openai"))
print("             opentelemetry-sdk", metadata.version("opentelemetry-sdk"))
print("expectation: bounds for seconds, 0.01 to 80 or so, as the conventions for GenAI metrics advise")
print("behaviour:   first tokens after 0.1, 0.4 and 1.6 s fill one bucket, 0 to 5 s")
print("output:     ", json.dumps(seen, indent=2))
assert {"gen_ai.server.time_to_first_token", "gen_ai.client.operation.duration"} <= seen.keys()
assert all(metric["buckets"] == {"0 to 5 s": 3} for metric in seen.values()), "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
