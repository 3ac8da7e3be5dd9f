#!/usr/bin/env bash
# langchain-openai: a streamed answer has no usage as soon as base_url is set.
# Met by: cost and token accounting of agents that move from OpenAI's API to a server of their own. The client no
# longer asks for usage, so the server sends none; whole answers still have it, and so have streams without base_url.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q langchain-openai==1.7.4 langchain-core==1.8.3 openai==2.54.0
cat > "$T/run.py" <<'PY'
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from langchain_openai import ChatOpenAI

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
bodies = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        reply = {"id": "c", "created": 1, "model": "m"}
        if body.get("stream"):
            parts = [{"index": 0, "delta": {"role": "assistant", "content": text}} for text in ("a", "b")]
            parts.append({"index": 0, "delta": {}, "finish_reason": "stop"})
            chunks = [{**reply, "object": "chat.completion.chunk", "choices": [part]} for part in parts]
            if (body.get("stream_options") or {}).get("include_usage"):
                chunks.append({**reply, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
            data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
            data = json.dumps({**reply, "object": "chat.completion", "choices": [choice], "usage": USAGE})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if body.get("stream") else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "x"}


def streamed(client):
    message = None
    for chunk in client.stream("hi"):
        message = chunk if message is None else message + chunk
    return message.usage_metadata


whole = ChatOpenAI(**options).invoke("hi").usage_metadata
by_default = streamed(ChatOpenAI(**options))
asked = "stream_options" in bodies[-1]
wanted = streamed(ChatOpenAI(**options, stream_usage=True))
at_openai = ChatOpenAI(model="m", api_key="x").stream_usage
print("langchain-openai", version("langchain-openai"))
print("guess:    streamed answers have usage_metadata, as with OpenAI's own address")
print(f"whole:    {whole and whole['total_tokens']} tokens")
print(f"streamed: {by_default}; stream_options sent: {asked}")
print(f"streamed with stream_usage=True: {wanted and wanted['total_tokens']} tokens")
print(f"stream_usage of a client without base_url: {at_openai}")
assert whole["total_tokens"] == wanted["total_tokens"] == 5
assert by_default is None and not asked and at_openai is True
PY
env -u OPENAI_BASE_URL -u OPENAI_API_BASE "$T/v/bin/python" "$T/run.py"
