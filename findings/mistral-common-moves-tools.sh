#!/usr/bin/env bash
# mistral-common: tools and, before v7, the system prompt stand at the last user message, so each turn moves them.
# Met by: prefix caches and prefix-aware routers in front of Mistral models. The prompt of a conversation's next turn
# shares one or two tokens with the one before, whatever the length of the system prompt and the tools.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q "mistral-common[sentencepiece]==1.13.1"
cat > "$T/run.py" <<'PY'
from itertools import takewhile
from pathlib import Path

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

DATA = Path(mistral_common.__file__).parent / "data"
FILES = {"v3": "tekken_240911.json", "v7": "mistral_instruct_tokenizer_241114.model.v7"}
SYSTEM = [{"role": "system", "content": "Answer in one short sentence. " * 40}]
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "description": "Looks something up.", "parameters": {
    "type": "object", "properties": {"key": {"type": "string"}}}}} for i in range(8)]


def ask(turn):
    return {"role": "user", "content": f"This is question {turn}."}


def answer(turn):
    return {"role": "assistant", "content": f"This is answer {turn}."}


def shared_tokens(tokenizer, system, tools):
    """Return the tokens that the prompts of turns 1 and 2 have in common at their start, and those of turn 1's prompt."""
    first, second = (
        tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(messages=system + messages, tools=tools)).tokens
        for messages in ([ask(1)], [ask(1), answer(1), ask(2)])
    )
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second))), len(first)


seen = {}
for version, file in FILES.items():
    tokenizer = MistralTokenizer.from_file(str(DATA / file))
    assert tokenizer.instruct_tokenizer.tokenizer.version.value == version
    for name, system, tools in (("neither", [], None), ("system prompt", SYSTEM, None), ("tools", [], TOOLS), ("both", SYSTEM, TOOLS)):
        seen[version, name] = shared_tokens(tokenizer, system, tools)
print("version:     mistral-common", mistral_common.__version__)
print("expectation: the prompt of turn 2 begins with all of turn 1's prompt, as the conversation only grows")
print("behaviour:   it does without system prompt and tools; v3 moves both to the last user message, v7 still the tools")
print("output (tokens shared, tokens of turn 1's prompt):")
for (version, name), (shared, tokens) in seen.items():
    print(f"    {version}, {name}: {shared} of {tokens}")
kept = {key for key, (shared, tokens) in seen.items() if shared == tokens}
assert kept == {("v3", "neither"), ("v7", "neither"), ("v7", "system prompt")}, "the behaviour has changed"
assert all(seen[key][0] <= 2 for key in (("v3", "system prompt"), ("v3", "tools"), ("v3", "both"), ("v7", "tools"))), "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
