"""Constraints on an answer in vLLM's fields: JSON of a schema, a pattern, a grammar, or one of several choices.

Pure; raises InvalidRequest that names the field.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from libs.contracts.errors import InvalidRequest
from libs.model.grammar import GrammarUnread, choice_rule, grammar_rule, pattern_rule
from services.gateway.prompt.schema import Common, StructuredOutputs


class Constraint(NamedTuple):
    """A schema or a rule, and the field that contains it."""

    field: str
    schema: Mapping[str, Any] | None = None
    rule: str = ""
    """The right-hand side of a rule in a grammar."""


def constraint_of(request: Common) -> Constraint | None:
    """Return the request's constraint, or None if its answer is free."""
    own = request.structured_outputs or StructuredOutputs()
    asked = {
        "structured_outputs.json": own.json,
        "structured_outputs.regex": own.regex,
        "structured_outputs.choice": own.choice,
        "structured_outputs.json_object": own.json_object or None,
        "structured_outputs.grammar": own.grammar,
        "guided_json": request.guided_json,
        "guided_regex": request.guided_regex,
        "guided_choice": request.guided_choice,
        "guided_grammar": request.guided_grammar,
    }
    first, second, *_ = *(field for field, value in asked.items() if value is not None), "", ""
    if second:
        raise InvalidRequest(f"{first} and {second} exclude each other", param=second)
    return _constraint(first, asked[first]) if first else None


def _constraint(field: str, value: Any) -> Constraint:
    if field.endswith("regex"):
        return Constraint(field, rule=pattern_rule(value))
    if field.endswith("choice"):
        return Constraint(field, rule=choice_rule(value))
    if field.endswith("grammar"):
        try:
            return Constraint(field, rule=grammar_rule(value))
        except GrammarUnread as error:
            raise InvalidRequest(f"{field}: it cannot be read: {error}", param=field) from None
    return Constraint(field, {"type": "object"} if field.endswith("json_object") else _schema(value, field))


def _schema(given: str | dict[str, Any], field: str) -> Mapping[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} must be a JSON schema, or the text of one", param=field)
    return found
