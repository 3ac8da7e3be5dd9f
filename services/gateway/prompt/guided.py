"""Conversion of a request's constraints into a grammar of its model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libs.contracts.errors import InvalidRequest
from services.gateway.answers.families import AnswerFormat, prompt_end
from services.gateway.answers.guide import ToolSchema, guide_of
from services.gateway.answers.schema_check import SchemaCheck
from services.gateway.prompt.catalog import ServedModel
from services.gateway.prompt.parse import Asked

MAX_SCHEMA_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class KeptSchemas:
    """The schemas of one request, in the grammar library's form."""

    answer: Mapping[str, Any] | None = None
    tools: list[ToolSchema] = field(default_factory=list)


async def check_schemas(asked: Asked, check: SchemaCheck, tenant: str = "") -> KeptSchemas:
    """Convert a request's schemas; raise InvalidRequest that names the field and the reason a schema cannot be
    enforced.

    `tenant` shares the checker's slots with other tenants.
    """
    if asked.rule:
        await _check(asked.rule, asked.schema_field, check, tenant)
    return KeptSchemas(
        None if asked.schema is None else await _check(asked.schema, asked.schema_field, check, tenant),
        [
            (name, await _check(schema, named, check, tenant))
            for name, schema, named in (asked.tools.callable() if asked.tools else ())
        ],
    )


async def _check(schema: Mapping[str, Any] | str, named: str, check: SchemaCheck, tenant: str) -> dict[str, Any]:
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"{named} is over {MAX_SCHEMA_CHARS} characters", param=named)
    fault, kept = await check.verdict(text, tenant)
    if fault:
        raise InvalidRequest(
            f"{named}: {'it' if isinstance(schema, str) else 'the schema'} cannot be kept to: {fault}", param=named
        )
    found: dict[str, Any] = json.loads(kept)
    return found


def answer_guide(asked: Asked, schemas: KeptSchemas, model: ServedModel, prompt: list[int]) -> str:
    """Return the grammar of an answer to this prompt. Pure."""
    # What follows a prompt that is text or tokens has no format.
    shape, tokenizer, tools = model.format if asked.messages else AnswerFormat(), model.tokenizer, asked.tools
    called = tools is not None and tools.required
    return guide_of(
        shape,
        {text: token_id for token_id, text in tokenizer.added_tokens.items()},
        schema=None if called else schemas.answer,
        rule="" if called else asked.rule,
        tools=schemas.tools,
        parallel=bool(tools and tools.parallel),
        thinks=shape.thinks(prompt_end(tokenizer, prompt)),
    )
