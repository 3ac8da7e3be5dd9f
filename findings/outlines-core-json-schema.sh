#!/usr/bin/env bash
# outlines-core turns allOf into a regex for two objects in a row, which no JSON parser accepts.
# Met by: schemas composed with allOf (pydantic inheritance, OpenAPI) under a server with the outlines backend.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q outlines-core==0.2.14
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, json, re

from outlines_core import json_schema


def part(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


regex = json_schema.build_regex_from_schema(json.dumps({"allOf": [part("a"), part("b")]}))
texts = ['{"a":1,"b":2}', '{"b":2,"a":1}', '{"a":1}', '{"a":1}{"b":2}']
seen = {text: bool(re.fullmatch(regex, text)) for text in texts}
print("version:     outlines-core", metadata.version("outlines-core"))
print("expectation: allOf of two objects admits one object with the properties of both, or raises as unsupported")
print("behaviour:   the parts are concatenated, so that every text the grammar admits is invalid JSON")
print("output (admitted):", seen)
assert seen == {texts[0]: False, texts[1]: False, texts[2]: False, texts[3]: True}, "the behaviour has changed"
try:
    json.loads(texts[3])
except json.JSONDecodeError as error:
    print("json.loads of the admitted text:", error)
else:
    raise AssertionError("the behaviour has changed")
PY
"$T/v/bin/python" "$T/run.py"
