#!/usr/bin/env bash
# evalscope perf: --rate 10 sends one request at a time and counts no wait, unless --open-loop or --parallel is given.
# Met by: whoever loads a server with a rate to find where its latency turns. Past one busy slot the rate is not
# offered, latency stays that of an idle server, and the report still says "Request Rate (req/s): 10".
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
# What the load generator imports; the rest of the package's list is for model evaluation.
"$T/v/bin/python" -m pip install -q aiohttp==3.14.5 colorlog==6.12.0 datasets==5.2.0 docstring_parser==0.18.0 \
    editdistance==0.8.1 fastapi==0.165.0 filetype==1.2.0 jinja2==3.1.6 jsonlines==4.0.0 jsonschema==4.26.0 \
    more-itertools==11.2.1 numpy==2.4.6 openai==3.57.0 pandas==3.1.1 pillow==13.0.0 plotly==7.1.0 pydantic==2.14.4 \
    python-dotenv==1.2.4 pyyaml==6.0.4 requests==2.34.2 rich==15.0.0 sse-starlette==3.7.0 tabulate==0.10.0 \
    tqdm==4.70.1 uvicorn==0.54.0
"$T/v/bin/python" -m pip install -q --no-deps evalscope==1.14.1
cat > "$T/run.py" <<'PY'
import json, pathlib, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

REQUESTS, RATE, SECONDS = 8, 10, 1
lock = threading.Lock()
arrivals, busy, peak = [], 0, 0
MESSAGE = {"role": "assistant", "content": "a"}
REPLY = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        global busy, peak
        self.rfile.read(int(self.headers["content-length"]))
        with lock:
            arrivals.append(time.monotonic())
            busy += 1
            peak = max(peak, busy)
        time.sleep(SECONDS)
        with lock:
            busy -= 1
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
pathlib.Path("prompts.txt").write_text("hello\n" * REQUESTS)


def load(folder, *options):
    """Run one load; return what the server saw and what the report says."""
    global peak
    arrivals.clear()
    peak = 0
    command = [sys.executable, "-m", "evalscope.cli.cli", "perf", "--model", "m", "--api", "openai", "--no-stream",
               "--url", f"http://127.0.0.1:{server.server_port}/v1/chat/completions", "--no-test-connection",
               "--dataset", "line_by_line", "--dataset-path", "prompts.txt", "--outputs-dir", folder,
               "--number", str(REQUESTS), "--rate", str(RATE), *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = pathlib.Path(folder).rglob("benchmark_summary.json")
    summary = json.loads(path.read_text())
    return {
        "most at once": peak,
        "seconds to send all": round(arrivals[-1] - arrivals[0], 1),
        "said to be sent per second": summary["Request Rate (req/s)"],
        "mean latency": round(summary["Avg Latency (s)"], 1),
    }


plain, open_loop = load("plain"), load("open", "--open-loop")
print("version:     evalscope", version("evalscope"))
print(f"expectation: --rate {RATE} sends {REQUESTS} requests within {REQUESTS / RATE} s, however long each takes ({SECONDS} s here)")
print("behaviour:   --parallel is 1 by default and holds requests that are due back; their latency starts when they go")
print("output:      --rate            ", plain)
print("             --rate --open-loop", open_loop)
assert plain["most at once"] == 1 and plain["seconds to send all"] >= (REQUESTS - 1) * SECONDS, "the behaviour has changed"
assert plain["said to be sent per second"] == RATE and plain["mean latency"] < 3 * SECONDS, "the behaviour has changed"
assert open_loop["most at once"] > 1 and open_loop["seconds to send all"] < 5 * SECONDS, "the behaviour has changed"
PY
cd "$T"
HOME=$T XDG_CACHE_HOME=$T MODELSCOPE_CACHE=$T HF_HOME=$T "$T/v/bin/python" "$T/run.py"
