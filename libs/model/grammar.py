"""`python -m libs.model.grammar`: whether a JSON schema, read from stdin, can be kept to; prints `fault`, why not, and
`schema`, as the library reads it. A JSON string in its place is what follows a rule's name: a pattern, or choices.

A process of its own, since no limit of the library bounds all of its compiler: intersections of patterns can take
minutes, and a thread cannot be ended.
"""

import json
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from libs.model.json_schema import SchemaRefused, normalise

MAX_CPU_S: Final = 2
MAX_MEMORY_BYTES: Final = 2 * 1024**3
_FAILED = "failed to compile JSON schema: "
_BARE: Final = re.compile(r"\\.|/", re.DOTALL)
"""What stands after a backslash, and what would end a pattern."""
_BYTES: Final = 256
_MAX_PLACE_CHARS: Final = 200
_TRIED_BYTES: Final = 8
_NOTHING: Final = "NoExtensionBias"
"""What the library says where no text can go on."""
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: models that may add white space can go on adding it."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """What follows a rule's name in llguidance's Lark dialect: JSON of this schema."""
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False)


def pattern_rule(pattern: str) -> str:
    """What follows a rule's name: text that a regular expression fits as a whole."""
    escaped = _BARE.sub(lambda found: found[0] if found[0] != "/" else r"\/", pattern)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"


def choice_rule(choices: Sequence[str]) -> str:
    """What follows a rule's name: one of these texts."""
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


class GrammarUnread(Exception):
    """A grammar is written in no way that is known; the message says where."""


def grammar_rule(grammar: str) -> str:
    """What follows a rule's name: text of a grammar of its own, in GBNF or in llguidance's Lark dialect, whose first
    rule is `root` or `start`. Raises GrammarUnread."""
    from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 (few requests have one)

    if "::=" in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the library has a class for what it foresees alone
            raise GrammarUnread(" ".join(str(error).split())[:_MAX_PLACE_CHARS]) from None
        grammar = grammar.replace("%llguidance {}", "")
    return f"%lark {{\n{grammar}\n}}"


def fault_of_rule(rule: str) -> str:
    """Why a pattern or choices cannot be kept to; empty where they can."""
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415 (its caller's process may not need it)

    matcher = LLMatcher(LLTokenizer("byte"), f"start: {rule}\n")
    if matcher.is_error():
        reason = str(matcher.get_error()).partition("\n   1 |")[0].replace("\n", " ").strip()
        return reason.partition(": ")[2] or reason
    for _ in range(_TRIED_BYTES):  # some turn out too large only when they are followed
        mask = matcher.compute_bitmask() if not matcher.is_stopped() else b""
        if matcher.is_error():
            reason = str(matcher.get_error()).partition("\n")[0]
            return "nothing fits it" if reason == _NOTHING else reason
        if matcher.is_stopped():
            return "" if matcher.is_accepting() else "nothing fits it"
        byte = next((at for at in range(_BYTES) if mask[at // 8] >> at % 8 & 1), None)
        if byte is None:
            return "" if matcher.is_accepting() else "nothing fits it"
        matcher.consume_token(byte)
    return ""


def kept_schema(schema: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The schema as the library reads it, and why it cannot be kept to; empty where it can."""
    from llguidance import LLMatcher  # noqa: PLC0415 (its caller's process may not need it)

    try:
        schema = normalise(schema)
    except SchemaRefused as refused:
        return {}, str(refused)
    except RecursionError:
        return {}, "it is nested too deep"
    reason = LLMatcher.validate_grammar(f"start: {json_rule(schema)}").strip()
    return schema, reason.partition(_FAILED)[2].partition("\n   1 |")[0].strip() or reason[:200]


def main() -> None:
    """Within bounds of time and memory, beyond which the process is ended."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    asked = json.load(sys.stdin)
    kept, fault = ({}, fault_of_rule(asked)) if isinstance(asked, str) else kept_schema(asked)
    json.dump({"schema": kept, "fault": fault}, sys.stdout)


if __name__ == "__main__":
    main()
