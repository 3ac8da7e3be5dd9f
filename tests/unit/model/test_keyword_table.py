"""Tests that the table of docs/json-schema.md describes each keyword as the code treats it."""

import re
from pathlib import Path
from typing import Any, Final

import pytest

from libs.model.grammar import loose_schema

A: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
LISTS: Final = {"type": "array"}
EXAMPLES: Final[list[tuple[str, str, dict[str, Any], str]]] = [
    # keyword, kind, schema, the place of the keyword in it
    *[("type", "enforced", {"type": "null"}, ""), ("enum", "enforced", {"enum": [1]}, "")],
    ("const", "enforced", {"const": 1}, ""),
    *[(each, "enforced", {"type": "string", each: 2}, "") for each in ("minLength", "maxLength")],
    ("pattern", "enforced", {"type": "string", "pattern": "^a$"}, ""),
    *[("pattern", "checked", {"type": "string", "pattern": each}, "") for each in (r"(?!a)b", r"\ba", r"(a)\1")],
    ("format", "enforced", {"type": "string", "format": "date"}, ""),
    ("format", "annotation", {"type": "string", "format": "path"}, ""),
    *[
        (each, "enforced", {"type": "number", each: 2}, "")
        for each in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    ],
    ("items", "enforced", {**LISTS, "items": {"type": "null"}}, ""),
    ("prefixItems", "enforced", {**LISTS, "prefixItems": [{"type": "null"}]}, ""),
    ("additionalItems", "enforced", {**LISTS, "items": [{}], "additionalItems": False}, ""),
    *[(each, "enforced", {**LISTS, each: 2}, "") for each in ("minItems", "maxItems")],
    ("uniqueItems", "checked", {**LISTS, "uniqueItems": True}, ""),
    ("uniqueItems", "annotation", {**LISTS, "uniqueItems": False}, ""),
    ("contains", "checked", {**LISTS, "contains": {"const": 1}}, ""),
    *[
        (each, "checked", {**LISTS, "contains": {"const": 1}, each: 2}, "contains")
        for each in ("minContains", "maxContains")
    ],
    ("unevaluatedItems", "enforced", {**LISTS, "unevaluatedItems": False}, ""),
    ("unevaluatedItems", "checked", {**LISTS, "allOf": [{"prefixItems": [A]}], "unevaluatedItems": False}, ""),
    ("properties", "enforced", A, ""),
    ("patternProperties", "enforced", {"type": "object", "patternProperties": {"^a$": A}}, ""),
    ("patternProperties", "checked", {"type": "object", "patternProperties": {"(?=a)": A}}, ""),
    ("additionalProperties", "enforced", {**A, "additionalProperties": False}, ""),
    ("required", "enforced", {**A, "required": ["a"]}, ""),
    ("minProperties", "enforced", {**A, "required": ["a"], "minProperties": 2}, ""),
    ("minProperties", "checked", {**A, "minProperties": 1}, ""),
    ("minProperties", "checked", {**A, "minProperties": 2}, ""),
    ("maxProperties", "checked", {**A, "maxProperties": 2}, ""),
    ("maxProperties", "enforced", {"type": "object", "maxProperties": 2}, ""),
    ("patternProperties", "checked", {"type": "object", "patternProperties": {"^a": A, "b": A}}, ""),
    ("propertyNames", "enforced", {"type": "object", "propertyNames": {"enum": ["a"]}}, ""),
    ("propertyNames", "checked", {"type": "object", "propertyNames": {"not": {"const": "a"}}}, ""),
    ("dependentRequired", "enforced", {**A, "required": ["a"], "dependentRequired": {"a": ["b"]}}, ""),
    ("dependentRequired", "checked", {**A, "dependentRequired": {"a": ["b"]}}, ""),
    ("dependentSchemas", "checked", {**A, "dependentSchemas": {"a": {"required": ["b"]}}}, ""),
    ("dependencies", "checked", {**A, "dependencies": {"a": ["b"]}}, ""),
    ("unevaluatedProperties", "enforced", {**A, "unevaluatedProperties": False}, ""),
    ("unevaluatedProperties", "checked", {"allOf": [A], "unevaluatedProperties": False}, ""),
    ("allOf", "enforced", {"allOf": [{"type": "null"}]}, ""),
    ("anyOf", "enforced", {"anyOf": [{"type": "null"}, {"const": 1}]}, ""),
    ("oneOf", "enforced", {"oneOf": [{"type": "null"}, {"const": 1}]}, ""),
    ("oneOf", "checked", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ""),
    ("not", "checked", {"not": {"type": "null"}}, ""),
    ("if", "enforced", {"if": True, "then": {"type": "null"}}, ""),
    ("if", "checked", {"if": {"type": "string"}, "then": {"minLength": 2}}, ""),
    ("$ref", "enforced", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, ""),
    ("$ref", "refused", {"$ref": "https://example.com/a"}, ""),
    ("$recursiveRef", "enforced", {**LISTS, "items": {"$recursiveRef": "#"}}, "items"),
    ("$dynamicRef", "checked", {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}, ""),
    ("$schema", "annotation", {**A, "$schema": "http://json-schema.org/draft-07/schema"}, ""),
    ("$schema", "refused", {**A, "$schema": "https://example.com/a"}, ""),
    *[
        (each, "annotation", {**A, each: "a"}, "")
        for each in (
            *("title", "description", "$comment", "contentEncoding", "contentMediaType", "contentSchema"),
            *("$id", "$anchor", "$dynamicAnchor", "any other keyword"),
        )
    ],
    *[(each, "annotation", {**A, each: True}, "") for each in ("deprecated", "readOnly", "writeOnly")],
    *[("default", "annotation", {**A, "default": {}}, ""), ("examples", "annotation", {**A, "examples": [1]}, "")],
    *[(each, "annotation", {**A, each: {"a": {}}}, "") for each in ("$defs", "definitions", "$vocabulary")],
]


def kind_of(keyword: str, schema: dict[str, Any], listed: str) -> str:
    loose, fault = loose_schema(schema)
    if fault:
        return "refused"
    if loose.omitted:
        assert loose.omitted == (f"#/{listed or keyword}",)
        return "checked"
    without, _ = loose_schema({key: value for key, value in schema.items() if key != (listed or keyword)})
    return "annotation" if without.schema == loose.schema else "enforced"


@pytest.mark.parametrize(("keyword", "kind", "schema", "listed"), EXAMPLES, ids=lambda value: str(value)[:40])
def test_a_keyword_is_treated_as_the_table_says(keyword: str, kind: str, schema: dict[str, Any], listed: str) -> None:
    assert kind_of(keyword, schema, listed) == kind


def test_the_table_has_exactly_these_keywords() -> None:
    page = (Path(__file__).parents[3] / "docs" / "json-schema.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (.+?) \| (enforced|checked|annotation|refused) \|", page, re.MULTILINE)
    rows = [(keyword.strip("`"), kind) for keywords, kind in lines for keyword in keywords.split(", ")]
    assert set(rows) == {(keyword, kind) for keyword, kind, _, _ in EXAMPLES}
    assert len(rows) == len(set(rows))
