"""Rules for calls whose arguments are written one by one between marks, in llguidance's Lark dialect. Pure."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from libs.model.grammar import choice_rule, json_rule
from services.gateway.answers.marked_calls import Marks, value_types

_DEFINITIONS: Final = ("$defs", "definitions")
# A larger bound on a text's length is not enforced by the grammar.
_MAX_BOUND: Final = 4096


class Writer(Protocol):
    """A writer of texts as terminals of a grammar."""

    def __call__(self, *texts: str) -> str:
        """Return the terminals of these texts in sequence."""
        ...

    def until(self, closes: str, rule: str = ..., text: str = ...) -> str:
        """Return a terminal for text through `closes`."""
        ...


def marked_call(marks: Marks, write: Writer, place: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return rule `call_{place}` for a call of the tool `name`, and the rules of its arguments.

    The call has all required arguments and any of the others, in the order of the schema.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    rules, arguments = [], []
    for number, (key, value) in enumerate(properties.items()):
        rule = f"value_{place}_{number}"
        written = write(marks.key[0], key, marks.key[1], marks.line, marks.value[0])
        after = f"{marks.line}{marks.value[1]}"
        if "string" in value_types(value) and "enum" not in value:
            rules.append("")  # the writer keeps that rule
            argument = f"{written} {write.until(after, rule, _text(value))} {write(marks.line)}"
        else:
            rules.append(f"{rule}: {_value(value, schema)}")
            argument = f"{written} {rule} {write(after, marks.line)}"
        arguments.append(argument if key in schema.get("required", ()) else f"({argument})?")
    opens = (*marks.name[:1], name, marks.name[1], marks.line) if marks.name else (name, "\n")
    return [f"call_{place}: {write(*opens)} {' '.join(arguments)} {write(marks.ends)}", *filter(None, rules)]


def _text(schema: Any) -> str:
    most = schema.get("maxLength") if isinstance(schema, Mapping) else None
    least = schema.get("minLength", 0) if isinstance(schema, Mapping) else 0
    if not isinstance(most, int) or most > _MAX_BOUND or not isinstance(least, int) or least > most:
        return r"/(.|\n)*/"
    return rf"/(.|\n){{{least},{most}}}/"


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if values and all(isinstance(value, str) for value in values):
        return choice_rule(values)
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    return json_rule({**shared, **schema} if isinstance(schema, Mapping) else {})
