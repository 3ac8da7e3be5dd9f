"""Schemas without the constraints that a grammar cannot express.

The complete answer is checked for these constraints.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from libs.model.json_schema import normalise
from libs.model.schema_keywords import NO_SCHEMAS, NotEnforced, SchemaRefused

MAX_OMITTED: Final = 64
"""The upper bound of omitted constraints in one schema."""
# Keywords without effect once another one is omitted, which are omitted with it.
_WITH: Final[Mapping[str, tuple[str, ...]]] = {
    "if": ("then", "else"),
    "contains": ("minContains", "maxContains"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
}
# Parts of the grammar library's errors, with the keywords whose combination the library does not support.
_COMBINED: Final[Mapping[str, tuple[str, ...]]] = {
    "min/maxProperties only supported": ("minProperties", "maxProperties"),
    "are not disjoint": ("patternProperties",),
}
# Once one of these is omitted, `unevaluatedItems` and `unevaluatedProperties` would refuse what it had evaluated.
_EVALUATING: Final = ("if", "contains", "dependentSchemas", "$dynamicRef")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class LooseSchema(NamedTuple):
    schema: dict[str, Any]
    """The normalised schema. Every instance of the original is an instance of it."""
    omitted: tuple[str, ...] = ()
    """The JSON pointers of the keywords that the schema does not enforce."""
    reason: str = ""
    """The reason why the first omitted keyword cannot be enforced; empty if none is omitted."""


def loosen(
    schema: Mapping[str, Any], fault_of_pattern: Callable[[str], str], fault_of: Callable[[dict[str, Any]], str]
) -> LooseSchema:
    """Normalise a schema without the constraints that cannot be enforced.

    `fault_of_pattern` returns the reason why a regular expression cannot be enforced, and `fault_of` does so for a
    normalised schema. An empty reason means that it can. Raise SchemaRefused for a value that is no schema, a schema
    without instances, and a schema with more than `MAX_OMITTED` omitted constraints.
    """
    loose = copy.deepcopy(dict(schema))
    omitted: list[str] = []
    reason = ""
    for _ in range(MAX_OMITTED + 1):
        try:
            found = normalise(loose)
        except NotEnforced as error:
            assert error.schema is not None  # the normaliser sets it before it raises
            reason = reason or str(error)
            omitted.append(f"{_pointer(loose, error.schema)}/{_escaped(error.keyword)}")
            _omit(error.schema, error.keyword)
            if error.keyword in _EVALUATING:
                omitted += _omit_unevaluated(loose)
            continue
        # A pattern in a definition without references has no effect.
        used = {each for value, _ in _values(found, "#") for each in _patterns(value)}
        faults = _bad_patterns(loose, {each: fault for each in used if (fault := fault_of_pattern(each))})
        if not faults:
            fault = fault_of(found)
            faults = _combined(loose, fault)
            if fault and not faults:
                raise SchemaRefused(fault)
        if not faults:
            return LooseSchema(found, _outermost(omitted), reason)
        for where, keyword, pointer, fault in faults:
            reason = reason or f"{keyword}: {fault} (at {pointer})"
            omitted.append(pointer)
            _omit(where, keyword)
        if len(omitted) > MAX_OMITTED:
            break
    raise SchemaRefused(f"{reason}, and more than {MAX_OMITTED} constraints of it cannot be enforced")


def _omit(schema: dict[str, Any], keyword: str) -> None:
    if keyword == "oneOf":
        # At least one of the alternatives still applies.
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": schema.pop("oneOf")}]
        return
    for each in (keyword, *_WITH.get(keyword, ())):
        schema.pop(each, None)


def _omit_unevaluated(root: dict[str, Any]) -> list[str]:
    found = [
        (each, keyword, f"{pointer}/{keyword}")
        for each, pointer in _subschemas(root, "#")
        for keyword in ("unevaluatedItems", "unevaluatedProperties")
        if keyword in each
    ]
    for each, keyword, _ in found:
        del each[keyword]
    return [pointer for _, _, pointer in found]


def _outermost(pointers: list[str]) -> tuple[str, ...]:
    """Return the pointers in order, without those that lie inside another one."""
    conditions = [each[: -len("if")] for each in pointers if each.endswith("/if")]
    whole = [*pointers, *(f"{each}{branch}" for each in conditions for branch in ("then", "else"))]
    return tuple(dict.fromkeys(each for each in pointers if not any(each.startswith(f"{other}/") for other in whole)))


def _bad_patterns(schema: dict[str, Any], faults: Mapping[str, str]) -> list[tuple[dict[str, Any], str, str, str]]:
    """Return (subschema, keyword, pointer, fault) for each keyword with a pattern that cannot be enforced."""
    return [
        (each, keyword, f"{pointer}/{keyword}", faults[pattern])
        for each, pointer in _subschemas(schema, "#")
        for pattern, keyword in _patterns(each).items()
        if pattern in faults
    ]


def _combined(schema: dict[str, Any], fault: str) -> list[tuple[dict[str, Any], str, str, str]]:
    """Return (subschema, keyword, pointer, fault) for each keyword that the library's error is about."""
    keywords = next((each for text, each in _COMBINED.items() if text in fault), ())
    return [
        (each, keyword, f"{pointer}/{keyword}", fault)
        for each, pointer in _subschemas(schema, "#")
        for keyword in keywords
        if keyword in each
    ]


def _patterns(schema: Any) -> dict[str, str]:
    """Return the keyword of each pattern in one schema."""
    if not isinstance(schema, dict):
        return {}
    listed, own = schema.get("patternProperties"), schema.get("pattern")
    found = dict.fromkeys(listed, "patternProperties") if isinstance(listed, dict) else {}
    return {**found, own: "pattern"} if isinstance(own, str) else found


def _pointer(root: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return the JSON pointer of a subschema, which is found by identity."""
    return next((pointer for each, pointer in _values(root, "#") if each is wanted), "#")


def _values(value: Any, pointer: str) -> Iterator[tuple[Any, str]]:
    yield value, pointer
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _values(each, f"{pointer}/{_escaped(key)}")
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _values(each, f"{pointer}/{place}")


def _subschemas(schema: Any, pointer: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all subschemas with their pointers. Values of `enum` and similar keywords are not subschemas."""
    if isinstance(schema, list):
        for place, each in enumerate(schema):
            yield from _subschemas(each, f"{pointer}/{place}")
    if not isinstance(schema, dict):
        return
    yield schema, pointer
    for key, value in schema.items():
        below = f"{pointer}/{_escaped(key)}"
        if key in _MAPS and isinstance(value, dict):
            for name, each in value.items():
                yield from _subschemas(each, f"{below}/{_escaped(name)}")
        elif key not in NO_SCHEMAS:
            yield from _subschemas(value, below)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
