#!/usr/bin/env bash
# sentence-transformers 6: a folder of a chat model makes other vectors of a text than servers do, without a word.
# With a chat template in its tokenizer, a plain text is encoded as the message of a user; folders that have
# `modules.json` of earlier releases keep to the text. The pooling follows the class that `config.json` names: the mean
# for `LlamaModel`, the last token for `LlamaForCausalLM` of the same weights.
# Met by: who compares vectors of an instruction-tuned model with those of `vllm serve`, which encodes the text as it
# is, or who measures retrieval by one and serves the other.
# 5 GB of packages: it needs torch.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 HF_HUB_OFFLINE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q sentence-transformers==6.2.0 torch==2.15.0 transformers==5.23.0
cat > "$T/run.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<unk>", "<pad>", "user", ":", "a", "red", "fox"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}{% endfor %}"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def folder(name, template, kind):
    """A tiny model with random weights, the same each time."""
    path = Path(sys.argv[1]) / name
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    kind(transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )).save_pretrained(path)
    return path


def seen(path):
    model = SentenceTransformer(str(path))
    tokens = model.preprocess(["a red fox"])["input_ids"][0].tolist()
    return " ".join(WORDS[each] for each in tokens), model[1].pooling_mode


older = folder("older", TEMPLATE, transformers.LlamaForCausalLM)
(older / "modules.json").write_text(json.dumps(MODULES))
(older / "1_Pooling").mkdir()
pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
(older / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
rows = [
    ("no chat template, LlamaModel", folder("base", None, transformers.LlamaModel), ("a red fox", "mean")),
    ("no chat template, LlamaForCausalLM", folder("causal", None, transformers.LlamaForCausalLM),
     ("a red fox", "lasttoken")),
    ("chat template, LlamaForCausalLM", folder("chat", TEMPLATE, transformers.LlamaForCausalLM),
     ("user : a red fox", "lasttoken")),
    ("chat template, modules.json of release 3", older, ("a red fox", "lasttoken")),
]
changed = False
for name, path, wanted in rows:
    found = seen(path)
    print(f"{name}: encodes {found[0]!r}, pools by {found[1]}")
    changed |= found != wanted
sys.exit("changed" if changed else 0)
PY
"$T/v/bin/python" "$T/run.py" "$T" 2>/dev/null
echo "as stated: sentence-transformers 6.2.0, transformers 5.23.0"
