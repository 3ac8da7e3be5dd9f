"""A proof that the alternatives of a JSON schema exclude one another, so that `oneOf` may be read as `anyOf`. Pure.

All schemas here are normalised (`libs/model/json_schema.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

# The upper bound of comparisons for one `oneOf`. If more are needed, the proof fails.
MAX_COMPARISONS: Final = 20_000
_MAX_DEPTH: Final = 8
TYPES: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
Schema = dict[str, Any] | bool
"""A JSON schema; {} allows every value, False none."""


class Alternatives:
    """A check whether alternatives in normalised schemas exclude one another."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._left = MAX_COMPARISONS

    def prove(self, schema: dict[str, Any]) -> bool:
        """Replace `oneOf` by `anyOf` if no value matches two of its alternatives. Return whether that is so.

        If objects differ in the value of one property, that property becomes required. It is pydantic's discriminator,
        which pydantic's schemas do not require if it has a default.
        """
        listed = schema["oneOf"]
        if not self._apart(listed):
            tag = self._tag(listed)
            if tag is None:
                return False
            listed = [self._with(each, tag) for each in listed]
        entries = list(schema.items())
        schema.clear()
        for key, value in entries:
            if key != "oneOf":
                schema[key] = value
            elif "anyOf" not in dict(entries):
                schema["anyOf"] = listed
        if "anyOf" in dict(entries):
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": listed}]
        return True

    def _with(self, schema: Schema, required: str) -> Schema:
        # The definition itself is changed, wherever it is used, because the library follows no circular reference with
        # keywords beside it.
        target = schema
        while isinstance(target, dict) and set(target) == {"$ref"}:
            target = self._definitions[name_of(target)]
        if isinstance(target, dict):
            target["required"] = [*dict.fromkeys([*target.get("required", ()), required])]
        return schema

    def _pairs(self, listed: Sequence[Schema]) -> Iterator[tuple[Schema, Schema]]:
        return ((one, other) for at, one in enumerate(listed) for other in listed[:at])

    def _apart(self, listed: Sequence[Schema]) -> bool:
        return all(self._exclude(one, other, _MAX_DEPTH) for one, other in self._pairs(listed))

    def _tag(self, listed: Sequence[Schema]) -> str | None:
        """Return the property whose values distinguish all alternatives; None if there is none."""
        every = [self._conjuncts(each, _MAX_DEPTH) for each in listed]
        if any(not any(part.get("type") == "object" for part in parts) for parts in every):
            return None
        known = [{key: value for part in parts for key, value in part.get("properties", {}).items()} for parts in every]
        shared = [key for key in known[0] if all(key in properties for properties in known)]
        return next((key for key in shared if self._apart([properties[key] for properties in known])), None)

    def _conjuncts(self, schema: Schema, depth: int) -> list[dict[str, Any]]:
        """Return the schemas that an instance must all match. References are followed up to `depth`."""
        if not isinstance(schema, dict) or not depth:
            return []
        found = [schema]
        if "$ref" in schema:
            found += self._conjuncts(self._definitions.get(name_of(schema), {}), depth - 1)
        for each in schema.get("allOf", ()):
            found += self._conjuncts(each, depth - 1)
        return found

    def _exclude(self, one: Schema, other: Schema, depth: int) -> bool:
        self._left -= 1
        if self._left < 0 or not depth:
            return False
        if one is False or other is False:
            return True
        mine, others = self._conjuncts(one, depth), self._conjuncts(other, depth)
        if any(_types_exclude(a, b) or _values_exclude(a, b) for a in mine for b in others):
            return True
        for parts, whole in ((mine, other), (others, one)):
            for part in parts:
                for key in ("anyOf", "oneOf"):
                    if key in part and all(self._exclude(each, whole, depth - 1) for each in part[key]):
                        return True
        return self._objects_exclude(mine, others, depth)

    def _objects_exclude(self, mine: list[dict[str, Any]], others: list[dict[str, Any]], depth: int) -> bool:
        """Return whether some required property has no value that both objects allow."""
        if not all(any(part.get("type") == "object" for part in parts) for parts in (mine, others)):
            return False
        required = {key for part in (*mine, *others) for key in part.get("required", ())}
        return any(
            self._exclude(a, b, depth - 1)
            for key in required
            for a in map(_property(key), mine)
            for b in map(_property(key), others)
        )


def _property(key: str) -> Callable[[dict[str, Any]], Schema]:
    """Return a function that returns a schema's subschema for the property `key`."""

    def of(schema: dict[str, Any]) -> Schema:
        properties: dict[str, Schema] = schema.get("properties", {})
        if key in properties:
            return properties[key]
        closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        return False if closed else {}

    return of


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema's `type` and `enum` allow. "number" includes "integer"."""
    named = schema.get("type")
    kinds = TYPES if named is None else frozenset([named] if isinstance(named, str) else named)
    kinds = kinds | {"integer"} if "number" in kinds else kinds
    return kinds & frozenset(map(_type_of, schema["enum"])) if "enum" in schema else kinds


def _type_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _types_exclude(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return not types_of(one) & types_of(other)


def _values_exclude(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if "enum" not in one or "enum" not in other:
        return False
    return not any(same(a, b) for a in one["enum"] for b in other["enum"])


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def name_of(schema: Mapping[str, Any]) -> str:
    """Return the name of the definition that a schema refers to; empty if it refers to none."""
    return str(schema.get("$ref", "")).rpartition("/")[2]
