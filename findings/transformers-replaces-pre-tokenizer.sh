#!/usr/bin/env bash
# transformers 5: of `tokenizer.json`, AutoTokenizer takes the vocabulary and lets the class that `tokenizer_class`
# names make the normalizer and the pre-tokenizer, if it has its own. The model's are dropped without a word. Release 4
# reads them from the file, as the tokenizers library does. An end token of the file's post-processor depends on the
# class in both: Llama's dropped it in release 4 and keeps it now, GPT-NeoX's drops it in both.
# Met by: who serves a model with its own splitting of digits or its own end token. Servers over AutoTokenizer give it
# other tokens than servers over tokenizers, and vectors that are pooled at the last token are of another token.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 HF_HUB_OFFLINE=1
for version in 4.57.3 5.24.0; do
    python3 -m venv "$T/$version" || { echo "needs python3-venv"; exit 2; }
    "$T/$version/bin/python" -m pip install -q "transformers==$version"
done
cat > "$T/run.py" <<'PY'
import json, sys
from importlib.metadata import version
from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CLASSES = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2TokenizerFast", "GPTNeoXTokenizerFast")
TEXT = "The year 20261130"
transformers.logging.set_verbosity_error()
folder = Path(sys.argv[1]) / "model"
folder.mkdir(exist_ok=True)

# Lower case, digits in threes, and an end token after each text.
inner = Tokenizer(models.BPE())
inner.normalizer = normalizers.Lowercase()
inner.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(r"\d{1,3}| ?[a-z]+| "), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
])
inner.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=600, special_tokens=["<unk>", "<end>"], initial_alphabet=alphabet, show_progress=False
)
inner.train_from_iterator(["the year 202 611 30"] * 50, trainer)
inner.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
inner.save(str(folder / "tokenizer.json"))

seen = {"the file": inner.encode(TEXT).tokens}
for name in CLASSES:
    fields = {"tokenizer_class": name, "unk_token": "<unk>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    seen[name] = tokenizer.convert_ids_to_tokens(tokenizer(TEXT)["input_ids"])
print("version:     transformers", version("transformers"), "tokenizers", version("tokenizers"))
for name, tokens in seen.items():
    print(f"{name:>24}", " ".join(tokens))
own = ["the", "Ġyear", "Ġ", "202", "611", "30", "<end>"]
assert seen.pop("the file") == own
plain, llama, qwen, neox = seen.values()
if version("transformers").startswith("4."):
    changed = (plain, llama[1:], qwen, neox) != (own, own[:-1], own, own[:-1])
else:
    # The last two classes keep upper case. Qwen2's splits each digit, and GPT-NeoX's leaves the end token out.
    changed = (plain, llama, qwen) != (own, own, ["T", "he", "Ġyear", "Ġ", *"20261130", "<end>"])
    changed |= neox[:3] != ["T", "he", "Ġyear"] or "<end>" in neox
if changed:
    print("the behaviour has changed")  # to stdout, since stderr is dropped
    sys.exit(1)
PY
"$T/4.57.3/bin/python" "$T/run.py" "$T" 2>/dev/null
"$T/5.24.0/bin/python" "$T/run.py" "$T" 2>/dev/null
echo "expectation: all of tokenizer.json counts; behaviour: in release 5 a class with a pre-tokenizer uses its own"
