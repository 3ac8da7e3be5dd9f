#!/usr/bin/env bash
# xgrammar: a string with `minLength` or `maxLength`, whatever the bound, cannot contain a quotation mark, a backslash
# or a line break: no escape is admitted within it. Without a bound all are.
# Met by: users of vLLM and SGLang, whose default backend it is, with fields such as pydantic's
# `Field(min_length=1, max_length=2000)`. The model is kept from writing code, quotations or paragraphs there, and writes
# something else instead. Nothing is raised or logged. llguidance, another backend of both servers, admits them.
# 5 GB of packages: xgrammar needs torch.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q xgrammar==0.2.9 torch==2.15.0 transformers==5.23.0 llguidance==1.9.1 jsonschema==4.26.0
cat > "$T/run.py" <<'PY'
import json
import sys
from importlib.metadata import version

import jsonschema
import llguidance
import xgrammar

VOCABULARY = [bytes([number]) for number in range(256)] + [b"<eos>"]
known = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(known)


class Bytes:
    """A tokenizer with one token a byte."""

    eos_token_id, bos_token_id, unk_token_id, special_token_ids = 256, None, None, [256]
    tokens = VOCABULARY

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return bool(matcher.accept_string(text) and matcher.accept_token(256))


def by_llguidance(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


VALUES = {"plain": "a b", "line break": "a\nb", "quotation mark": 'a "b"', "backslash": "a\\b", "tab": "a\tb"}
BOUNDS = [{}, {"minLength": 1}, {"maxLength": 2000}]
print("expected: a string of three to five characters is admitted by each of these schemas, since it is valid")
found = {}
for bounds in BOUNDS:
    schema = {"type": "string", **bounds}
    for name, value in VALUES.items():
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
        both = by_xgrammar(schema, json.dumps(value)), by_llguidance(schema, json.dumps(value))
        found[json.dumps(bounds), name] = both
        print(f"{json.dumps(schema):39} {name:15}", *(f"{who} {'admits' if yes else 'refuses'} it;" for who, yes in zip(("xgrammar", "llguidance"), both)))
print("versions: xgrammar", version("xgrammar"), "llguidance", version("llguidance"))
wanted = {key: (key[0] == "{}" or key[1] == "plain", True) for key in found}
sys.exit(0 if found == wanted else "the behaviour has changed")
PY
"$T/v/bin/python" "$T/run.py" 2> "$T/log" || { tail -n 5 "$T/log"; exit 1; }
