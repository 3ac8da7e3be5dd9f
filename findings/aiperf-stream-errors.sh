#!/usr/bin/env bash
# AIPerf: a stream that reports an error after its first token, as OpenAI-compatible servers do once the status 200 has
# gone out, is a successful request with a short latency. So is one that ends without a finish reason or [DONE].
# Met by: anyone who benchmarks through overload or a lost worker. The error rate is 0.00 %, latencies improve, goodput too.
set -euo pipefail
T=$(mktemp -d)
server=""
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q aiperf==0.13.0 transformers==5.24.0
cat > "$T/server.py" <<'PY'
import asyncio
import json
import sys

from aiohttp import web

mode, port_file = sys.argv[1:]
WORDS = ["one", " two", " three", " four", " five", " six"]


def event(delta, finish=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n".encode()


async def chat(request):
    await request.read()
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(event({"role": "assistant", "content": ""}))
    for word in WORDS if mode == "whole" else WORDS[:2]:
        await asyncio.sleep(0.05)
        await answer.write(event({"content": word}))
    if mode == "whole":
        await answer.write(event({}, "stop"))
    if mode == "failed":
        error = {"message": "the worker was lost", "type": "InternalServerError", "code": 500}
        await answer.write(f"data: {json.dumps({'error': error})}\n\n".encode())
    if mode != "cut":
        await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


async def main():
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    with open(port_file, "w") as file:
        file.write(str(site._server.sockets[0].getsockname()[1]))
    await asyncio.Event().wait()


asyncio.run(main())
PY
"$T/v/bin/python" - "$T/tokenizer" <<'PY' 2>/dev/null
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="Z").save_pretrained(sys.argv[1])
PY
for mode in whole failed cut; do
  "$T/v/bin/python" "$T/server.py" "$mode" "$T/$mode.port" &
  server=$!
  for _ in $(seq 100); do [ -s "$T/$mode.port" ] && break; sleep 0.1; done
  "$T/v/bin/aiperf" profile --model m --url "http://127.0.0.1:$(cat "$T/$mode.port")" --endpoint-type chat --streaming \
    --tokenizer "$T/tokenizer" --request-count 5 --concurrency 1 --workers-max 1 --synthetic-input-tokens-mean 50 \
    --output-artifact-dir "$T/$mode" --ui none > "$T/$mode.log" 2>&1 || { tail -20 "$T/$mode.log"; exit 1; }
  kill "$server"
  wait "$server" 2>/dev/null || true
  server=""
done
"$T/v/bin/python" - "$T" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

seen = {}
for mode in ("whole", "failed", "cut"):
    (path,) = Path(sys.argv[1], mode).rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    errors = (report.get("error_request_count") or {"avg": 0})["avg"]
    seen[mode] = {
        "requests": report["request_count"]["avg"],
        "errors": errors,
        "latency_ms": round(report["request_latency"]["avg"]),
    }
print("version:     aiperf", version("aiperf"))
print("expectation: five requests of five failed, and five of five were cut")
print("behaviour:   all are successes, and faster than the whole answers")
print("output:     ", json.dumps(seen))
for mode in ("failed", "cut"):
    assert (seen[mode]["requests"], seen[mode]["errors"]) == (5, 0), "the behaviour has changed"
    assert seen[mode]["latency_ms"] < seen["whole"]["latency_ms"]
PY
