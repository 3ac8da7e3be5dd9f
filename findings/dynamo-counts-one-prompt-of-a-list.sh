#!/usr/bin/env bash
# Dynamo's frontend: a completion request with a list of prompts computes every prompt, and its `usage` counts them all.
# Its metrics count one request with the tokens of a single prompt and of a single answer.
# Met by: evaluation harnesses and batch scripts that send lists, beside a planner or an autoscaler: Dynamo's planner
# multiplies the number of requests by these means (`planner/monitoring/traffic_metrics.py`), so lists of eight are
# planned for as an eighth of their work. One would expect the sums to grow by what the answer's `usage` says.
set -euo pipefail
T=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 HF_HUB_OFFLINE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
"$T/v/bin/python" -m pip install -q aiohttp==3.14.5 huggingface-hub==2.4.0 msgspec==0.23.0 numpy==2.4.6 \
  prometheus-client==0.26.0 pydantic==2.14.4 PyYAML==6.0.4 pyzmq==27.3.0 tokenizers==0.23.3 transformers==5.24.0 \
  uvloop==0.23.0
cat > "$T/model.py" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1])
folder.mkdir()
words = {f"w{number}": number for number in range(3000)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save(str(folder / "tokenizer.json"))
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 3000, "hidden_size": 64,
          "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64, "eos_token_id": 1,
          "bos_token_id": 2, "max_position_embeddings": 4096}
(folder / "config.json").write_text(json.dumps(config))
template = "{% for message in messages %}{{ message.content }} {% endfor %}"
(folder / "tokenizer_config.json").write_text(
    json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "w1"})
)
PY
"$T/v/bin/python" "$T/model.py" "$T/model" 2>/dev/null
PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV="$T/kv" DYN_LOG=error
export DYN_SYSTEM_HOST=127.0.0.1 DYN_TCP_RPC_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1
"$T/v/bin/python" -m dynamo.frontend --http-host 127.0.0.1 --http-port "$PORT" --router-mode round-robin >"$T/log" 2>&1 &
"$T/v/bin/python" -m dynamo.mocker --model-path "$T/model" --model-name tiny --speedup-ratio 1000000 >>"$T/log" 2>&1 &
cat > "$T/run.py" <<'PY'
import json
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version

base = f"http://127.0.0.1:{sys.argv[1]}"


def complete(prompts: list[str]) -> dict[str, int]:
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 5, "ignore_eos": True}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["usage"]


def metrics() -> dict[str, float]:
    text = urllib.request.urlopen(f"{base}/metrics", timeout=30).read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {name.split("{")[0]: float(value) for name, value in lines if "bucket" not in name}
    start = "dynamo_frontend_"
    return {
        "requests": values[f"{start}input_sequence_tokens_count"],
        "prompt tokens": values[f"{start}input_sequence_tokens_sum"],
        "generated tokens": values[f"{start}output_sequence_tokens_sum"],
    }


for _ in range(240):
    try:
        complete(["w9 w8 w7 w6"])
        break
    except (urllib.error.URLError, OSError):
        time.sleep(0.5)
print("ai-dynamo", version("ai-dynamo"))
for count in (1, 8):
    before = metrics()
    usage = complete([" ".join(f"w{10 * count + at}" for at in range(4))] * count)
    grown = {name: value - before[name] for name, value in metrics().items()}
    said = usage["prompt_tokens"], usage["completion_tokens"]
    print(f"{count} prompts of 4 tokens, 5 tokens each: usage {said}, metrics grew by {grown}")
    assert said == (4 * count, 5 * count)
    assert grown == {"requests": 1, "prompt tokens": 4, "generated tokens": 5}
print("expected: the metrics' tokens grow by those of the usage")
PY
"$T/v/bin/python" "$T/run.py" "$PORT" || { tail -n 20 "$T/log"; exit 1; }
