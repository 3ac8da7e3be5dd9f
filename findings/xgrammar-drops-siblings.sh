#!/usr/bin/env bash
# xgrammar: beside `anyOf` the other keywords of a schema are dropped, and two schemas in `allOf` admit any JSON.
# Met by: users of vLLM and SGLang, whose default backend it is. An answer "constrained" to an object with required
# fields is a text, a list, or lacks them. Nothing is raised; for `allOf` a line in the server's log says that support
# is ongoing. Bases of a class (`allOf` of two `$ref`), and `anyOf: [{required: [...]}]` for "one of these fields".
# 5 GB of packages: xgrammar needs torch.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q xgrammar==0.2.9 torch==2.15.0 transformers==5.23.0 jsonschema==4.26.0
cat > "$T/run.py" <<'PY'
import json
import sys

import jsonschema
import xgrammar

VOCABULARY = [bytes([number]) for number in range(256)] + [b"<eos>"]
tokens = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(tokens)


def admitted(schema, value, strict):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), strict_mode=strict))
    return bool(matcher.accept_string(json.dumps(value)) and matcher.accept_token(256))


NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
AGED = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CASES = [
    ("allOf of two objects, as of two bases", {"allOf": [NAMED, AGED]}, "free text"),
    ("the same, one object alone", {"allOf": [NAMED]}, "free text"),
    ("a type beside allOf", {"type": "integer", "allOf": [{"minimum": 1}, {"maximum": 9}]}, "free text"),
    ("required beside anyOf", {**NAMED, "anyOf": [{"properties": {"mail": {"type": "string"}}}]}, {"mail": "a"}),
    ("anyOf for one of two fields", {"type": "object", "properties": {"mail": {"type": "string"}},
     "anyOf": [{"required": ["mail"]}, {"required": ["phone"]}]}, {}),
    ("an enum beside a type", {"type": "integer", "enum": [1, "one"]}, "one"),
]
EXPECTED = [True, False, True, True, True, True]
print("expected: none of these values is admitted, since none of them is valid")
found = []
for (name, schema, value), _ in zip(CASES, EXPECTED, strict=True):
    assert not jsonschema.Draft202012Validator(schema).is_valid(value), name
    both = {admitted(schema, value, strict) for strict in (True, False)}
    found.append(both == {True})
    print(f"{name}: {json.dumps(value)} is {'admitted' if found[-1] else 'refused'}")
sys.exit(0 if found == EXPECTED else "the behaviour has changed")
PY
echo "xgrammar 0.2.9"
"$T/v/bin/python" "$T/run.py"
