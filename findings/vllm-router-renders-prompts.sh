#!/usr/bin/env bash
# vllm-router: under its default policy a chat takes four requests to a pair of servers, not two.
# Met by: everybody who sizes the API servers of a prefill/decode pair, counts requests in their logs, or serves
# behind the router with a server that has no /render. Each prompt is templated and tokenised on both servers first,
# also where there is one server of each kind and nothing to choose; round_robin sends two.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q vllm-router==0.1.17
cat > "$T/run.py" <<'PY'
import collections
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KV = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 5}
seen = collections.Counter()


class Server(BaseHTTPRequestHandler):
    """A vLLM server's answers, as far as the router reads them."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        seen[f"{self.server.kind} {self.path}"] += 1
        if self.path.endswith("/render"):
            return self.answer({"token_ids": [1, 2, 3], "request_id": "r"})
        message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        self.answer({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [message],
                     "usage": usage, "kv_transfer_params": KV})


def serve(kind):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.kind = kind
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chats(options, count=5):
    """The requests that servers got for some chats, by kind of server and path."""
    port = free_port()
    command = [sys.argv[1], "--host", "127.0.0.1", "--port", str(port), *options]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        seen.clear()
        body = json.dumps({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}).encode()
        for _ in range(count):
            wanted = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
            )
            assert urllib.request.urlopen(wanted, timeout=10).status == 200
        return {name: times / count for name, times in sorted(seen.items())}
    finally:
        router.terminate()
        router.wait()


pair = ["--vllm-pd-disaggregation", "--prefill", serve("prefill"), "--decode", serve("decode"), "--kv-connector", "nixl"]
plain = ["--worker-urls", serve("plain"), serve("plain")]
found = {"default, a pair": chats(pair), "round_robin, a pair": chats([*pair, "--policy", "round_robin"]),
         "default, two plain servers": chats(plain)}
print("expected: one request to the prefill server and one to the decode server for each chat")
for name, counts in found.items():
    print(f"{name}: {counts}")
chat, render = "/v1/chat/completions", "/v1/chat/completions/render"
same = found["default, a pair"] == {f"{kind} {path}": 1 for kind in ("prefill", "decode") for path in (chat, render)}
same &= found["round_robin, a pair"] == {f"prefill {chat}": 1, f"decode {chat}": 1}
sys.exit(0 if same else "the behaviour has changed")
PY
echo "vllm-router 0.1.17"
"$T/v/bin/python" "$T/run.py" "$T/v/bin/vllm-router"
