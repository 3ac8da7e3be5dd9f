"""Tests of guides on the real model: a schema, a named tool, and exact continuation elsewhere."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import validate

from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.engine.torch.runner import TorchRunner
from libs.model.info import load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer
from libs.testing.engines.real_model import real_model_folder
from services.gateway.answers.families import AnswerFormat
from services.gateway.answers.guide import guide_of
from services.gateway.answers.parts import PartKind

pytestmark = pytest.mark.torch

MAX_TOKENS = 120
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99_999_999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
QUESTION = "What is the capital of France, and how many people live there? Answer in JSON."


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_folder()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(load_model_info(folder))


@pytest.fixture
async def runner(folder: Path) -> AsyncIterator[TorchRunner]:
    runner = TorchRunner(EngineConfig(folder, "real", device="cpu", threads=1, kv_memory_mb=128))
    await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
    yield runner
    await runner.close()


def guide(tokenizer: Tokenizer, **requested: Any) -> str:
    special = {text: token_id for token_id, text in tokenizer.special_tokens.items()}
    return guide_of(AnswerFormat(calls="hermes"), special, parallel=False, thinks=False, **requested)


async def answer(runner: TorchRunner, tokenizer: Tokenizer, params: SamplingParams, restart: int = 0) -> list[int]:
    """Return the generated tokens; after `restart` of them the sequence has another id and recomputes its KV."""
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": QUESTION}]), add_special_tokens=False)
    tokens, computed, table = list(prompt), 0, np.arange(40, dtype=np.int32)
    while (len(tokens) < len(prompt) + MAX_TOKENS and tokens[-1] not in runner.eos_token_ids) or tokens == prompt:
        generated = len(tokens) - len(prompt)
        if restart and generated == restart:
            computed = 0
        history = np.array(tokens, np.int32)
        number = 1 + bool(restart and generated >= restart)
        chunk = Chunk(number, history[computed:], computed, table, True, params, history, len(prompt))
        token = (await runner.run(Batch((chunk,))))[number]
        assert not token.fault
        computed = len(tokens)
        tokens.append(token.token_id)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_schema_is_filled_and_the_answer_ends(
    runner: TorchRunner, tokenizer: Tokenizer, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=4, guide=guide(tokenizer, schema=SCHEMA, tools=()))
    tokens = await answer(runner, tokenizer, params)
    assert tokens[-1] in runner.eos_token_ids
    found = json.loads(tokenizer.decode(tokens))
    validate(found, SCHEMA)
    assert await answer(runner, tokenizer, params, restart=5) == tokens


async def test_a_named_tool_is_called(runner: TorchRunner, tokenizer: Tokenizer) -> None:
    named = guide(tokenizer, schema=None, tools=[("capital", SCHEMA)])
    tokens = await answer(runner, tokenizer, SamplingParams(temperature=0.0, guide=named))
    parser = AnswerFormat(calls="hermes").parser({"capital": SCHEMA}, "")
    assert parser is not None
    call, *arguments = parser.text(tokenizer.decode(tokens))
    assert (call.kind, call.text) == (PartKind.CALL, "capital")
    validate(json.loads("".join(part.text for part in arguments)), SCHEMA)
