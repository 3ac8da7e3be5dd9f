#!/usr/bin/env bash
# anthropic-python: a tool call cut by max_tokens is a ToolUseBlock with a valid dict of fewer arguments.
# Met by: agents that run tool calls from the helper's final message. An optional argument that was still to come, or
# half a string, is silently gone; only stop_reason tells.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q anthropic==2.10.0 httpx2==2.16.2 httpcore2==2.16.2
cat > "$T/run.py" <<'PY'
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic

PARTIAL = '{"table": "orders", "limit": 10, "where": "customer_id = 4'
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
EVENTS = [
    {"type": "message_start", "message": {**MESSAGE, "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", "name": "delete_rows", "input": {}}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": PARTIAL}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": None}, "usage": {"output_tokens": 9}},
    {"type": "message_stop"},
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in [*(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in EVENTS), ""]:
            self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x")
with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]) as stream:
    message = stream.get_final_message()
block = message.content[0]
print("version:     anthropic", anthropic.__version__)
print("sent:        ", PARTIAL, "then stop_reason max_tokens")
print("expectation: get_final_message() raises, or the block's input is the raw text or marked as incomplete")
print("behaviour:   it returns an ordinary dict from which the unfinished argument is missing")
print("output:      input =", block.input, "stop_reason =", message.stop_reason)
assert block.input == {"table": "orders", "limit": 10} and message.stop_reason == "max_tokens", "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
