#!/usr/bin/env bash
# vllm-router: with prefill and decode apart, a server can be removed by REST and never added again.
# Met by: whoever moves a server between prefill and decode, or drains one for an upgrade. `POST /workers` takes a
# `worker_type` and answers 400; after `DELETE` or /remove_worker only a restart of the router brings the server back.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q vllm-router==0.1.17 sglang-router==0.3.2
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        data = json.dumps({"object": "list", "model_path": "m", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.handle_error = lambda *_: None  # a router that ends drops its connections
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(method, url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def roles(url):
    found = json.loads(call("GET", url + "/workers")[1])["workers"]
    return {each["url"]: (each["worker_type"], each.get("id", quote(each["url"], safe=""))) for each in found}


def moved(arguments):
    """Remove a decode server and add it as prefill; return both answers and the roles at the end."""
    prefill, decode, mover = serve(), serve(), serve()
    url = f"http://127.0.0.1:{(port := free_port())}"
    router = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
         "--policy", "round_robin", "--prefill", prefill, "--decode", decode, "--decode", mover],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 90
        while (call("GET", url + "/health")[0] != 200 or mover not in roles(url)) and time.monotonic() < deadline:
            time.sleep(0.5)
        removed, _ = call("DELETE", f"{url}/workers/{roles(url)[mover][1]}")
        while mover in roles(url) and time.monotonic() < deadline:
            time.sleep(0.1)
        added, said = call("POST", url + "/workers", {"url": mover, "worker_type": "prefill"})
        while added < 300 and mover not in roles(url) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {"removed": removed, "added": added, "its role": roles(url).get(mover, ("none",))[0]}, said
    finally:
        router.kill()
        router.wait()


vllm, said = moved(["vllm_router.launch_router", "--vllm-pd-disaggregation"])
sglang, _ = moved(["sglang_router.launch_router", "--pd-disaggregation"])
print("versions:    vllm-router", metadata.version("vllm-router"), "sglang-router", metadata.version("sglang-router"))
print("expectation: a server that was removed can be added again by POST /workers with a worker_type, as in sglang-router")
print("behaviour:   vllm-router removes it and refuses to add it, in either role")
print("output:      vllm-router  ", vllm, said[:120])
print("output:      sglang-router", sglang)
assert vllm == {"removed": 200, "added": 400, "its role": "none"}, "the behaviour has changed"
assert sglang == {"removed": 202, "added": 202, "its role": "prefill"}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
