"""The call formats that write arguments one by one between marks rather than as JSON. Pure.

The formats are those of the models' chat templates: Qwen3-Coder, GLM 4.5 and 4.6, MiniMax M2, Seed-OSS. The tool's
schema decides whether a value is a number or a text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Final, Literal

from services.gateway.answers.parts import AnswerPart, PartKind

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of tools' arguments, by tool name."""
_TEXT: Final = frozenset({"string"})
_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around the parts of a call."""

    name: tuple[str, str] | None
    """The marks around the name; None if it extends from the start to the first key or the end."""
    key: tuple[str, str]
    value: tuple[str, str]
    """The marks around a value. The first is empty if a value directly follows its key."""
    ends: str
    """The mark after a call, if more calls may precede the closing mark; empty if that mark ends the call."""
    line: str = ""
    """The text that a template writes after a name and around a value."""


class _State(Enum):
    BETWEEN = auto()
    NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


class MarkedCalls:
    """A parser of one such format. Values are returned whole, since a value's type may only show at its end."""

    opens: ClassVar[tuple[str, ...]]
    specials: ClassVar[tuple[str, ...]]
    """The format's special tokens, of which the first ends all calls."""
    marks: ClassVar[Marks]

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._state = _State.BETWEEN if self.marks.name else _State.NAME
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
        # A call that breaks off is left as it is; one without a name would be of no use.
        return []

    def _step(self, parts: list[AnswerPart]) -> Literal[True] | str | None:
        """Consume one mark. Return True to continue, None if more text is needed, else the text after all calls."""
        marks, state = self.marks, self._state
        if state is _State.BETWEEN:
            assert marks.name is not None
            return self._pass({marks.name[0]: _State.NAME}, closes=True)
        if state is _State.NAME:
            return self._take_name(parts)
        if state is _State.ARGUMENTS:
            return self._next_argument(parts)
        if state is _State.KEY:
            key = self._until(marks.key[1])
            if key is None:
                return None
            self._key, self._state = key.strip(), _State.BEFORE_VALUE if marks.value[0] else _State.VALUE
            return True
        if state is _State.BEFORE_VALUE:
            return self._pass({marks.value[0]: _State.VALUE}, closes=False)
        value = self._until(marks.value[1])
        if value is None:
            return None
        parts.append(AnswerPart(PartKind.ARGUMENTS, self._argument(value)))
        self._state = _State.ARGUMENTS
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
        self._name, self._arguments, self._state = name.strip(), 0, _State.ARGUMENTS
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
            self._state = _State.KEY
            return True
        parts.append(AnswerPart(PartKind.ARGUMENTS, "}" if self._arguments else "{}"))
        if not marks.ends:
            return self._held
        self._state = _State.BETWEEN
        return True

    def _pass(self, marks: Mapping[str, _State], *, closes: bool) -> Literal[True] | str | None:
        """Consume text through the first of these marks. With `closes`, the mark that ends all calls may precede it."""
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
        """Consume text through a mark and return the text before it, or None if there is no mark yet."""
        before, found, after = self._held.partition(mark)
        if not found:
            return None
        self._held = after
        return before

    def _argument(self, text: str) -> str:
        """Return the argument as the next member of the JSON object."""
        before = ", " if self._arguments else "{"
        self._arguments += 1
        schema = self._tools.get(self._name, {}).get("properties", {}).get(self._key, {})
        return f"{before}{json.dumps(self._key, ensure_ascii=False)}: {_as_json(_trimmed(text), schema)}"


def _trimmed(text: str) -> str:
    # Templates write one line break on either side.
    return text.removeprefix("\n").removesuffix("\n")


def _as_json(text: str, schema: Any) -> str:
    """Return a value as JSON, of a type that its schema allows if possible."""
    types = value_types(schema)
    if types == _TEXT:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _TYPES[type(value)]
    allowed = kind in types or (kind == "integer" and "number" in types)
    # Where a text will do, what reads as something that is not wanted is one.
    return json.dumps(text, ensure_ascii=False) if "string" in types and not allowed else text.strip()


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def value_types(schema: Any) -> frozenset[str]:
    """Return the JSON types that the top level of a schema allows, or text if it names none."""
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
    """The form `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with newlines."""

    opens = ("<tool_call>",)
    specials = ("</tool_call>",)
    marks = _PARAMETERS


class SeedCalls(MarkedCalls):
    """The form of Qwen3-Coder between Seed-OSS's own tags."""

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
    """The form `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with line breaks."""

    opens = ("<tool_call>",)
    specials = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    marks = Marks(name=None, key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), ends="")
