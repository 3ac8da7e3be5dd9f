#!/usr/bin/env bash
# openai-python: a synchronous client opens a new TCP connection for every streamed request.
# Met by: load clients and thread-per-user services in front of a gateway. Connection counts, TIME_WAIT,
# TLS handshakes and least-connections balancing differ from what the async client shows.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q openai==3.51.0 httpx2==2.16.2 httpcore2==2.16.2
cat > "$T/run.py" <<'PY'
import asyncio, json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

REQUESTS = 5
connections = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        global connections
        connections += 1
        super().setup()

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
        if not body.get("stream"):
            choice["message"] = choice.pop("delta")
        reply = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in (f"data: {json.dumps(reply)}\n\n", "data: [DONE]\n\n", ""):
                self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())
        else:
            data = json.dumps(reply).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "x"}
request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def count(run):
    global connections
    connections = 0
    run()
    return connections


def sync(stream):
    with openai.OpenAI(**options) as client:
        for _ in range(REQUESTS):
            answer = client.chat.completions.create(stream=stream, **request)
            if stream:
                list(answer)


async def streams():
    async with openai.AsyncOpenAI(**options) as client:
        for _ in range(REQUESTS):
            async for _chunk in await client.chat.completions.create(stream=True, **request):
                pass


seen = {
    "sync, whole answers": count(lambda: sync(False)),
    "sync, streams read to their end": count(lambda: sync(True)),
    "async, streams read to their end": count(lambda: asyncio.run(streams())),
}
print("version:     openai", openai.__version__)
print("expectation: one kept-alive connection carries all 5 consecutive requests, streamed or not, sync or async")
print("behaviour:   the sync client closes the connection at [DONE] and does not return it to the pool")
print("output:     ", seen)
assert list(seen.values()) == [1, REQUESTS, 1], "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
