"""Test that vectors of the real model equal transformers' last hidden states, pooled by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, Pooling, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.engine.torch.runner import TorchRunner
from libs.testing.engines.real_model import real_model_folder

pytestmark = pytest.mark.torch

LENGTHS = (48, 7, 1)
CHUNK = 20
BLOCKS = 4
POOLINGS = (Pooling.LAST, Pooling.MEAN)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_folder()


async def test_prompts_of_one_batch_are_pooled_correctly_beside_one_that_decodes(folder: Path) -> None:
    random = np.random.default_rng(3)
    prompts = [random.integers(200, 40_000, length, dtype=np.int32) for length in LENGTHS]
    with torch.inference_mode():
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        truth = [model(torch.from_numpy(each.astype(np.int64))[None]).last_hidden_state[0] for each in prompts]
    runner = TorchRunner(EngineConfig(folder, "real", device="cpu", threads=1, kv_memory_mb=64))
    await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
    found = {pooling: [np.zeros(model.config.hidden_size, np.float32) for _ in prompts] for pooling in POOLINGS}
    for pooling in POOLINGS:
        for start in range(0, max(LENGTHS), CHUNK):
            chunks = []
            for place, tokens in enumerate(prompts):
                end, table = min(start + CHUNK, len(tokens)), np.arange(BLOCKS, dtype=np.int32) + place * BLOCKS
                if start < len(tokens):
                    last = end == len(tokens)
                    chunk = Chunk(place, tokens[start:end], start, table, last, GREEDY, tokens[:end], len(tokens))
                    chunk.pooling = pooling
                    chunks.append(chunk)
            beside = np.array([5], np.int32)
            plain = Chunk(99, beside, 0, np.array([BLOCKS * len(prompts)], np.int32), True, GREEDY, beside, 1)
            sampled = await runner.run(Batch((plain, *chunks)))
            assert sampled[99].pooled is None and not sampled[99].fault
            for place in range(len(prompts)):
                vector = sampled[place].pooled if place in sampled else None
                if vector is not None:
                    found[pooling][place] += vector
    await runner.close()
    for place, (hidden, length) in enumerate(zip(truth, LENGTHS, strict=True)):
        assert found[Pooling.LAST][place] == pytest.approx(hidden[-1].numpy(), abs=2e-3)
        assert found[Pooling.MEAN][place] / length == pytest.approx(hidden.mean(dim=0).numpy(), abs=2e-3)
