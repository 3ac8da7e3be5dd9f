#!/usr/bin/env bash
# lm-format-enforcer closes an array after 20 elements if its schema names no larger minItems or maxItems.
# Met by: extraction of rows, entities or steps under a server with the lm-format-enforcer backend. The answer is valid
# JSON, finish_reason is "stop", and the twenty-first row is missing. A minItems of 20 or more takes the limit away.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q lm-format-enforcer==0.11.3 pydantic==2.14.4
cat > "$T/run.py" <<'PY'
import json, logging
from importlib.metadata import version

logging.disable(logging.WARNING)  # an optional module is missing, which a warning says
from lmformatenforcer import JsonSchemaParser


def longest(**bounds):
    """Return the length of the longest array, of up to 200 elements, that the enforcer admits in an object."""
    items = {"type": "array", "items": {"type": "string"}, **bounds}
    schema = {"type": "object", "properties": {"rows": items}, "required": ["rows"]}
    return max(count for count in range(201) if admits(schema, json.dumps({"rows": ["x"] * count})))


def admits(schema, text):
    state = JsonSchemaParser(schema)
    for letter in text:
        if letter not in state.get_allowed_characters():
            return False
        state = state.add_character(letter)
    return state.can_end()


seen = {
    "no bounds": longest(),
    "minItems 5": longest(minItems=5),
    "minItems 20": longest(minItems=20),
    "maxItems 100": longest(maxItems=100),
}
print("version:     lm-format-enforcer", version("lm-format-enforcer"))
print("expectation: without maxItems an array has any length")
print("behaviour:   it ends at 20 elements, unless minItems is 20 or more or maxItems says otherwise")
print("output:      longest of up to 200", json.dumps(seen))
assert seen == {"no bounds": 20, "minItems 5": 20, "minItems 20": 200, "maxItems 100": 100}, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
