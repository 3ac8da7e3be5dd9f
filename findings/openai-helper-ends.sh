#!/usr/bin/env bash
# The streaming helper chat.completions.stream() of openai-python and openai-node treat the same two ends in opposite
# ways: max_tokens reached on plain text, and a stream that ends before any finish_reason (a worker was lost).
# Met by: everyone who uses the helper against a server with max_tokens, and behind proxies that close streams cleanly.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q openai==3.51.0 httpx2==2.16.2 httpcore2==2.16.2
(cd "$T" && npm init -y >/dev/null && npm install --silent --no-audit --no-fund openai@6.49.0)
cat > "$T/node.mjs" <<'JS'
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "x" });
try {
  const stream = client.chat.completions.stream({ model: "m", messages: [{ role: "user", content: "hi" }] });
  const choice = (await stream.finalChatCompletion()).choices[0];
  console.log(`returned ${choice.message.content} ${choice.finish_reason}`);
} catch (error) { console.log(`raised ${error.constructor.name}`); }
JS
cat > "$T/run.py" <<'PY'
import json, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

folder = sys.argv[1]
finish_reasons = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        parts = []
        for delta, reason in [({"role": "assistant", "content": "Hello"}, None), *(({}, r) for r in finish_reasons)]:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            parts.append(f"data: {json.dumps(chunk)}\n\n")
        if finish_reasons:
            parts.append("data: [DONE]\n\n")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in [*parts, ""]:
            self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"


def python():
    client = openai.OpenAI(base_url=url, api_key="x")
    try:
        with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "hi"}]) as stream:
            choice = stream.get_final_completion().choices[0]
        return f"returned {choice.message.content} {choice.finish_reason}"
    except Exception as error:
        return f"raised {type(error).__name__}"


def node():
    return subprocess.run(["node", "node.mjs", url], cwd=folder, capture_output=True, text=True).stdout.strip()


seen = {}
for name, finish_reasons in (("ends by max_tokens", ["length"]), ("ends without finish_reason", [])):
    seen[name] = {"python": python(), "node": node()}
print("versions:    openai", openai.__version__, "(PyPI), openai 6.49.0 (npm)")
print("expectation: plain text cut by max_tokens is returned with finish_reason length (only response_format=Model must")
print("             raise); a stream without finish_reason raises; both languages alike")
print("behaviour:   Python raises for the first and returns the second as if whole; Node does the opposite")
print("output:     ", json.dumps(seen, indent=2))
assert seen == {
    "ends by max_tokens": {"python": "raised LengthFinishReasonError", "node": "returned Hello length"},
    "ends without finish_reason": {"python": "returned Hello None", "node": "raised OpenAIError"},
}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py" "$T"
