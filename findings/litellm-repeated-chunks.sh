#!/usr/bin/env bash
# litellm ends a valid stream with an error once 100 chunks in a row hold the same text of three or more characters.
# Met by: LiteLLM in front of any server whose answers hold rulers, table borders, zeros of a matrix or padding:
# a token repeated 100 times at temperature 0 is a valid answer.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 LITELLM_LOCAL_MODEL_COST_MAP=True
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q litellm==1.110.2 openai==3.57.0
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import litellm

litellm.suppress_debug_info = True
texts = []


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
        parts = []
        for delta, reason in [*(({"content": text}, None) for text in texts), ({}, "stop")]:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            parts.append(f"data: {json.dumps(chunk)}\n\n")
        try:
            for part in [*parts, "data: [DONE]\n\n", ""]:
                self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())
        except ConnectionError:
            self.close_connection = True


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


def ask():
    received = ""
    try:
        for chunk in litellm.completion(
            model="hosted_vllm/m", api_base=f"http://127.0.0.1:{server.server_port}/v1", api_key="x", stream=True,
            messages=[{"role": "user", "content": "hi"}], num_retries=0,
        ):
            received += chunk.choices[0].delta.content or ""
    except Exception as error:
        return len(received), "repeating the same chunk" in str(error)
    return len(received), False


seen = {}
for token, count in ((" 000", 90), (" 000", 150), ("--", 150)):
    texts = [token] * count
    seen[f"{count} x {token!r}"] = ask()
print("version:     litellm", metadata.version("litellm"))
print("expectation: a proxy passes on what the model wrote: 360, 600 and 300 characters")
print("behaviour:   an InternalServerError, 'The model is repeating the same chunk', in the middle of the second answer")
print("output (characters received, error):", seen)
assert seen["90 x ' 000'"] == (360, False) and seen["150 x '--'"] == (300, False), "the behaviour has changed"
received, failed = seen["150 x ' 000'"]
assert failed and received < 600, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
