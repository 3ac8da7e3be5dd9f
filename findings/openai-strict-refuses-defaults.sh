#!/usr/bin/env bash
# OpenAI's Python client, with strict validation of responses, refuses answers to its own default requests.
# Met by: whoever holds a compatible server to OpenAI's types by `_strict_response_validation=True`. Without an
# encoding_format the client itself asks for base64, decodes it only where validation is off, and else refuses it as no
# list of numbers. A streamed text completion is refused at its first chunk, whose finish_reason is null by OpenAI's own
# API reference and not optional in the client's type.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q openai==2.54.0
cat > "$T/run.py" <<'PY'
import base64, json, struct, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

VECTOR = (0.5, 0.25)
asked = []


def completion(text, finish):
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
    return {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def embedding(encoding):
    whole = base64.b64encode(struct.pack("<2f", *VECTOR)).decode() if encoding == "base64" else VECTOR
    data = [{"object": "embedding", "index": 0, "embedding": whole}]
    return {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        kind = "application/json"
        if self.path.endswith("/completions"):
            chunks = completion("Hi", None), completion("", "stop")
            answer = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
            kind = "text/event-stream"
        else:
            answer = json.dumps(embedding(asked[-1].get("encoding_format")))
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


def seen(call):
    try:
        return call()
    except openai.APIResponseValidationError as error:
        return type(error).__name__


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("openai", openai.__version__)
for strict in (False, True):
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x", _strict_response_validation=strict
    )

    def streamed():
        return [each.choices[0].finish_reason for each in client.completions.create(model="m", prompt="x", stream=True)]

    def embedded(**options):
        return client.embeddings.create(model="m", input="x", **options).data[0].embedding

    print(f"strict={strict}: streamed completion {seen(streamed)}")
    print(f"strict={strict}: embedding {seen(embedded)}, asked as {asked[-1].get('encoding_format')}")
    print(f"strict={strict}: embedding as float {seen(lambda: embedded(encoding_format='float'))}")
PY
"$T/v/bin/python" "$T/run.py" | tee "$T/out"
# Seen with Python 3.11.
diff "$T/out" - <<'SEEN' && echo "as described"
openai 2.54.0
strict=False: streamed completion [None, 'stop']
strict=False: embedding [0.5, 0.25], asked as base64
strict=False: embedding as float [0.5, 0.25]
strict=True: streamed completion APIResponseValidationError
strict=True: embedding APIResponseValidationError, asked as base64
strict=True: embedding as float [0.5, 0.25]
SEEN
