#!/usr/bin/env bash
# vllm-router and sglang-router do not pass a chat request on as it came: both parse it and write it anew.
# Met by: strict tools, priorities and engine options behind a router: the answer is 200 and the option is gone. A tool
# without parameters, which OpenAI allows, is refused by both.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q vllm-router==0.1.17 sglang-router==0.3.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

received = []


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
        received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = {"role": "assistant", "content": "a"}
        self.reply({"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=120) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def tool(**fields):
    return [{"type": "function", "function": {"name": "now", "description": "d", **fields}}]


SCHEMA = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
CASES = {
    "priority": {"priority": 5},
    "unknown option": {"my_option": 1},
    "strict tool": {"tools": tool(strict=True, parameters=SCHEMA)},
    "tool without parameters": {"tools": tool()},
    "verbosity": {"verbosity": "low"},
}


def passes(module):
    worker = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=worker.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{(port := free_port())}"
    router = subprocess.Popen(
        [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
         "--prometheus-port", str(free_port()), "--worker-urls", f"http://127.0.0.1:{worker.server_port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while call(url + "/readiness") != 200 and time.monotonic() < deadline:
            time.sleep(0.5)
        result = {}
        for name, fields in CASES.items():
            received.clear()
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
            status = call(url + "/v1/chat/completions", body)
            if not received:
                result[name] = f"refused with {status}"
            else:
                result[name] = "kept" if all(received[0].get(k) == v for k, v in fields.items()) else "lost, answer 200"
        return result
    finally:
        router.terminate()
        router.wait()


seen = {module: passes(f"{module}.launch_router") for module in ("vllm_router", "sglang_router")}
print("versions:    vllm-router", metadata.version("vllm-router"), "sglang-router", metadata.version("sglang-router"))
print("expectation: a router reads what it routes by and passes the body on; the engine decides on every field")
print("behaviour:   sglang-router drops every field it does not know, vllm-router drops a tool's strict")
print("output:     ", json.dumps(seen, indent=2))
assert seen == {
    "vllm_router": {"priority": "kept", "unknown option": "kept", "strict tool": "lost, answer 200",
                    "tool without parameters": "refused with 422", "verbosity": "kept"},
    "sglang_router": {"priority": "lost, answer 200", "unknown option": "lost, answer 200", "strict tool": "kept",
                      "tool without parameters": "refused with 400", "verbosity": "refused with 400"},
}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
