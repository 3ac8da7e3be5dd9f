"""Test that prompt logprobs of the real model equal those of transformers' forward pass."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, SamplingParams
from libs.engine.reports import Logprob
from libs.engine.runner import Batch, Chunk
from libs.engine.torch.runner import TorchRunner
from libs.testing.engines.real_model import real_model_folder

pytestmark = pytest.mark.torch

TOKENS = 48
CHUNK = 20
TOP = 3


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_folder()


async def test_a_prompt_is_scored_as_by_transformers(folder: Path) -> None:
    tokens = np.random.default_rng(3).integers(200, 40_000, TOKENS, dtype=np.int32)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        truth = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
    runner = TorchRunner(EngineConfig(folder, "real", device="cpu", threads=1, kv_memory_mb=64))
    await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
    params = SamplingParams(temperature=0.0, logprobs=True, prompt_logprobs=True, prompt_top_logprobs=TOP)
    found: list[Logprob] = []
    table = np.arange(8, dtype=np.int32)
    for start in range(0, TOKENS, CHUNK):
        end = min(start + CHUNK, TOKENS)
        scored = tokens[start + 1 : min(end + 1, TOKENS)]
        chunk = Chunk(1, tokens[start:end], start, table, end == TOKENS, params, tokens[:end], TOKENS, scored)
        found += (await runner.run(Batch((chunk,))))[1].prompt
    await runner.close()
    own = [truth[place, token].item() for place, token in enumerate(tokens[1:])]
    assert [each.logprob for each in found] == pytest.approx(own, abs=2e-3)
    values, ids = truth[:-1].topk(TOP)
    assert [[token for token, _ in each.top] for each in found] == ids.tolist()
    assert [[value for _, value in each.top] for each in found] == [
        pytest.approx(row, abs=2e-3) for row in values.tolist()
    ]
