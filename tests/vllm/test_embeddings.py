"""Tests of embeddings on the vllm engine against those of the torch engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest
from libs.engine.config import EngineConfig
from libs.engine.local import make_engine
from libs.engine.port import Engine, EngineIdentity, EnginePhase, EngineRequest, Pooling, SamplingParams
from libs.engine.reports import FinishReason
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EventReader
from libs.testing.engines.real_model import REAL_MODEL_NAME, write_random_llama
from libs.testing.engines.vllm_core import NoFetcher
from libs.testing.suites.suite import running_suite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RANDOM = np.random.default_rng(8)
# The longest has several chunks.
PROMPTS = [RANDOM.integers(3, 250, length, dtype=np.int32) for length in (1, 33, 70, 200)]
CHUNK = 64
START_S = 400.0
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def make_model(folder: Path, pooling: Pooling) -> Path:
    """Write a random model whose files name a mean, or no way of pooling at all."""
    model = write_random_llama(folder, **SHAPE)
    if pooling is Pooling.MEAN:
        (model / "modules.json").write_text(json.dumps(MODULES))
        (model / "1_Pooling").mkdir()
        (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return model


def request(key: int, prompt: NDArray[np.int32], pooling: Pooling | None) -> EngineRequest:
    root = b"" if pooling is Pooling.MEAN else b"chain"
    sampling = SamplingParams(temperature=0.0)
    return EngineRequest(
        key, f"r-{key}", EnginePhase.PREFILL, prompt, len(prompt), 1, sampling, root, pooling=pooling
    )  # fmt: skip


async def started(name: str, config: EngineConfig) -> tuple[Engine, EventReader]:
    engine = make_engine(name, config, SystemClock())
    await engine.start(EngineIdentity(name, 1, "127.0.0.1:1"), NoFetcher(), lambda _stage, _fraction: None)
    return engine, EventReader(engine)


async def vectors(engine: Engine, reader: EventReader, pooling: Pooling, first_key: int) -> list[NDArray[np.float32]]:
    """Submit all prompts together and return their vectors in order."""
    keys = range(first_key, first_key + len(PROMPTS))
    for key, prompt in zip(keys, PROMPTS, strict=True):
        engine.submit(request(key, prompt, pooling))
    found = []
    for key, prompt in zip(keys, PROMPTS, strict=True):
        log = await reader.ended(key)
        assert log.end is not None and log.token_ids == []
        assert log.end.finish is FinishReason.STOP and log.end.handle is None, log.end
        assert log.end.computed_prompt_tokens + log.end.cached_tokens == len(prompt)
        found.append(np.frombuffer(log.end.pooled, "<f4"))
    return found


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
async def test_vectors_equal_those_of_the_torch_engine(tmp_path: Path, pooling: Pooling) -> None:
    base = EngineConfig(
        make_model(tmp_path / "model", pooling), "random", device="cpu", dtype="float32", threads=1,
        block_size_tokens=32, kv_memory_mb=64, max_sequences=8, prefill_chunk_tokens=CHUNK,
    )  # fmt: skip
    # A folder with files of Sentence Transformers needs no argument.
    chosen: dict[str, Any] = {} if pooling is Pooling.MEAN else {"runner": "pooling"}
    by_vllm = replace(base, vllm_arguments={"max_model_len": 256, **chosen})
    found = {}
    for name, config in (("torch", base), ("vllm", by_vllm)):
        engine, reader = await started(name, config)
        found[name] = await vectors(engine, reader, pooling, 1)
        if name == "vllm":
            again = await vectors(engine, reader, pooling, 100)  # with cached prefixes, where they may be reused
            assert engine.capabilities.pools == {pooling}
            assert await engine.measure_prefill(64), "a step of prompts is measured as on other engines"
            other = Pooling.LAST if pooling is Pooling.MEAN else Pooling.MEAN
            for refused in (None, other):
                with pytest.raises(InvalidRequest):
                    engine.submit(request(900, PROMPTS[1], refused))
        await engine.close()
        await reader.close()
    for torch, vllm, second in zip(found["torch"], found["vllm"], again, strict=True):
        assert np.linalg.norm(torch) > 1
        assert vllm == pytest.approx(torch, abs=1e-3)
        assert second == pytest.approx(torch, abs=1e-3)


def test_a_suite_of_one_worker_embeds_and_refuses_chats(tmp_path: Path) -> None:
    # Refused by the worker, as the gateway does not know how its workers were started.
    arguments = ("--engine", "vllm", "--engine-arg", "runner=pooling", "--engine-arg", "max_model_len=512")
    split = ("--prefill", "0", "--decode", "0", "--mixed", "1")
    memory = {"FULCRUM_WORKER_KV_MEMORY_MB": "128"}
    with (
        running_suite(tmp_path, *arguments, *split, env=memory, start_s=START_S) as suite,
        openai.OpenAI(base_url=f"{suite.gateway}/v1", api_key="any", max_retries=0) as client,
    ):
        texts = ["How do I bake bread?", "A recipe for a loaf of bread.", "The stock market fell today."]
        found = client.embeddings.create(model=REAL_MODEL_NAME, input=texts)
        question, recipe, market = np.array([item.embedding for item in found.data])
        assert np.linalg.norm(question) == pytest.approx(1, abs=1e-5)
        assert question @ recipe > question @ market
        with pytest.raises(openai.BadRequestError, match="only gives vectors"):
            client.chat.completions.create(
                model=REAL_MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
            )
