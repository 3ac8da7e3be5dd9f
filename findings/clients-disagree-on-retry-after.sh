#!/usr/bin/env bash
# Retry-After: 150 makes three things of one request: openai-python gives up at once, anthropic-python and openai-node
# wait the whole time inside the call, and Vercel's AI SDK ignores it and posts three times within seconds.
# Met by: servers that answer with a long Retry-After, until a model is loaded or a day's quota is new. A call's
# `timeout` of 5 s does not bound the wait. `x-should-retry: false` makes the first three give up at once.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q openai==3.51.0 anthropic==2.10.0 httpx2==2.16.2 httpcore2==2.16.2
(cd "$T" && npm init -y >/dev/null &&
  npm install --silent --no-audit --no-fund openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92)
cat > "$T/client.mjs" <<'JS'
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
const [name, baseURL] = process.argv.slice(2);
if (name === "openai-node") {
  const client = new OpenAI({ baseURL, apiKey: "x", timeout: 5000 });
  await client.chat.completions.create({ model: "m", messages: [{ role: "user", content: "hi" }] });
} else {
  await generateText({ model: createOpenAICompatible({ name: "x", baseURL })("m"), prompt: "hi" });
}
JS
cat > "$T/client.py" <<'PY'
import sys

name, url = sys.argv[1:]
messages = [{"role": "user", "content": "hi"}]
if name == "openai-python":
    import openai

    openai.OpenAI(base_url=url, api_key="x", timeout=5).chat.completions.create(model="m", messages=messages)
else:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x", timeout=5)
    client.messages.create(model="m", max_tokens=9, messages=messages)
PY
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

folder = sys.argv[1]
SECONDS = 20
notice, posts, first = {}, 0, threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        global posts
        posts += 1
        first.set()
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"error": {"message": "the quota is used up", "type": "rate_limit_error"}}'
        self.send_response(429)
        for name, value in {"content-type": "application/json", "retry-after": "150", **notice}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def call(name):
    """Return the posts of one call, and whether it still waits SECONDS after the first."""
    global posts
    posts = 0
    first.clear()
    program = [sys.executable, "client.py"] if name.endswith("python") else ["node", "client.mjs"]
    process = subprocess.Popen([*program, name, url], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert first.wait(120), "the client posts nothing"
        process.wait(SECONDS)
        return {"posts": posts, "after 20 s": "has raised"}
    except subprocess.TimeoutExpired:
        return {"posts": posts, "after 20 s": "waits"}
    finally:
        process.kill()
        process.wait()


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
NAMES = ("openai-python", "anthropic-python", "openai-node", "ai-sdk-node")
seen = {name: call(name) for name in NAMES}
notice = {"x-should-retry": "false"}
told = {name: call(name) for name in NAMES}
print("versions:    openai", metadata.version("openai"), "anthropic", metadata.version("anthropic"),
      "(PyPI); openai 6.49.0, ai 6.0.326 (npm)")
print("expectation: clients that retry by themselves treat Retry-After alike: they wait for it, or not beyond a limit")
print("behaviour:   one raises at once, two sleep through any time that a server names, the fourth retries in seconds")
print("output:      Retry-After: 150", json.dumps(seen, indent=2))
print("             and x-should-retry: false", json.dumps(told, indent=2))
raised, waits = {"posts": 1, "after 20 s": "has raised"}, {"posts": 1, "after 20 s": "waits"}
retried = {"posts": 3, "after 20 s": "has raised"}
assert seen == dict(zip(NAMES, (raised, waits, waits, retried))), "the behaviour has changed"
assert told == dict(zip(NAMES, (raised, raised, raised, retried))), "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py" "$T"
