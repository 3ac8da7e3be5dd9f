"""Tests of JSON schemas as clients write them: each keyword is ignored, enforced or refused by name."""

import json
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from libs.model.grammar import json_rule, kept_schema
from libs.model.json_schema import FORMATS, MAX_DEPTH, SchemaRefused, normalise

BYTES = LLTokenizer("byte")
TEXT = {"type": "string"}
REF = {"$ref": "#/$defs/a"}


def accepts(schema: dict[str, Any], instance: Any) -> bool:
    """Return whether the instance is a possible answer under this schema, written as models write it."""
    matcher = LLMatcher(BYTES, f"start: {json_rule(schema)}\n", log_level=0)
    text = json.dumps(instance, ensure_ascii=False).encode()
    return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())


def kept(schema: dict[str, Any]) -> dict[str, Any]:
    found, fault = kept_schema(schema)
    assert fault == ""
    return found


DRAFTS = [
    "https://json-schema.org/draft/2020-12/schema",
    "http://json-schema.org/draft/2020-12/schema#",
    "https://json-schema.org/draft/2020-12/schema/",
    "https://json-schema.org/draft/2019-09/schema#",
    "https://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-07/schema#",
    "http://www.json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-04/hyper-schema#",
    "http://json-schema.org/schema#",
]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_is_recognised_in_any_spelling_of_its_address(draft: str) -> None:
    assert kept({"$schema": draft, "type": "string"}) == TEXT


ASKS_NOTHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, {"type": "array", "maxItems": 1}),
    ({"type": "string", "uniqueItems": True}, TEXT),
    ({"type": "string", "minLength": 0, "maxLength": 5.0}, {"type": "string", "maxLength": 5}),
    ({"type": "string", "minLength": 1.0}, {"type": "string", "minLength": 1}),
    ({"type": "array", "minItems": 0, "items": True, "prefixItems": []}, {"type": "array"}),
    ({"type": "array", "contains": {}, "minContains": 2}, {"type": "array", "minItems": 2}),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0}, {"type": "array"}),
    ({"minContains": 3, "maxContains": 1}, {}),
    ({"type": "object", "additionalProperties": True, "patternProperties": {}, "required": []}, {"type": "object"}),
    ({"dependentRequired": {}, "dependentSchemas": {"a": True}, "dependencies": {"a": ["a"], "b": {}}}, {}),
    ({"required": ["a"], "dependentRequired": {"b": ["a"]}}, {"required": ["a"]}),
    ({"required": ["a"], "dependentRequired": {"a": ["b"]}}, {"required": ["a", "b"]}),
    ({"required": ["a"], "minProperties": 1}, {"required": ["a"]}),
    ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
    ({"type": "object", "propertyNames": {"format": "email"}}, {"type": "object"}),
    ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
    ({"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False},
     {"type": "array", "prefixItems": [TEXT], "items": False}),
    ({"type": "array", "items": [TEXT], "additionalItems": False},
     {"type": "array", "prefixItems": [TEXT], "items": False}),
    ({"type": "array", "items": TEXT, "additionalItems": False}, {"type": "array", "items": TEXT}),
    ({"allOf": [], "type": "string"}, TEXT),
    ({"allOf": [TEXT]}, TEXT),
    (
        {"propertyNames": {"enum": ["a"]}, "patternProperties": {}},
        {"properties": {"a": {}}, "additionalProperties": False},
    ),
    (
        {"allOf": [{"title": "t"}, True], "type": "object", "unevaluatedProperties": False},
        {"type": "object", "additionalProperties": False},
    ),
    ({"allOf": [{}, True, TEXT, {"title": "t"}]}, TEXT),
    ({"anyOf": [{}, TEXT], "type": "null"}, {"type": "null"}),
    ({"anyOf": [{"not": {}}, TEXT]}, TEXT),
    ({"oneOf": [False, TEXT]}, TEXT),
    ({"not": False, "if": TEXT, "type": "string"}, TEXT),
    ({"then": TEXT, "else": False}, {}),
    ({"if": True, "then": TEXT, "else": False}, TEXT),
    ({"if": TEXT, "then": {}, "else": {"title": "t"}}, {}),
    ({"type": "integer", "exclusiveMinimum": False, "format": "int32"}, {"type": "integer", "exclusiveMinimum": False}),
    ({"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": "c",
      "readOnly": True, "writeOnly": True, "contentEncoding": "base64", "contentMediaType": "a/b", "nullable": True,
      "x-order": 1, "discriminator": {"propertyName": "a"}, "contentSchema": {"not": TEXT}, "$anchor": "a"}, {}),
    ({"type": "object", "properties": {"title": {"type": "string", "title": "t"}, "not": True}},
     {"type": "object", "properties": {"title": TEXT, "not": {}}}),
    *(({"type": "string", "format": name}, TEXT)
      for name in ("password", "binary", "path", "uuid4", "byte", "int64", "date-time-local", "color", "")),
    *(({"type": "string", "format": name}, {"type": "string", "format": name}) for name in sorted(FORMATS)),
    ({"const": "a"}, {"enum": ["a"]}),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
     {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), ASKS_NOTHING, ids=str)
def test_keywords_without_constraints_are_ignored(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert kept(schema) == expected


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "other": REF}}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "age": {"type": "integer"}}}
ALTERNATIVES: list[tuple[list[Any], list[Any], list[Any]]] = [
    ([REF, {"type": "null"}], ["x", None], [1]),
    ([{"type": "integer"}, TEXT, {"enum": [None, 1.5]}], [1, "x", None, 1.5], [2.5, True]),
    ([{"const": "a"}, {"enum": ["b", "c"]}], ["a", "b"], ["d"]),
    ([{"allOf": [REF]}, {"anyOf": [{"type": "null"}, {"type": "boolean"}]}], ["x", True], [1]),
    ([CAT, DOG], [{"kind": "cat"}, {"kind": "dog", "age": 1}], [{}, {"age": 1}, {"kind": "cow"}]),
    ([{**CAT, "additionalProperties": False}, {"type": "object", "required": ["x"]}], [{"x": 1}, {"kind": "cat"}], []),
]


@pytest.mark.parametrize(("alternatives", "valid", "invalid"), ALTERNATIVES, ids=str)
def test_one_of_exclusive_alternatives_may_be_any(
    alternatives: list[Any], valid: list[Any], invalid: list[Any]
) -> None:
    schema = {"oneOf": alternatives, "$defs": {"a": TEXT}}
    found = kept(schema)
    for instance in valid:
        jsonschema.validate(instance, schema)
        assert accepts(found, instance), instance
    assert not any(accepts(found, instance) for instance in invalid)


REFERENCES: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": TEXT}},
    {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}, "b": TEXT}},
    {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": TEXT}},
    {"$ref": "#here", "$defs": {"a": {"$anchor": "here", **TEXT}}},
    {"$ref": "name", "$defs": {"a": {"$id": "name", **TEXT}}},
    {"$id": "http://a/b", "$ref": "c#/$defs/d", "$defs": {"x": {"$id": "c", "$defs": {"d": TEXT}}}},
    {"$schema": "http://json-schema.org/draft-04/schema#", "$ref": "t", "definitions": {"a": {"id": "t", **TEXT}}},
    {"$id": "http://a/b", "$ref": "http://a/b#/$defs/a", "$defs": {"a": TEXT}},
]


@pytest.mark.parametrize("schema", REFERENCES, ids=str)
def test_references_within_the_schema_are_followed(schema: dict[str, Any]) -> None:
    found = kept(schema)
    assert accepts(found, "x") and not accepts(found, 1)


def test_schemas_may_refer_to_themselves() -> None:
    schema = {
        "$id": "node",
        "type": "object",
        "properties": {
            "next": {"$ref": "#", "description": "d"},
            "all": {"type": "array", "items": {"$ref": "node"}},
            "maybe": {"oneOf": [{"$ref": "#/properties/next"}, {"type": "null"}]},
        },
        "additionalProperties": False,
    }
    found = kept(schema)
    assert found["properties"].keys() == schema["properties"].keys()  # type: ignore[attr-defined]
    for valid in ({"next": {"next": {}}}, {"all": [{}, {"all": []}], "maybe": None}, {"maybe": {"maybe": None}}):
        assert accepts(found, valid)
    assert not accepts(found, {"next": {"x": 1}})


NAMES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"propertyNames": REF, "additionalProperties": {"type": "integer"}}, [{}, {"x": 1}, {"x": 1, "y": 2}], [{"z": 1}]),
    ({"propertyNames": REF, "properties": {"x": TEXT, "z": True}}, [{"x": "a", "y": 1}], [{"x": 1}, {"z": 1}]),
    ({"propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": TEXT}, [{"abc": ""}], [{"d": ""}, {"a": 1}]),
    ({"propertyNames": {"minLength": 1, "maxLength": 2}}, [{"a": 1, "\u00e4\n": 2}], [{"": 1}, {"abc": 1}]),
    ({"propertyNames": False}, [{}], [{"a": 1}]),
    ({"propertyNames": {"type": "string", "minLength": 1}, "unevaluatedProperties": False}, [{}], [{"a": 1}]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), NAMES, ids=str)
def test_property_names_are_enforced(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    whole = {"type": "object", **schema, "$defs": {"a": {"type": "string", "enum": ["x", "y"]}}}
    for instance in valid:
        jsonschema.validate(instance, whole)
        assert accepts(kept(whole), instance)
    for instance in invalid:
        assert not jsonschema.Draft202012Validator(whole).is_valid(instance)
        assert not accepts(kept(whole), instance)


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


OBJECT = {"type": "object"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, r"uniqueItems: true is not served \(at #/pr.*a\)"),
    ({"contains": TEXT}, "contains is not served"),
    ({"contains": {}, "minItems": -1}, "minItems must be a whole number"),
    ({"minLength": 1.5}, "minLength must be a whole number of 0 or more, not 1.5"),
    ({"maxLength": float("inf")}, "whole number"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired is not served"),
    ({"dependencies": {"a": OBJECT}}, "dependencies is not served"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if is not served"),
    ({"not": TEXT}, "not is not served"),
    ({"not": {}}, "no value can match it"),
    ({"enum": []}, "no value can match it"),
    ({"enum": "a"}, "enum must be a list"),
    ({"anyOf": []}, "anyOf is empty"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "not known to exclude one another"),
    ({"oneOf": [{}, TEXT]}, "not known to exclude one another"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "not known to exclude one another"),
    ({"$ref": "#"}, "refers to itself alone"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself alone"),
    ({"propertyNames": {"$ref": "#"}}, "nested deeper|refers to itself"),
    ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "nothing is fetched"),
    ({"$ref": "#/nowhere"}, "does not exist"),
    ({"$dynamicRef": "#a"}, r"\$dynamicRef is not served"),
    ({"$schema": "https://example.com/own"}, r"\$schema: https://example.com/own is none of"),
    ({"allOf": [OBJECT], "unevaluatedProperties": False}, "unevaluatedProperties is not served"),
    ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"),
    ({"type": "wood"}, "Invalid type: wood"),
    ({"type": None, "properties": []}, "properties must be an object"),
    ({"format": 1}, "format must be a string"),
    ({"items": 1}, r"must be an object or a boolean \(at #/items\)"),
    ({"const": 2**53 + 1}, r"beyond 2\*\*53"),
    ({"type": "integer", "minimum": 2**60}, r"beyond 2\*\*53"),
    ({"required": ["a"], "minProperties": 3}, "minProperties of more than one beyond those required"),
    ({"required": True}, "required must be a list of strings"),
    (nested(MAX_DEPTH + 1), "nested deeper"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_constraint_that_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(SchemaRefused, match=reason):
        normalise(schema)
    assert kept_schema(schema)[1]


# ------------------------------------------------------------ as libraries write them


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"] = "cat"
    friends: list["Cat | Dog"] = []


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    age: Annotated[int, Field(ge=0, le=20, deprecated=True)] = 0


class Owner(BaseModel):
    """A model with the features that are common in practice."""

    name: str = Field(min_length=1, max_length=8, examples=["Ann"], title="Name")
    secret: SecretStr | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colour: Colour = Colour.RED
    by_colour: dict[Colour, int] = {}
    pair: tuple[int, str] = (1, "a")
    share: Annotated[float, Field(gt=0, le=1)] = 0.5


ZOD: list[tuple[dict[str, Any], Any, Any]] = [
    (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
         "properties": {"n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
                        "r": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
                        "never": {"not": {}}, "u": {"type": "string", "format": "uri"}},
         "required": ["n"], "additionalProperties": False},
        {"n": 1, "r": {"a": None}}, {"n": 1, "never": 1},
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/Tree",
         "definitions": {"Tree": {"type": "object", "properties": {
             "left": {"anyOf": [{"$ref": "#/definitions/Tree"}, {"type": "null"}]},
             "label": {"anyOf": [{"not": {}}, {"type": "string"}]},
             "same": {"$ref": "#/definitions/Tree/properties/left"}},
             "additionalProperties": False}}},
        {"left": {"left": None}, "label": "x", "same": None}, {"left": 1},
    ),
]  # fmt: skip
OTHERS: list[tuple[dict[str, Any], Any, Any]] = [
    (  # OpenAI's strict mode
        {"type": "object", "properties": {"unit": {"type": ["string", "null"], "enum": ["F", "C", None]}},
         "required": ["unit"], "additionalProperties": False},
        {"unit": None}, {"unit": "K"},
    ),
    (  # a tool of an MCP server
        {"$schema": "http://json-schema.org/draft-07/schema", "type": "object", "title": "T", "properties": {
            "path": {"type": "string", "format": "path", "description": "d"},
            "limit": {"type": "integer", "minimum": 1.0, "default": 10, "format": "uint32"},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": False, "minItems": 0}}},
        {"path": "/a", "limit": 3, "tags": ["x"]}, {"limit": 0},
    ),
    (  # OpenAPI 3.0
        {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/components/A"}], "nullable": True}},
         "components": {"A": {"type": "number", "exclusiveMinimum": True, "minimum": 0, "format": "double"}}},
        {"a": 1}, {"a": 0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [*ZOD, *OTHERS], ids=["zod 4", "zod 3", "openai", "mcp", "oas"]
)
def test_schemas_generated_by_libraries_are_enforced(schema: dict[str, Any], valid: Any, invalid: Any) -> None:
    assert accepts(kept(schema), valid) and not accepts(kept(schema), invalid)


def test_schemas_of_pydantic_models_are_enforced() -> None:
    found = kept(Owner.model_json_schema())
    owner = {"name": "Ann", "secret": None, "pet": {"kind": "dog", "age": 3}, "colour": "blue", "by_colour": {"red": 1},
             "pair": [1, "b"], "share": 1.0}  # fmt: skip
    Owner.model_validate(owner)
    assert accepts(found, owner)
    for change in ({"name": ""}, {"pet": {"kind": "cow"}}, {"by_colour": {"green": 1}}, {"pair": [1]}, {"share": 0}):
        assert not accepts(found, {**owner, **change})
