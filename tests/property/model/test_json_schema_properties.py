"""Properties of converted schemas: answers are instances of the original, and annotations change nothing."""

import json
import random
import re
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from libs.model.grammar import json_rule, kept_schema
from libs.model.json_schema import SchemaRefused, normalise

BYTES = LLTokenizer("byte")
MAX_BYTES = 600
HUGE = re.compile(rb"[0-9]{16}|[0-9][eE]")
names = st.sampled_from(["a", "b", "kind"])
values = st.sampled_from([None, True, 0, 1, 2.5, "x", "y", [], [1], {}, {"a": 1}])
sizes = st.sampled_from([0, 1, 2, 1.0, 3.0])
bounds = st.sampled_from([-1, 0, 1, 2.5, 2**63, -(2**63)])
DEFINED = ("a", "b", "c")


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


strings = some(minLength=sizes, maxLength=sizes, pattern=st.sampled_from(["^x", "y$", ""]), format=st.just("path"))
numbers = some(minimum=bounds, maximum=bounds, exclusiveMinimum=bounds, multipleOf=st.sampled_from([1, 0.5, 3.0]))
leaves = st.one_of(
    st.booleans(),
    st.builds(lambda kind, more: {"type": kind, **more}, st.sampled_from(["string", ["string", "null"]]), strings),
    st.builds(lambda kind, more: {"type": kind, **more}, st.sampled_from(["integer", "number"]), numbers),
    st.builds(lambda listed: {"enum": listed}, st.lists(values, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from(DEFINED)),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["null", "boolean", "array", "object"])),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, min_size=1, max_size=3)
    array = some(
        items=inner, prefixItems=few, minItems=sizes, maxItems=sizes, uniqueItems=st.booleans(), contains=inner,
        minContains=sizes, maxContains=sizes, unevaluatedItems=inner,
    )  # fmt: skip
    properties = st.dictionaries(names, inner, max_size=3)
    mapping = some(
        properties=properties, additionalProperties=inner, required=st.lists(names, max_size=2, unique=True),
        propertyNames=st.sampled_from([{"type": "string"}, {"enum": ["a", "b"]}, {"maxLength": 2}, {"pattern": "^a"}]),
        dependentRequired=st.dictionaries(names, st.lists(names, max_size=1), max_size=1), minProperties=sizes,
        unevaluatedProperties=inner,
    )  # fmt: skip
    closed = {"type": "object", "additionalProperties": False}
    return st.one_of(
        st.builds(lambda more: {"type": "array", "maxItems": 3, **more}, array),
        st.builds(lambda more: {**closed, **more}, mapping),
        st.builds(lambda key, listed: {key: listed}, st.sampled_from(["anyOf", "oneOf", "allOf"]), few),
        st.builds(lambda then, otherwise: {"if": True, "then": then, "else": otherwise}, inner, inner),
        st.builds(lambda one, other: {"allOf": [one], "not": {"not": other}}, inner, inner),
    )


schemas = st.recursive(leaves, containers, max_leaves=6).filter(lambda schema: isinstance(schema, dict))
# Circles are left out: the validator follows them to no end, even where they ask nothing.
definitions = leaves.filter(lambda schema: isinstance(schema, bool) or "$ref" not in schema)
documents = st.builds(
    lambda root, *defined: {**root, "$defs": dict(zip(DEFINED, defined, strict=True))}, schemas, *[definitions] * 3
)


def answer(schema: dict[str, Any], seed: int) -> Any:
    """Draw text that the schema allows, one byte per token and with ends preferred; None if it does not end soon."""
    matcher, draw, found = (
        LLMatcher(BYTES, f"start: {json_rule(schema)}\n", log_level=0),
        random.Random(seed),
        bytearray(),
    )
    while not matcher.is_stopped() and len(found) < MAX_BYTES:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask)
        if not len(allowed):
            return None
        closing = [token for token in (*b'"}]', 256) if token in allowed]
        token = int(draw.choice(closing if closing and draw.random() < 0.5 else list(allowed)))
        if token >= 256:
            break
        matcher.consume_token(token)
        found.append(token)
    # The validator cannot divide numbers that no float holds.
    return json.loads(found) if matcher.is_accepting() and not HUGE.search(found) else None


@given(schema=documents, seed=st.integers(0, 2**32))
def test_an_answer_valid_under_the_converted_schema_is_an_instance_of_the_original(
    schema: dict[str, Any], seed: int
) -> None:
    kept, fault = kept_schema(schema)
    assume(not fault)
    found = answer(kept, seed)
    assume(found is not None)
    Draft202012Validator(schema).validate(found)


ANNOTATIONS: list[dict[str, Any]] = [
    {"title": "t", "description": "d", "$comment": "c"},
    {"deprecated": True, "readOnly": True, "default": [], "examples": [1]},
    {"$schema": "http://json-schema.org/draft/2020-12/schema#"},
    {"x-order": 1, "nullable": False, "contentEncoding": "base64"},
    {"minLength": 0, "minItems": 0.0, "minProperties": 0},
    {"uniqueItems": False, "dependentRequired": {}, "patternProperties": {}, "required": []},
    {"allOf": []},
    {"allOf": [{}, {"title": "t"}]},
    {"not": False, "if": {"const": 1}},
    {"propertyNames": {"type": "string"}, "additionalItems": {"const": 1}},
]


@given(schema=schemas, data=st.data())
def test_annotations_change_nothing_wherever_they_stand(schema: dict[str, Any], data: st.DataObject) -> None:
    def adorned(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = {key: adorned_within(key, each) for key, each in value.items()}
        more = data.draw(st.sampled_from(ANNOTATIONS))
        return {**found, **{key: each for key, each in more.items() if key not in found}}

    def adorned_within(key: str, value: Any) -> Any:
        if key in ("properties", "$defs") and isinstance(value, dict):
            return {name: adorned(each) for name, each in value.items()}
        if key in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            return [adorned(each) for each in value]
        return adorned(value) if key in ("items", "additionalProperties", "then", "else") else value

    defined = {"$defs": {name: {"type": "string"} for name in DEFINED}}
    try:
        plain = normalise({**schema, **defined})
    except SchemaRefused:
        return
    assert normalise({**adorned(schema), **defined}) == plain
