"""The keywords of JSON Schema that the grammar library reads or the normaliser converts, and the errors of both."""

import re
from collections.abc import Mapping
from typing import Any, Final

# The upper bound of nested objects and lists. The library reads 128 levels.
MAX_DEPTH: Final = 120
# Larger numbers lose digits in the library, as in JavaScript.
MAX_EXACT: Final = 2**53 - 1
MAX_SIZE: Final = 2**31 - 1
# The formats that are enforced. In the draft `format` is only an annotation, so all others are ignored.
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
DRAFT: Final = re.compile(
    r"https?://(www\.)?json-schema\.org/(schema|draft-0[4-7]/(hyper-)?schema|draft/20(19-09|20-12)/(hyper-)?schema)/?#?",
    re.IGNORECASE,
)
_ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains")
_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
# Keywords by the type of the values that they constrain. They have no effect on values of other types.
BY_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (*_ARRAYS, "maxContains", "unevaluatedItems"),
    "object": (
        *(*_OBJECTS, "propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        "unevaluatedProperties",
    ),
}
TYPE_OF: Final = {keyword: kind for kind, keywords in BY_TYPE.items() for keyword in keywords}
IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf")
# The keywords that may constrain a value. All others are annotations, as in the draft.
KNOWN: Final = frozenset(
    {*TYPE_OF, *IN_PLACE, "type", "enum", "const", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
)
KEPT: Final = frozenset(
    {*BY_TYPE["string"], *BY_TYPE["number"], *_OBJECTS, *IN_PLACE}
    | {"type", "enum", "items", "prefixItems", "minItems", "maxItems"}
)
SIZES: Final = ("Length", "Items", "Properties", "Contains")
NO_SCHEMAS: Final = ("enum", "const", "default", "examples", "required")


class SchemaRefused(Exception):
    """A schema with a constraint that cannot be enforced. The message names the constraint and its position."""


class NotEnforced(SchemaRefused):
    """A constraint that a grammar cannot express in a schema whose other constraints can be enforced."""

    def __init__(self, message: str, keyword: str) -> None:
        super().__init__(message)
        self.keyword = keyword
        self.schema: dict[str, Any] | None = None
        """The original (sub)schema with the keyword."""
