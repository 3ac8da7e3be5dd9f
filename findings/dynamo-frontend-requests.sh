#!/usr/bin/env bash
# Dynamo's frontend: n=2 is answered 200 with one choice, documented OpenAI fields are refused with 400, and a tool
# without a description is shown to the model with "description": null.
# Met by: clients that move from vLLM or OpenAI to Dynamo with its mocker, and everyone who compares prompt_tokens or
# prefix-cache hits with a prompt rendered by transformers from the same template.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
"$T/v/bin/python" -m pip install -q msgspec prometheus-client pyzmq aiohttp "pydantic<=2.13.5" uvloop transformers==5.23.0 tokenizers==0.23.3 \
    huggingface-hub==2.4.0 pyyaml numpy==2.4.6 jinja2==3.1.6
export HF_HUB_OFFLINE=1 DYN_LOG=error DYN_DISCOVERY_BACKEND=file DYN_FILE_KV="$T/kv" DYN_SYSTEM_HOST=127.0.0.1 \
    DYN_TCP_RPC_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, os, socket, subprocess, sys, time, urllib.error, urllib.request

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

folder = sys.argv[1] + "/tiny"
os.makedirs(folder)
# A byte-level tokenizer with pairs of letters: no weights are needed by the mocker.
vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
letters = "abcdefghijklmnopqrstuvwxyz"
merges = [(a, b) for a in letters for b in letters]
for piece in [a + b for a, b in merges] + [f"<unused{i}>" for i in range(1500)]:
    vocab[piece] = len(vocab)
tokenizer = Tokenizer(models.BPE(vocab, merges))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
tokenizer.save(folder + "/tokenizer.json")
end = tokenizer.token_to_id("<|end|>")
template = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
files = {
    "tokenizer_config": {"chat_template": template, "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
    "config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
               "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": len(vocab) + 1,
               "max_position_embeddings": 8192, "eos_token_id": end, "bos_token_id": end},
    "generation_config": {"eos_token_id": end},
}
for name, content in files.items():
    with open(f"{folder}/{name}.json", "w") as file:
        json.dump(content, file)
reference = AutoTokenizer.from_pretrained(folder)

with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
url = f"http://127.0.0.1:{port}/v1/"
MESSAGES = [{"role": "user", "content": "hello there"}]


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"}), timeout=60) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as error:
        return error.code, {}
    except OSError:
        return 0, {}


def chat(**fields):
    return call("chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, **fields})


def tool(**fields):
    return [{"type": "function", "function": {"name": "now", **fields, "parameters": {"type": "object", "properties": {}}}}]


def extra_tokens(tools):
    """Tokens by which Dynamo's prompt is longer than transformers' for the same template."""
    rendered = reference.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False)
    return chat(tools=tools)[1]["usage"]["prompt_tokens"] - len(reference.encode(rendered))


quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
processes = [
    subprocess.Popen([sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)], **quiet),
    subprocess.Popen([sys.executable, "-m", "dynamo.mocker", "--model-path", folder, "--model-name", "tiny",
                      "--speedup-ratio", "1000000"], **quiet),
]
try:
    deadline = time.monotonic() + 240
    while chat()[0] != 200 and time.monotonic() < deadline:
        time.sleep(1)
    seen = {
        "choices of n=2": (lambda answer: (answer[0], len(answer[1].get("choices", []))))(chat(n=2)),
        "verbosity": chat(verbosity="low")[0],
        "safety_identifier": chat(safety_identifier="u")[0],
        "prompt_cache_key": chat(prompt_cache_key="k")[0],
        "priority (vLLM)": chat(priority=1)[0],
        "extra tokens, tool with description": extra_tokens(tool(description="d")),
        "extra tokens, tool without": extra_tokens(tool()),
    }
finally:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
added = len(reference.encode('"description": null, '))
print("version:     ai-dynamo", metadata.version("ai-dynamo"), "transformers", metadata.version("transformers"))
print("expectation: two choices or a 400; known fields that have no effect are ignored; the template sees the client's tools")
print("behaviour:   one choice without a word; three known fields refused and one taken; an absent description becomes null")
print("output:     ", json.dumps(seen, indent=2))
assert list(seen.values()) == [(200, 1), 400, 400, 200, 400, 0, added], "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py" "$T" 2> "$T/err" || { tail -5 "$T/err"; exit 1; }
