#!/usr/bin/env bash
# genai-bench: if every request of one concurrency fails, the whole sweep ends with a ValueError. Nothing is written of
# that level, later ones are not run, and levels measured before have no summary.
# Met by: who sweeps up to where a server sheds load with 503 or 429, which is what the tool is for.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 HF_HUB_OFFLINE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q genai-bench==0.0.5 locust==2.47.0 transformers==5.24.0
cat > "$T/run.py" <<'PY'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HOME = Path(sys.argv[1])
LEVELS, REQUESTS = (1, 2, 3), 6


class Server(BaseHTTPRequestHandler):
    """Streams ten tokens, but answers 503 in one part of the sweep."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen += 1
        if self.server.sheds(self.server.seen):
            return self.answer(503, "application/json", b'{"error": {"message": "overloaded", "type": "overloaded", "code": 503}}')
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        words = [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}] * 10
        events = [chunk | {"choices": [word]} for word in words]
        events += [chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}]
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        events += [chunk | {"choices": [], "usage": usage}]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for line in [*map(json.dumps, events), "[DONE]"]:
            time.sleep(0.02)
            data = f"data: {line}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def answer(self, status, kind, data):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def make_tokenizer():
    vocab = {piece: n for n, piece in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(HOME / "tokenizer")


def sweep(name, sheds):
    """Return (exit status, last words, levels with results, whether there is a summary)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.seen, server.sheds = 0, sheds
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [sys.argv[2], "benchmark", "--api-backend", "openai", "--api-key", "any", "--api-model-name", "m"]
    command += ["--api-base", f"http://127.0.0.1:{server.server_address[1]}", "--model-tokenizer", str(HOME / "tokenizer")]
    command += ["--task", "text-to-text", "--traffic-scenario", "D(100,10)", "--experiment-base-dir", str(HOME / name)]
    command += ["--max-time-per-run", "1", "--max-requests-per-run", str(REQUESTS)]
    command += [word for level in LEVELS for word in ("--num-concurrency", str(level))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HOME)
    server.shutdown()
    words = " ".join((done.stdout + done.stderr).replace("\u2502", " ").split())
    found = [level for level in LEVELS if list(HOME.glob(f"{name}/*/D100*concurrency_{level}_*.json"))]
    return done.returncode, "No values found for metric" in words, found, bool(list(HOME.glob(f"{name}/*/*summary.xlsx")))


make_tokenizer()
well = sweep("well", lambda seen: False)
print("no request fails: exit status, ValueError, levels with results, summary:", well)
assert well == (0, False, list(LEVELS), True), well
shed = sweep("shed", lambda seen: seen >= REQUESTS)
print("the last of the first level fails, and all of the second:", shed)
print("expected: a row with an error rate of 100 % for them, and a summary")
assert shed[0] != 0 and shed[1:] == (True, [1], False), shed
PY
echo "genai-bench 0.0.5"
mkdir "$T/h"
"$T/v/bin/python" -W ignore "$T/run.py" "$T/h" "$T/v/bin/genai-bench" 2>"$T/err" || { tail -n 20 "$T/err"; exit 1; }
