"""What a request says that its answer must be, as the grammar of its model."""

import json
from collections.abc import Mapping
from typing import Any

from libs.contracts.errors import InvalidRequest
from services.gateway.answers.families import AnswerFormat, prompt_end
from services.gateway.answers.guide import guide_of
from services.gateway.answers.schema_check import SchemaCheck
from services.gateway.prompt.catalog import ServedModel
from services.gateway.prompt.parse import Asked

MAX_SCHEMA_CHARS = 64 * 1024


async def check_schemas(asked: Asked, check: SchemaCheck, tenant: str = "") -> None:
    """Raises InvalidRequest that names the field and says why its schema cannot be kept to. tenant: who asks."""
    if asked.schema is not None:
        await _check(asked.schema, asked.schema_field, check, tenant)
    if asked.rule:
        await _check(asked.rule, asked.schema_field, check, tenant)
    for _, schema, field in asked.tools.callable() if asked.tools else ():
        await _check(schema, field, check, tenant)


async def _check(schema: Mapping[str, Any] | str, field: str, check: SchemaCheck, tenant: str) -> None:
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"{field} is over {MAX_SCHEMA_CHARS} characters", param=field)
    fault = await check.fault(text, tenant)
    if fault:
        raise InvalidRequest(
            f"{field}: {'it' if isinstance(schema, str) else 'the schema'} cannot be kept to: {fault}", param=field
        )


def answer_guide(asked: Asked, model: ServedModel, prompt: list[int]) -> str:
    """The grammar of an answer to this prompt. Pure."""
    # What follows a prompt that is text or tokens has no format.
    shape, tokenizer, tools = model.format if asked.messages else AnswerFormat(), model.tokenizer, asked.tools
    called = tools is not None and tools.required
    return guide_of(
        shape,
        {text: token_id for token_id, text in tokenizer.added_tokens.items()},
        schema=None if called else asked.schema,
        rule="" if called else asked.rule,
        tools=[(name, schema) for name, schema, _ in tools.callable()] if tools else (),
        parallel=bool(tools and tools.parallel),
        thinks=shape.thinks(prompt_end(tokenizer, prompt)),
    )
