#!/usr/bin/env bash
# sglang-router counts a worker's 429 as a failure of the worker: four shed requests close two workers for a minute.
# Met by: engines behind it that shed load with 429. A burst of a second becomes an outage of a minute, during which
# idle and healthy workers get nothing and every client gets a 503.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q vllm-router==0.1.17 sglang-router==0.3.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = {"id": "a", "object": "chat.completion", "created": 1, "model": "m",
          "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}]}
busy = False
posts = 0


class Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        global posts
        posts += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.reply(429, {"error": {"message": "busy"}}) if busy else self.reply(200, ANSWER)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def status_of(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=60) as r:
            return r.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def after_a_burst(module):
    """Shed four requests, then return what clients get from workers that are idle again."""
    global busy, posts
    workers = [ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(2)]
    for worker in workers:
        threading.Thread(target=worker.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{(port := free_port())}"
    router = subprocess.Popen(
        [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
         "--prometheus-port", str(free_port()), "--policy", "round_robin",
         "--worker-urls", *(f"http://127.0.0.1:{w.server_port}" for w in workers)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )

    def chat():
        return status_of(url + "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})

    try:
        deadline = time.monotonic() + 60
        while chat() != 200 and time.monotonic() < deadline:
            time.sleep(0.5)
        busy = True
        burst = [chat() for _ in range(4)]
        busy, posts, start = False, 0, time.monotonic()
        seen = {"burst": burst, "idle again": [chat() for _ in range(4)], "sent to workers": posts}
        while (status := chat()) != 200 and time.monotonic() < start + 20:
            time.sleep(1)
        return seen | {"20 s later": status}
    finally:
        router.kill()
        router.wait()


seen = {module: after_a_burst(f"{module}.launch_router") for module in ("vllm_router", "sglang_router")}
print("versions:    vllm-router", metadata.version("vllm-router"), "sglang-router", metadata.version("sglang-router"))
print("expectation: circuit breakers count connection faults and 5xx; a 429 says that a worker is alive, so the request")
print("             after the burst is served by either router")
print("behaviour:   vllm-router serves it; in sglang-router the burst is 20 failures with the retries, which opens both")
print("             circuits, and clients get 503 until the circuits close")
for module, figures in seen.items():
    print("output:     ", module, figures)
served = {"burst": [429] * 4, "idle again": [200] * 4, "sent to workers": 4, "20 s later": 200}
closed = {"burst": [429] * 4, "idle again": [503] * 4, "sent to workers": 0, "20 s later": 503}
assert seen == {"vllm_router": served, "sglang_router": closed}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
