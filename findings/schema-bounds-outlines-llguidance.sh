#!/usr/bin/env bash
# The same JSON Schema on outlines-core and llguidance: outlines-core drops nine assertions without a word and anchors
# pattern; llguidance enforces or refuses each of them.
# Met by: users who change a server's structured-output backend, and gateways that promise "validated" answers.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q outlines-core==0.2.14 llguidance==1.9.1
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, re

import llguidance
from outlines_core import json_schema


class Bytes:
    """A tokenizer with one token a byte."""

    eos_token_id, bos_token_id, unk_token_id, special_token_ids = 256, None, None, [256]
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def llg(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return "refused"
    consumed = matcher.try_consume_tokens(list(text.encode()))
    return "admitted" if consumed == len(text.encode()) and matcher.is_accepting() else "not admitted"


def outlines(schema, text):
    return "admitted" if re.fullmatch(json_schema.build_regex_from_schema(json.dumps(schema)), text) else "not admitted"


INVALID = {
    "maximum": ({"type": "integer", "maximum": 10}, "11"),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0}, "0"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
    "contains": ({"type": "array", "contains": {"type": "string"}}, "[1]"),
    "minProperties": ({"type": "object", "minProperties": 2}, '{"a":1}'),
    "required, not in properties": ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]}, '{"a":1}'),
    "beside $ref": ({"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x", "maxLength": 2}, '"abc"'),
    "if/then": ({"type": "object", "properties": {"a": {"type": "integer"}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":1}'),
}
VALID = {"pattern is a search": ({"type": "string", "pattern": "b"}, '"abc"')}
seen = {name: (outlines(*case), llg(*case)) for name, case in {**INVALID, **VALID}.items()}
print("versions:    outlines-core", metadata.version("outlines-core"), "llguidance", metadata.version("llguidance"))
print("expectation: a keyword that a backend cannot enforce raises; pattern matches anywhere in the string")
print("behaviour and output (outlines-core, llguidance), on texts that break the keyword, and last on one that does not:")
for name, pair in seen.items():
    print(f"             {name:28} {pair[0]:13} {pair[1]}")
assert all(seen[name][0] == "admitted" and seen[name][1] != "admitted" for name in INVALID), "the behaviour has changed"
assert seen["pattern is a search"] == ("not admitted", "admitted"), "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
