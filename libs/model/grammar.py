"""`python -m libs.model.grammar`: check whether answers can be constrained to the JSON schema on stdin.

It prints `fault` (the reason if they cannot) and the fields of a `LooseSchema`. A JSON string on stdin is not a schema
but the right-hand side of a rule for a pattern or choices.

It runs in a separate process because no limit of the library covers its whole compiler. The intersection of patterns
can take minutes, and a thread cannot be stopped.
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
# Parts of the library's errors about pattern features that other dialects allow.
_UNSUPPORTED: Final = ("look-around", "backreferences", "lookaround", "lookahead", "word boundar")
_BYTES: Final = 256
_MAX_PLACE_CHARS: Final = 200
_TRIED_BYTES: Final = 8
# The library's error if no text can continue.
_NOTHING: Final = "NoExtensionBias"
# Each value has only one spelling. A model that may add white space might never stop adding it.
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the right-hand side of a rule for JSON of this schema, in llguidance's Lark dialect."""
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False)


def pattern_rule(pattern: str) -> str:
    """Return the right-hand side of a rule for text that the regular expression matches as a whole."""
    escaped = _BARE.sub(lambda found: found[0] if found[0] != "/" else r"\/", pattern)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"


def choice_rule(choices: Sequence[str]) -> str:
    """Return the right-hand side of a rule for one of these texts."""
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


class InvalidGrammar(Exception):
    """A grammar of unknown syntax. The message gives the position of the fault."""


def grammar_rule(grammar: str) -> str:
    """Return the right-hand side of a rule for a whole grammar. Raise InvalidGrammar.

    The grammar is in GBNF or in llguidance's Lark dialect, and its first rule is `root` or `start`.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 (few requests have one)

    if "::=" in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the library has an exception class for expected errors only
            raise InvalidGrammar(one_line(error, _MAX_PLACE_CHARS)) from None
        grammar = grammar.replace("%llguidance {}", "")
    return f"%lark {{\n{grammar}\n}}"


def fault_of_rule(rule: str) -> str:
    """Return the reason why text cannot be constrained to the rule; empty if it can."""
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415 (its caller's process may not need it)

    matcher = LLMatcher(LLTokenizer("byte"), f"start: {rule}\n")
    if matcher.is_error():
        reason = str(matcher.get_error()).partition("\n   1 |")[0].replace("\n", " ").strip()
        return reason.partition(": ")[2] or reason
    for _ in range(_TRIED_BYTES):  # some rules prove too large only after a few tokens
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
    """Return (schema, fault): the schema in the library's form, if answers can be constrained to all of it.

    Otherwise the schema is empty, and the fault gives the reason.
    """
    loose, fault = loose_schema(schema)
    return ({}, fault or loose.reason) if fault or loose.omitted else (loose.schema, "")


def loose_schema(schema: Mapping[str, Any]) -> tuple[LooseSchema, str]:
    """Return (schema, fault): the schema without unenforceable constraints, if an answer can match it.

    Otherwise the schema is empty, and the fault gives the reason.
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
    """Return the unsupported feature that keeps the pattern from being enforced, such as a look-around; empty if none.

    The result is also empty for a pattern that is wrong in any dialect or matches nothing. No answer matches its
    schema.
    """
    fault = _fault_of_schema({"type": "string", "pattern": pattern})
    return fault if any(each in fault for each in _UNSUPPORTED) else ""


def main() -> None:
    # The kernel ends the process at these limits of time and memory.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    schema = json.load(sys.stdin)
    loose, fault = (LooseSchema({}), fault_of_rule(schema)) if isinstance(schema, str) else loose_schema(schema)
    json.dump({**loose._asdict(), "fault": fault}, sys.stdout)


if __name__ == "__main__":
    main()
