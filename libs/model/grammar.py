"""`python -m libs.model.grammar`: check whether answers can be constrained to a JSON schema, read from stdin.

It prints `fault` (the reason if they cannot) and the parts of a `LooseSchema`. A JSON string on stdin is a rule's
right-hand side instead: a pattern, or choices.

It runs in a separate process, since no limit of the library covers its whole compiler. Intersections of patterns can
take minutes, and a thread cannot be ended.
"""

import json
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from libs.contracts.errors import one_line
from libs.model.loose_schema import LooseSchema, loosen
from libs.model.schema_keywords import SchemaRefused

MAX_CPU_S: Final = 2
MAX_MEMORY_BYTES: Final = 2 * 1024**3
_FAILED = "failed to compile JSON schema: "
# An escaped character, or a slash, which would end a pattern.
_BARE: Final = re.compile(r"\\.|/", re.DOTALL)
# Parts of the library's errors about patterns that other dialects allow.
_UNSUPPORTED: Final = ("look-around", "backreferences", "lookaround", "lookahead", "word boundar")
_BYTES: Final = 256
_MAX_PLACE_CHARS: Final = 200
_TRIED_BYTES: Final = 8
# The library's error if no text can continue.
_NOTHING: Final = "NoExtensionBias"
# There is one way to write each value, since a model that may add white space may never stop adding it.
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a rule's right-hand side in llguidance's Lark dialect for JSON of this schema."""
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False)


def pattern_rule(pattern: str) -> str:
    """Return a rule's right-hand side for text that a regular expression matches as a whole."""
    escaped = _BARE.sub(lambda found: found[0] if found[0] != "/" else r"\/", pattern)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"


def choice_rule(choices: Sequence[str]) -> str:
    """Return a rule's right-hand side for one of these texts."""
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


class InvalidGrammar(Exception):
    """A grammar of unknown syntax; the message names the position of the fault."""


def grammar_rule(grammar: str) -> str:
    """Return a rule's right-hand side for a whole grammar. Raise InvalidGrammar.

    The grammar is in GBNF or in llguidance's Lark dialect, and its first rule is `root` or `start`.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 (few requests have one)

    if "::=" in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the library only has an exception class for expected errors
            raise InvalidGrammar(one_line(error, _MAX_PLACE_CHARS)) from None
        grammar = grammar.replace("%llguidance {}", "")
    return f"%lark {{\n{grammar}\n}}"


def fault_of_rule(rule: str) -> str:
    """Return why text cannot be constrained to a pattern or choices; empty if it can."""
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415 (its caller's process may not need it)

    matcher = LLMatcher(LLTokenizer("byte"), f"start: {rule}\n")
    if matcher.is_error():
        reason = str(matcher.get_error()).partition("\n   1 |")[0].replace("\n", " ").strip()
        return reason.partition(": ")[2] or reason
    for _ in range(_TRIED_BYTES):  # some prove too large only after a few tokens
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
    """Return the schema in the library's form, and the reason why answers cannot be constrained to it; empty if they
    can.
    """
    loose, fault = loose_schema(schema)
    return ({}, fault or loose.reason) if fault or loose.omitted else (loose.schema, "")


def loose_schema(schema: Mapping[str, Any]) -> tuple[LooseSchema, str]:
    """Return the schema without unenforceable constraints, and the reason why no answer can fit it; empty if one
    can.
    """
    try:
        return loosen(schema, _fault_of_pattern, _fault_of_schema), ""
    except SchemaRefused as refused:
        return LooseSchema({}), str(refused)
    except RecursionError:
        return LooseSchema({}), "it is nested too deep"


def _fault_of_schema(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 (its caller's process may not need it)

    reason = LLMatcher.validate_grammar(f"start: {json_rule(schema)}").strip()
    return reason.partition(_FAILED)[2].partition("\n   1 |")[0].strip() or reason[:200]


def _fault_of_pattern(pattern: str) -> str:
    """Return the unsupported feature, such as a look-around, that keeps a pattern from being enforced.

    A pattern that is wrong in any dialect, or matches nothing, has no such fault: no answer fits its schema.
    """
    fault = _fault_of_schema({"type": "string", "pattern": pattern})
    return fault if any(each in fault for each in _UNSUPPORTED) else ""


def main() -> None:
    # Beyond these limits of time and memory the kernel ends the process.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    schema = json.load(sys.stdin)
    loose, fault = (LooseSchema({}), fault_of_rule(schema)) if isinstance(schema, str) else loose_schema(schema)
    json.dump({**loose._asdict(), "fault": fault}, sys.stdout)


if __name__ == "__main__":
    main()
