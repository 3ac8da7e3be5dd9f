#!/usr/bin/env bash
# anthropic-python: an overload reported inside a stream is an APIStatusError with status 200.
# Met by: clients that retry on OverloadedError, InternalServerError or a status of 500 and more; a server that has sent
# its headers can report an overload or a lost worker only as an "error" event.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q anthropic==2.10.0 httpx2==2.16.2 httpcore2==2.16.2
cat > "$T/run.py" <<'PY'
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic

requests = 0
ERROR = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
EVENTS = [
    {"type": "message_start", "message": {**MESSAGE, "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
    ERROR,
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        global requests
        requests += 1
        stream = json.loads(self.rfile.read(int(self.headers["content-length"]))).get("stream")
        if not stream:
            data = json.dumps(ERROR).encode()
            self.send_response(529)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in [*(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in EVENTS), ""]:
            self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x", max_retries=1)


def fault(stream):
    global requests
    requests = 0
    try:
        answer = client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], stream=stream)
        list(answer)
    except anthropic.APIStatusError as error:
        return type(error).__name__, error.status_code, requests
    return "no error", None, requests


seen = {"before the first byte": fault(False), "inside the stream": fault(True)}
print("version:     anthropic", anthropic.__version__)
print("expectation: the same overloaded_error is the same exception (529, OverloadedError) wherever it arrives")
print("behaviour:   inside a stream it is the base class, with the status of the stream's own headers")
print("output (class, status_code, requests sent):", seen)
assert seen["before the first byte"][1:] == (529, 2), "the behaviour has changed"
assert seen["before the first byte"][0] != "APIStatusError", "the behaviour has changed"
assert seen["inside the stream"] == ("APIStatusError", 200, 1), "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
