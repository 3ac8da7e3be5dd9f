"""Tests of the torch runner on the real model: its tokens equal transformers' `generate`, wherever the KV lies."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from libs.engine.config import EngineConfig
from libs.engine.kv_transfer import block_checksum
from libs.engine.port import EngineIdentity, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.engine.torch.device import cpu_name
from libs.engine.torch.runner import TorchRunner
from libs.testing.engines.real_model import real_model_folder

pytestmark = pytest.mark.torch

BLOCK, POOL_MB, POOL_BLOCKS = 16, 128, 182
TABLE_BLOCKS = 33
OUTPUT_TOKENS = 10
CHUNK_TOKENS = 96
LENGTHS = (1, 2, 16, 17, 500)
GREEDY = SamplingParams(temperature=0.0, logprobs=True)
TEXT = (
    "In the mountains the snow melts late. A river of {n} miles runs south past mills and orchards to the sea, and in "
    "the year {y} the people of the valley built a bridge. def bridge(length): return [length // {n}, 'stone'] "
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_folder()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Return real text, different for each length."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["".join(TEXT.format(n=n + i, y=1700 + 7 * n + i) for i in range(12)) for n in range(len(LENGTHS))]
    return [
        tokenizer.encode(text[i:]).ids[:length] for i, (text, length) in enumerate(zip(texts, LENGTHS, strict=True))
    ]


async def start(folder: Path) -> TorchRunner:
    config = EngineConfig(folder, "real", device="cpu", threads=1, block_size_tokens=BLOCK, kv_memory_mb=POOL_MB)
    runner = TorchRunner(config)
    assert (await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)).kv_blocks == POOL_BLOCKS
    return runner


@pytest.fixture
async def runner(folder: Path) -> AsyncIterator[TorchRunner]:
    runner = await start(folder)
    yield runner
    await runner.close()


@dataclass
class Sequence:
    """A sequence that is driven by hand."""

    sequence_id: int
    tokens: list[int]
    table: NDArray[np.int32]
    params: SamplingParams = GREEDY
    computed: int = 0
    prompt: int = 0
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    def chunk(self) -> Chunk:
        end = min(len(self.tokens), self.computed + CHUNK_TOKENS)
        history = np.array(self.tokens[:end], np.int32)
        whole = end == len(self.tokens)
        return Chunk(
            self.sequence_id,
            history[self.computed :],
            self.computed,
            self.table,
            whole,
            self.params,
            history,
            self.prompt,
        )


async def advance(runner: TorchRunner, sequences: list[Sequence], output_tokens: int) -> None:
    """Step over all unfinished sequences until each has that many tokens after its prompt."""
    while batch := [one for one in sequences if len(one.tokens) < one.prompt + output_tokens]:
        chunks = [one.chunk() for one in batch]
        sampled = await runner.run(Batch(tuple(chunks)))
        assert set(sampled) == {chunk.sequence_id for chunk in chunks if chunk.sample}
        for one, chunk in zip(batch, chunks, strict=True):
            one.computed = len(chunk.history)
            if chunk.sample:
                one.tokens.append(sampled[one.sequence_id].token_id)
                logprob = sampled[one.sequence_id].logprob
                assert logprob is not None
                one.logprobs.append(logprob.logprob)


def tables(count: int, seed: int = 5) -> list[NDArray[np.int32]]:
    """Return scattered blocks for each sequence, none shared."""
    order = np.random.default_rng(seed).permutation(POOL_BLOCKS).astype(np.int32)
    return [order[TABLE_BLOCKS * i : TABLE_BLOCKS * (i + 1)] for i in range(count)]


def generated(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of transformers, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


async def test_greedy_tokens_equal_generate(runner: TorchRunner, folder: Path, prompts: list[list[int]]):
    """Prompts in chunks and decodes of other sequences in the same steps, blocks scattered over the pool."""
    sequences = [
        Sequence(i, list(prompt), table) for i, (prompt, table) in enumerate(zip(prompts, tables(5), strict=True))
    ]
    await advance(runner, sequences, OUTPUT_TOKENS)
    assert [one.tokens[one.prompt :] for one in sequences] == generated(folder, prompts)


async def test_a_sequence_continues_identically_on_another_runner(
    runner: TorchRunner, folder: Path, prompts: list[list[int]]
):
    """KV read here and written to other blocks there; noise depends on seed and position alone."""
    params = replace(GREEDY, temperature=0.9, top_p=0.95, seed=42)
    here, there = tables(1)[0], tables(1, seed=6)[0]
    stays = Sequence(0, prompts[-1][:200], here, params)
    await advance(runner, [stays], 2)
    blocks = -(-stays.computed // BLOCK)
    moved = replace(stays, tokens=list(stays.tokens), table=there, logprobs=list(stays.logprobs))
    data = runner.read_blocks(here[:blocks])
    other = await start(folder)
    other.write_blocks(there[:blocks], data, [*map(block_checksum, data)])
    await advance(runner, [stays], 12)
    await advance(other, [moved, Sequence(1, [5, 6, 7], tables(2, seed=6)[1])], 12)
    await other.close()
    assert moved.tokens == stays.tokens
    assert moved.logprobs == pytest.approx(stays.logprobs, abs=1e-4)


async def test_the_models_shape_is_reported_with_the_cpus_capabilities(folder: Path) -> None:
    runner = TorchRunner(EngineConfig(folder, "real", device="cpu", threads=1, kv_memory_mb=POOL_MB))
    try:
        can = await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
    finally:
        await runner.close()
    compute = can.compute
    assert re.fullmatch(rf"float32, torch \d[^,]+, fulcrum \d[^,]+, 1 threads, {re.escape(cpu_name())}", can.variant)
    assert compute is not None
    # 30 layers of 576 x (2 x 576 + 2 x 192) for attention and 3 x 576 x 1536 behind it; 49,152 words of 576.
    assert compute.layer_parameters == 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    assert (compute.head_parameters, compute.parameter_bytes) == (49_152 * 576, 4)
    assert (compute.attention_width, compute.kv_token_bytes) == (30 * 576, 46_080)
    assert compute.peak_flops_per_s > 1e9 and compute.peak_bytes_per_s > 1e8


async def test_the_event_loop_keeps_running_during_a_step(runner: TorchRunner, prompts: list[list[int]]):
    """Blocks that the step does not write can also be read and written meanwhile."""
    table, others = tables(2)
    chunk = Sequence(0, prompts[-1], table).chunk()
    step = asyncio.create_task(runner.run(Batch((chunk,))))
    turns = 0
    while not step.done():
        data = runner.read_blocks(others[:1])
        runner.write_blocks(others[1:2], data, [*map(block_checksum, data)])
        await asyncio.sleep(0)
        turns += 1
    assert turns > 2


async def test_a_cancelled_step_raises_only_once_its_blocks_are_complete(runner: TorchRunner, prompts: list[list[int]]):
    first, second = tables(2)
    blocks = CHUNK_TOKENS // BLOCK
    step = asyncio.create_task(runner.run(Batch((Sequence(0, prompts[-1], first).chunk(),))))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    at_once = [*map(bytes, runner.read_blocks(first[:blocks]))]
    await runner.run(Batch((Sequence(1, prompts[-1], second).chunk(),)))
    assert at_once == [*map(bytes, runner.read_blocks(second[:blocks]))]
