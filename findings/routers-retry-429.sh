#!/usr/bin/env bash
# vllm-router and sglang-router send a request that a worker sheds with 429 to the workers four more times at once.
# Met by: engines behind these routers that shed load. Each refused request costs five, within half a second, however
# long the Retry-After is: overload is multiplied just when it is being shed.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q vllm-router==0.1.17 sglang-router==0.3.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

posts = 0


class Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, data, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, b'{"object": "list", "data": [{"id": "m", "object": "model"}]}', content_type="application/json")

    def do_POST(self):
        global posts
        posts += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.reply(429, b'{"error": {"message": "busy"}}', content_type="application/json", retry_after="7")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers
    except OSError:
        return 0, {}


def shed(module):
    global posts
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
    try:
        deadline = time.monotonic() + 240
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        while call(url + "/readiness")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.5)
        posts, start = 0, time.monotonic()
        status, headers = call(url + "/v1/chat/completions", body)
        return {"status": status, "retry-after": headers.get("retry-after"), "sent to workers": posts,
                "waited 4 x 7 s": time.monotonic() - start >= 28}
    finally:
        router.terminate()
        router.wait()


seen = {module: shed(f"{module}.launch_router") for module in ("vllm_router", "sglang_router")}
print("versions:    vllm-router", metadata.version("vllm-router"), "sglang-router", metadata.version("sglang-router"))
print("expectation: a worker's 429 with Retry-After: 7 goes back to the client, or is retried after 7 s; retries are for")
print("             connection faults and 5xx")
print("behaviour:   one request of a client is posted five times at once, then the last 429 is passed on")
print("output:     ", json.dumps(seen, indent=2))
expected = {"status": 429, "retry-after": "7", "sent to workers": 5, "waited 4 x 7 s": False}
assert seen == {"vllm_router": expected, "sglang_router": expected}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
