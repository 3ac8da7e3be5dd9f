#!/usr/bin/env bash
# guidellm: the time per output token that it reports includes the time to first token.
# Met by: whoever sets a figure of guidellm beside TPOT of vLLM's benchmark, MLPerf or DistServe, which all leave the
# first token out. A slow prefill reads as a slow decode; the figure of the usual name's meaning is its ITL.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
# The backend and the request's figures; the rest of the list, torch among it, is for data sets and reports.
"$T/v/bin/python" -m pip install -q click==8.4.2 culsans==0.10.0 httpx[http2]==0.28.1 jinja2==3.1.6 loguru==0.7.3 \
    more-itertools==11.2.1 msgpack==1.2.4 numpy==2.4.6 pydantic==2.14.4 pydantic-settings==2.16.3 rich==15.0.0 \
    uvloop==0.23.0 websockets==17.4
"$T/v/bin/python" -m pip install -q --no-deps guidellm==0.8.1
cat > "$T/run.py" <<'PY'
import asyncio, json, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from guidellm.backends import OpenAIHTTPBackend
from guidellm.schemas import GenerationRequest, GenerativeRequestStats, RequestInfo
from guidellm.schemas.backends import OpenAIHTTPBackendArgs

PREFILL, DECODE = 3.0, 0.1


class Handler(BaseHTTPRequestHandler):
    """Answers "N" with N tokens: PREFILL seconds for the first one, DECODE seconds for each other."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = int(body["messages"][0]["content"][0]["text"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for token in range(tokens):
            time.sleep(DECODE if token else PREFILL)
            self.event({"choices": [{"index": 0, "delta": {"content": "a "}, "finish_reason": None}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, fields):
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


async def measure(tokens):
    backend = OpenAIHTTPBackend(OpenAIHTTPBackendArgs(target=f"http://127.0.0.1:{server.server_port}", model="m"))
    await backend.process_startup()
    info, answer = RequestInfo(), None
    async for response, info in backend.resolve(GenerationRequest(columns={"text_column": [str(tokens)]}), info):
        answer = response or answer
    info.timings.resolve_end = time.time()
    await backend.process_shutdown()
    stats = GenerativeRequestStats(
        request_id="r", info=info, input_metrics=answer.input_metrics, output_metrics=answer.output_metrics
    )
    assert stats.output_tokens == tokens
    return {
        "time_to_first_token_ms": round(stats.time_to_first_token_ms),
        "time_per_output_token_ms": round(stats.time_per_output_token_ms),
        "inter_token_latency_ms": stats.inter_token_latency_ms and round(stats.inter_token_latency_ms),
    }


ten, one = asyncio.run(measure(10)), asyncio.run(measure(1))
print("version:     guidellm", version("guidellm"))
print(f"expectation: time per output token is {DECODE * 1000:.0f} ms: the time after the first token over the tokens after it")
print(f"behaviour:   it is the whole time over all tokens, so {PREFILL:.0f} s of prefill weigh more than the decode; an answer of")
print("             one token has its time to first token as the time per output token")
print("output:      10 tokens", ten)
print("             1 token  ", one)
assert ten["time_per_output_token_ms"] >= 1000 * (PREFILL + 9 * DECODE) / 10, "the behaviour has changed"
assert ten["inter_token_latency_ms"] < 200, "the behaviour has changed"
assert one["time_per_output_token_ms"] == one["time_to_first_token_ms"] >= 1000 * PREFILL, "the behaviour has changed"
assert one["inter_token_latency_ms"] is None, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
