#!/usr/bin/env bash
# sglang-router's cache_aware sends every prompt of an idle fleet to one worker, shared prefix or not.
# Met by: fleets with little or bursty load. One worker's KV cache thrashes with unrelated prompts while the others stay
# empty, and the cold workers meet their first prompts only under load.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q sglang-router==0.3.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, random, socket, subprocess, sys, threading, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROMPTS, WORKERS = 40, 4
served = {}


class Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        served[self.server.server_port] += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.reply({"id": "c", "object": "text_completion", "created": 1, "model": "m",
                    "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=120) as answer:
            return answer.status
    except OSError:
        return 0


def spread(module, policy):
    rng = random.Random(1)
    workers = [ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(WORKERS)]
    for worker in workers:
        threading.Thread(target=worker.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{(port := free_port())}"
    router = subprocess.Popen(
        [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
         "--prometheus-port", str(free_port()), "--policy", policy,
         "--worker-urls", *(f"http://127.0.0.1:{w.server_port}" for w in workers)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while call(url + "/readiness") != 200 and time.monotonic() < deadline:
            time.sleep(0.5)
        served.clear()
        served.update({w.server_port: 0 for w in workers})
        for _ in range(PROMPTS):
            text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(2000))
            assert call(url + "/v1/completions", {"model": "m", "prompt": text, "max_tokens": 5}) == 200
        return sorted(served.values())
    finally:
        router.terminate()
        router.wait()


seen = {p: spread("sglang_router.launch_router", p) for p in ("cache_aware", "round_robin")}
print("version:     sglang-router", metadata.version("sglang-router"))
print("expectation: 40 unrelated prompts of 2,000 characters, one after the other, are spread over 4 idle workers, since")
print("             a prompt without a cached prefix goes to the worker with the smallest cache")
print("behaviour:   a miss goes to the least loaded worker, and among equals always to the same one: it gets all 40")
print("output (prompts by worker):", json.dumps(seen, indent=2))
assert seen == {"cache_aware": [0, 0, 0, PROMPTS], "round_robin": [10, 10, 10, 10]}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
