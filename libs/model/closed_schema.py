"""JSON schemas whose objects allow only named properties. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from libs.model.schema_keywords import MAX_DEPTH

# Of two schemas that apply to one object, each would forbid the other's properties.
_COMBINED: Final = frozenset(
    ("allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "$recursiveRef", "$dynamicRef")
)
_OPEN: Final = _COMBINED | {
    "anyOf", "$ref", "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
    "minProperties", "dependentRequired", "enum", "const",
}  # fmt: skip


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` in objects that name their properties and nothing more.

    Each instance of the result is an instance of the schema. An object remains open if closing it could leave no
    instance.
    """
    root = dict(schema)
    return root if _combines_references(root) else _closed(root, 0)


def _closed(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            found[key] = {name: _closed_any(each, depth) for name, each in value.items()}
        elif (key == "anyOf" and "properties" not in schema) or key in ("items", "prefixItems"):
            found[key] = _closed_any(value, depth)
    if _closes(schema):
        found["additionalProperties"] = False
    return found


def _closed_any(value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [_closed_any(each, depth + 1) for each in value]
    return _closed(value, depth + 1) if isinstance(value, dict) else value


def _closes(schema: dict[str, Any]) -> bool:
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not named or not _OPEN.isdisjoint(schema):
        return False
    return isinstance(required, list) and all(isinstance(each, str) and each in named for each in required)


def _combines_references(root: dict[str, Any]) -> bool:
    """Return whether a reference may apply to an object beside another schema."""
    refers = combines = False
    for each in _objects(root):
        refers = refers or "$ref" in each
        beside = "properties" in each and ("$ref" in each or "anyOf" in each)
        combines = combines or beside or not _COMBINED.isdisjoint(each)
    return refers and combines


def _objects(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
