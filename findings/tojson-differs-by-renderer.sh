#!/usr/bin/env bash
# A chat template's `tool | tojson` is three texts: transformers writes the tool as it is, MiniJinja as if for HTML
# (an apostrophe becomes \u0027), and Jinja2 itself for HTML and with its keys sorted.
# Met by: whoever renders a model's template outside transformers, to count tokens, to route by prefix or to serve. A
# description with "user's" or "<" is another prompt: its tokens, prefix hashes and lengths are not those of the engine.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q transformers==5.23.0 jinja2==3.1.6 minijinja==3.0.5
cat > "$T/run.py" <<'PY'
import json
from importlib.metadata import version

import jinja2
import minijinja
from transformers.utils.chat_template_utils import render_jinja_template

# The line of Qwen's, Hermes's and many other templates.
TEMPLATE = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "orders", "description": "The user's orders of < 5 items"}}

rendered = render_jinja_template(
    conversations=[[{"role": "user", "content": "hi"}]], chat_template=TEMPLATE, tools=[TOOL]
)
seen = {
    "transformers": rendered[0][0],
    "minijinja": minijinja.Environment().render_str(TEMPLATE, tools=[TOOL]),
    "jinja2": jinja2.Environment().from_string(TEMPLATE).render(tools=[TOOL]),
}
print("versions:   ", *(f"{name} {version(name)}" for name in seen))
print("expectation: one template and one tool are one prompt")
print("behaviour:   MiniJinja and Jinja2 escape for HTML, and Jinja2 sorts the keys")
print("output:     ", *(f"{name:<13}{text}" for name, text in seen.items()), sep="\n  ")
plain = '{"type": "function", "function": {"name": "orders", "description": "The user\'s orders of < 5 items"}}'
escaped = plain.replace("'", r"\u0027").replace("<", r"\u003c")
assert seen["transformers"] == plain, "the behaviour has changed"
assert seen["minijinja"] == escaped, "the behaviour has changed"
assert seen["jinja2"] == json.dumps(json.loads(plain), sort_keys=True).replace("'", r"\u0027").replace("<", r"\u003c")
PY
"$T/v/bin/python" "$T/run.py"
