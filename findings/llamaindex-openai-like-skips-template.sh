#!/usr/bin/env bash
# llama-index OpenAILike: chat() of the class for OpenAI-compatible servers posts to /v1/completions by default.
# Met by: LlamaIndex in front of any server of instruct models. The messages become one line each of "role: text", so
# the server never applies the model's chat template, and answers are worse without any error.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q llama-index-llms-openai-like==0.8.1 llama-index-llms-openai==0.8.3 \
  llama-index-core==0.14.25 openai==2.54.0
cat > "$T/run.py" <<'PY'
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

requests = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        requests.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
        chat = self.path.endswith("/chat/completions")
        answer = {"message": {"role": "assistant", "content": "ok"}} if chat else {"text": "ok"}
        reply = {"id": "c", "object": "chat.completion" if chat else "text_completion", "created": 1, "model": "m",
                 "choices": [{"index": 0, "finish_reason": "stop", **answer}]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hi")]
options = {"model": "m", "api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "x"}

OpenAILike(**options).chat(messages)
OpenAILike(**options, is_chat_model=True).chat(messages)
(by_default, sent), (as_chat, body) = requests
print("llama-index-llms-openai-like", version("llama-index-llms-openai-like"))
print("guess:     chat() posts messages to /v1/chat/completions")
print(f"default:   {by_default} with prompt {sent.get('prompt')!r}")
print(f"is_chat_model=True: {as_chat} with {len(body['messages'])} messages")
assert (by_default, as_chat) == ("/v1/completions", "/v1/chat/completions")
assert sent["prompt"] == "system: Be brief.\nuser: hi\nassistant: "
PY
"$T/v/bin/python" "$T/run.py"
