"""The tool call formats of model families. Each parser reads from the opening marker to the end of the calls. Pure.

The formats are those of the models' chat templates. Arguments are JSON in the formats of Hermes 2 Pro, Qwen 2.5 and 3,
Llama 3.1 to 3.3, and Mistral (tokenizer 3 and later). They are also JSON in those of DeepSeek V3, R1 and V3.1, and Kimi
K2.

Qwen3-Coder, GLM 4.5 and 4.6, MiniMax M2 and Seed-OSS write each argument between marks. The tool's schema then decides
whether a value is a number or a string.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Final, Literal, Protocol

from services.gateway.answers.parts import AnswerPart, JsonCall, JsonText, PartKind

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of tools' arguments, by tool name."""
_TEXT: Final = frozenset({"string"})
_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Marks:
    name: tuple[str, str] | None
    """The marks around the tool's name.

    None if the name ends at the first key or at the end of the call, without a mark.
    """
    key: tuple[str, str]
    value: tuple[str, str]
    """The marks around a value. The first is empty if the value directly follows its key."""
    ends: str
    """The mark after each call if several calls share one closing mark; empty if the closing mark also ends the call.
    """
    line: str = ""
    """The text that the chat template writes after the tool's name and around each value."""


class _MarksState(Enum):
    BETWEEN = auto()
    NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


class MarkedCalls:
    """The common parser of formats that write each argument between marks.

    A value is returned as a whole, because its JSON type may be known only at its end.
    """

    opens: ClassVar[tuple[str, ...]]
    specials: ClassVar[tuple[str, ...]]
    """The format's special tokens. The first one ends all calls."""
    marks: ClassVar[Marks]

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._state = _MarksState.BETWEEN if self.marks.name else _MarksState.NAME
        self._held = ""
        self._name = self._key = ""
        self._arguments = 0

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        self._held += text
        parts: list[AnswerPart] = []
        while True:
            step = self._step(parts)
            if step is not True:
                return parts, step

    def end(self) -> list[AnswerPart]:
        # The arguments of an unfinished call stay incomplete, and a call without a name is useless.
        return []

    def _step(self, parts: list[AnswerPart]) -> Literal[True] | str | None:
        """Parse up to the next mark.

        Return True to continue, None if more text is needed, or else the text after all calls.
        """
        marks, state = self.marks, self._state
        if state is _MarksState.BETWEEN:
            assert marks.name is not None
            return self._pass({marks.name[0]: _MarksState.NAME}, closes=True)
        if state is _MarksState.NAME:
            return self._take_name(parts)
        if state is _MarksState.ARGUMENTS:
            return self._next_argument(parts)
        if state is _MarksState.KEY:
            key = self._until(marks.key[1])
            if key is None:
                return None
            self._key, self._state = key.strip(), _MarksState.BEFORE_VALUE if marks.value[0] else _MarksState.VALUE
            return True
        if state is _MarksState.BEFORE_VALUE:
            return self._pass({marks.value[0]: _MarksState.VALUE}, closes=False)
        value = self._until(marks.value[1])
        if value is None:
            return None
        parts.append(AnswerPart(PartKind.ARGUMENTS, self._argument(value)))
        self._state = _MarksState.ARGUMENTS
        return True

    def _take_name(self, parts: list[AnswerPart]) -> Literal[True] | None:
        marks = self.marks
        if marks.name is not None:
            name = self._until(marks.name[1])
        else:
            found = [at for mark in (marks.key[0], self.specials[0]) if (at := self._held.find(mark)) >= 0]
            name = self._held[: min(found)] if found else None
            self._held = self._held[min(found) :] if found else self._held
        if name is None:
            return None
        self._name, self._arguments, self._state = name.strip(), 0, _MarksState.ARGUMENTS
        parts.append(AnswerPart(PartKind.CALL, self._name))
        return True

    def _next_argument(self, parts: list[AnswerPart]) -> Literal[True] | str | None:
        marks = self.marks
        ends = marks.ends or self.specials[0]
        places = {mark: at for mark in (marks.key[0], ends) if (at := self._held.find(mark)) >= 0}
        if not places:
            return None
        mark = min(places, key=lambda each: places[each])
        self._held = self._held[places[mark] + len(mark) :]
        if mark == marks.key[0]:
            self._state = _MarksState.KEY
            return True
        parts.append(AnswerPart(PartKind.ARGUMENTS, "}" if self._arguments else "{}"))
        if not marks.ends:
            return self._held
        self._state = _MarksState.BETWEEN
        return True

    def _pass(self, marks: Mapping[str, _MarksState], *, closes: bool) -> Literal[True] | str | None:
        """Consume text up to and including the first of these marks.

        With `closes`, the mark that ends all calls may come first; the text after it is then returned.
        """
        wanted = (*marks, self.specials[0]) if closes else tuple(marks)
        places = {mark: at for mark in wanted if (at := self._held.find(mark)) >= 0}
        if not places:
            return None
        mark = min(places, key=lambda each: places[each])
        self._held = self._held[places[mark] + len(mark) :]
        if mark not in marks:
            return self._held
        self._state = marks[mark]
        return True

    def _until(self, mark: str) -> str | None:
        """Consume text up to and including a mark. Return the text before it, or None if the mark has not arrived."""
        before, found, after = self._held.partition(mark)
        if not found:
            return None
        self._held = after
        return before

    def _argument(self, text: str) -> str:
        """Return the current argument as the next member of a JSON object."""
        before = ", " if self._arguments else "{"
        self._arguments += 1
        schema = self._tools.get(self._name, {}).get("properties", {}).get(self._key, {})
        return f"{before}{json.dumps(self._key, ensure_ascii=False)}: {_as_json(_trimmed(text), schema)}"


def _trimmed(text: str) -> str:
    # Templates write one line break on either side.
    return text.removeprefix("\n").removesuffix("\n")


def _as_json(text: str, schema: Any) -> str:
    """Return a value as JSON. Its type is one that the schema allows if the text can be read as such."""
    types = value_types(schema)
    if types == _TEXT:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _TYPES[type(value)]
    allowed = kind in types or (kind == "integer" and "number" in types)
    # Where the schema allows strings, text that reads as a disallowed type is a string.
    return json.dumps(text, ensure_ascii=False) if "string" in types and not allowed else text.strip()


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def value_types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows at its top level; a string if it names none."""
    if not isinstance(schema, Mapping):
        return _TEXT
    named = schema.get("type")
    if named is not None:
        return frozenset([named] if isinstance(named, str) else named)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return frozenset("null" if value is None else _TYPES[type(value)] for value in values)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return frozenset().union(*(value_types(each) for each in _list(schema[several])))
    return frozenset({"object"}) if "$ref" in schema or "properties" in schema else _TEXT


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


_PARAMETERS: Final = Marks(
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    ends="</function>",
    line="\n",
)


class QwenCoderCalls(MarkedCalls):
    """The format `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with newlines."""

    opens = ("<tool_call>",)
    specials = ("</tool_call>",)
    marks = _PARAMETERS


class SeedCalls(MarkedCalls):
    """The format of Seed-OSS, which is that of Qwen3-Coder with other opening and closing tags."""

    opens = ("<seed:tool_call>",)
    specials = ("</seed:tool_call>",)
    marks = _PARAMETERS


class MiniMaxCalls(MarkedCalls):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`."""

    opens = ("<minimax:tool_call>",)
    specials = ("</minimax:tool_call>",)
    marks = Marks(
        name=('<invoke name="', '">'), key=('<parameter name="', '">'), value=("", "</parameter>"), ends="</invoke>"
    )


class GlmCalls(MarkedCalls):
    """The format `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with newlines."""

    opens = ("<tool_call>",)
    specials = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    marks = Marks(name=None, key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), ends="")


class CallReader(Protocol):
    """A parser of the text after an opening marker."""

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        """Return the parts that `text` adds, and the text after the calls, which is None until the calls have ended."""
        ...

    def end(self) -> list[AnswerPart]:
        """Return the text that did not become a call as content, at the end of the answer."""
        ...


class HermesCall:
    """A call in the format `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Each call has its own tags."""

    opens = ("<tool_call>",)
    specials = ("</tool_call>",)

    def __init__(self, _tools: Tools) -> None:
        self._call = JsonCall()
        self._tail = ""

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        # Text between the JSON object and the closing tag is skipped.
        in_call = not self._call.ended
        parts = self._call.push(text) if in_call else []
        if not self._call.ended:
            return parts, None
        self._tail += self._call.rest if in_call else text
        at = self._tail.find(self.specials[0])
        if at < 0:
            return parts, None
        if not self._call.named:
            parts += _content(self._call.raw + self._tail[:at])
        return parts, self._tail[at + len(self.specials[0]) :]

    def end(self) -> list[AnswerPart]:
        return [] if self._call.named else _content(self._call.raw + self._tail)


class LlamaCalls:
    """Calls in the format `{"name": ..., "parameters": {...}}`, separated by `;`. They are the whole answer."""

    opens = ("<|python_tag|>",)
    specials = ()

    def __init__(self, tools: Tools) -> None:
        self._is_tool = tools.__contains__
        self._call = JsonCall(self._is_tool)

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        parts: list[AnswerPart] = []
        while True:
            if not self._call.raw and not self._call.named:
                text = text.lstrip(" \t\r\n;,")
            parts += self._call.push(text)
            if not self._call.ended:
                return parts, None
            if not self._call.named:
                return parts, self._call.raw + self._call.rest
            text, self._call = self._call.rest, JsonCall(self._is_tool)

    def end(self) -> list[AnswerPart]:
        return [] if self._call.named else _content(self._call.raw)


class _Mistral(Enum):
    BEGIN = auto()
    LIST = auto()
    NAME = auto()
    ARGUMENTS = auto()


class MistralCalls:
    """Calls in the format `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`.

    The second format repeats the marker for each call.
    """

    opens = ("[TOOL_CALLS]",)
    specials = ("[ARGS]", "[CALL_ID]")

    def __init__(self, _tools: Tools) -> None:
        self._state = _Mistral.BEGIN
        self._held = ""
        self._call = JsonCall()
        self._arguments = JsonText()

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        if self._state is _Mistral.BEGIN:
            text = text.lstrip()
            if not text:
                return [], None
            self._state = _Mistral.LIST if text[0] in "[{" else _Mistral.NAME
            text = text.removeprefix("[")
        if self._state is _Mistral.LIST:
            return self._list(text)
        parts: list[AnswerPart] = []
        if self._state is _Mistral.NAME:
            self._held += text
            name, brace, text = self._held.partition("{")
            if not brace:
                return [], None
            self._held, self._state, text = "", _Mistral.ARGUMENTS, brace + text
            parts.append(AnswerPart(PartKind.CALL, _mistral_name(name)))
        size = self._arguments.push(text)
        parts += [AnswerPart(PartKind.ARGUMENTS, text[:size])] if size else []
        return parts, text[size:] if self._arguments.ended else None

    def end(self) -> list[AnswerPart]:
        if self._state is _Mistral.LIST:
            return [] if self._call.named else _content(self._call.raw)
        return _content(self._held)

    def _list(self, text: str) -> tuple[list[AnswerPart], str | None]:
        parts: list[AnswerPart] = []
        while True:
            if not self._call.raw and not self._call.named:
                text = text.lstrip(" \t\r\n,")
                if text[:1] == "]":
                    return parts, text[1:]
            parts += self._call.push(text)
            if not self._call.ended:
                return parts, None
            if not self._call.named:
                return [*parts, *_content(self._call.raw)], self._call.rest
            text, self._call = self._call.rest, JsonCall()


def _mistral_name(text: str) -> str:
    return text.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()


class _DeepSeek(Enum):
    BETWEEN = auto()
    HEAD = auto()
    NAME = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class DeepSeekCalls:
    """Calls between a begin and an end mark, each call between another pair of marks.

    V3 and R1 write `function<sep>name`, a newline and a fenced block of JSON. V3.1 writes `name<sep>{...}`.
    """

    opens = ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)
    specials = (
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
    )

    def __init__(self, _tools: Tools) -> None:
        self._state = _DeepSeek.BETWEEN
        self._held = ""
        self._head = ""
        self._arguments = JsonText()

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        all_end, begin, sep, end = self.specials
        parts: list[AnswerPart] = []
        self._held += text
        while True:
            if self._state is _DeepSeek.BETWEEN:
                at = self._held.find(all_end)
                if at >= 0 and begin not in self._held[:at]:
                    return parts, self._held[at + len(all_end) :]
                found = self._pass(begin, _DeepSeek.HEAD) is not None
            elif self._state is _DeepSeek.HEAD:
                head = self._pass(sep, _DeepSeek.NAME)
                found, self._head = head is not None, head or ""
            elif self._state is _DeepSeek.NAME:
                found = self._name(parts)
            elif self._state is _DeepSeek.ARGUMENTS:
                found = self._argue(parts)
            else:
                found = self._pass(end, _DeepSeek.BETWEEN) is not None
            if not found:
                return parts, None

    def end(self) -> list[AnswerPart]:
        # An answer that ends before or between calls contains no usable text.
        return []

    def _pass(self, marker: str, state: _DeepSeek) -> str | None:
        """Consume text through the next marker and return the text before it, or None if there is no marker yet."""
        before, found, after = self._held.partition(marker)
        if not found:
            return None
        self._held, self._state = after, state
        return before

    def _name(self, parts: list[AnswerPart]) -> bool:
        before, brace, after = self._held.partition("{")
        if not brace:
            return False
        lines = before.split()
        parts.append(AnswerPart(PartKind.CALL, self._tool_name(lines[0] if lines else self._head.strip())))
        self._held, self._state, self._arguments = brace + after, _DeepSeek.ARGUMENTS, JsonText()
        return True

    @staticmethod
    def _tool_name(written: str) -> str:
        return written

    def _argue(self, parts: list[AnswerPart]) -> bool:
        size = self._arguments.push(self._held)
        if size:
            parts.append(AnswerPart(PartKind.ARGUMENTS, self._held[:size]))
        self._held = self._held[size:]
        if self._arguments.ended:
            self._state = _DeepSeek.TAIL
        return self._arguments.ended


class KimiCalls(DeepSeekCalls):
    """The format of Kimi K2, which has the structure of DeepSeek's.

    The tool's name is part of the call's id, `functions.NAME:0`, which precedes the arguments.
    """

    opens = ("<|tool_calls_section_begin|>",)
    specials = (
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )

    @staticmethod
    def _tool_name(written: str) -> str:
        return written.removeprefix("functions.").rpartition(":")[0] or written


def _content(text: str) -> list[AnswerPart]:
    text = text.strip()
    return [AnswerPart(PartKind.CONTENT, text)] if text else []
