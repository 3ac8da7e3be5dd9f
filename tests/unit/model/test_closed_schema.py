"""Tests of closing a schema's objects."""

from typing import Any

import pytest

from libs.model.closed_schema import closed

TEXT = {"type": "string"}
CITY: dict[str, Any] = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
CLOSED_CITY = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema, expected",
    [
        (CITY, CLOSED_CITY),
        (
            {"properties": {"city": CITY, "others": {"type": "array", "items": CITY}}},
            {
                "properties": {"city": CLOSED_CITY, "others": {"type": "array", "items": CLOSED_CITY}},
                "additionalProperties": False,
            },
        ),
        (
            {"properties": {"at": {"$ref": "#/$defs/City", "description": "Where."}}, "$defs": {"City": CITY}},
            {
                "properties": {"at": {"$ref": "#/$defs/City", "description": "Where."}},
                "$defs": {"City": CLOSED_CITY},
                "additionalProperties": False,
            },
        ),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED_CITY, {"type": "null"}]}),
    ],
)
def test_objects_that_name_their_properties_allow_no_others(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": TEXT},
        {**CITY, "patternProperties": {"^x-": TEXT}},
        {**CITY, "required": ["name", "people"]},
        {**CITY, "minProperties": 2},
        {**CITY, "const": {"name": "Paris", "people": 2}},
        {"allOf": [CITY, {"properties": {"people": TEXT}}]},
        {"oneOf": [CITY, {"properties": {"people": TEXT}}]},
        {"not": CITY},
        {"properties": {"people": TEXT}, "anyOf": [CITY, {"type": "object"}]},
        # City must stay open, since it applies to an object that has people too.
        {"$ref": "#/$defs/City", "properties": {"people": TEXT}, "$defs": {"City": CITY}},
        {"allOf": [{"$ref": "#/$defs/City"}, {"required": ["people"]}], "$defs": {"City": CITY}},
    ],
)
def test_objects_stay_open_if_they_say_so_or_another_schema_applies_to_them(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_the_schema_itself_does_not_change() -> None:
    schema = {"properties": {"city": dict(CITY)}}
    closed(schema)
    assert schema == {"properties": {"city": CITY}}
