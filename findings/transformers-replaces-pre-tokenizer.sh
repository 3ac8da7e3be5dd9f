#!/usr/bin/env bash
# transformers 5: of `tokenizer.json`, AutoTokenizer takes the vocabulary and lets the class that `tokenizer_class`
# names make the rest. A normalizer or pre-tokenizer of the model's own is dropped without a word, for GPTNeoXTokenizer
# the post-processor too. transformers 4 and the tokenizers library read the file as it is.
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
own = seen["the file"]
same = [name for name in CLASSES if seen[name] == own]
changed = own != ["the", "Ġyear", "Ġ", "202", "611", "30", "<end>"]
if version("transformers").startswith("4."):
    changed |= same != list(CLASSES)
else:
    changed |= same != list(CLASSES[:2])
    # Qwen2's class splits each digit and keeps upper case; GPT-NeoX's also leaves the end token out.
    changed |= seen[CLASSES[2]] != ["T", "he", "Ġyear", "Ġ", *"20261130", "<end>"]
    changed |= seen[CLASSES[3]][:3] != ["T", "he", "Ġyear"] or "<end>" in seen[CLASSES[3]]
sys.exit("the behaviour has changed" if changed else 0)
PY
"$T/4.57.3/bin/python" "$T/run.py" "$T" 2>/dev/null
"$T/5.24.0/bin/python" "$T/run.py" "$T" 2>/dev/null
echo "expectation: tokenizer.json says all; behaviour: in release 5 the named class does, where it has a pre-tokenizer"
