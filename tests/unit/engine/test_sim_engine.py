"""Tests of the sim runner: its time, text and vocabulary."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from libs.contracts.errors import KvMismatch, StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.engine.sim import Pacer, SimGpu, SimRunner
from libs.engine.sim_tokens import TokenSource
from libs.model.info import sim_tokenizer
from load.chaos.loop import SimLoop

CONFIG = EngineConfig(None, "sim")
IDENTITY = EngineIdentity("worker", 1, "")
PROMPT = list(b"what is the capital of France?")


def chunk(tokens: list[int], sampling: SamplingParams | None = None, prompt_tokens: int = len(PROMPT)) -> Chunk:
    history = np.array(tokens, dtype=np.int32)
    table = np.arange(len(tokens) // 16 + 1, dtype=np.int32)
    return Chunk(1, history[-1:], len(tokens) - 1, table, True, sampling or SamplingParams(), history, prompt_tokens)


def generate(source: TokenSource, count: int, sampling: SamplingParams) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(source.sample(chunk(tokens, sampling)).token_id)
    return tokens[len(PROMPT) :]


def test_the_built_in_model_writes_lowercase_words() -> None:
    text = sim_tokenizer().decode(generate(TokenSource.builtin(), 400, SamplingParams(seed=3)))
    words = text.split()
    assert len(text) == 400 and len(words) > 40
    assert all(word.isalpha() and word.islower() and word.isascii() for word in words)


def test_greedy_text_ignores_the_seed_and_sampled_text_follows_it() -> None:
    source = TokenSource.builtin()
    greedy = [generate(source, 40, SamplingParams(temperature=0.0, seed=seed)) for seed in (1, 2)]
    sampled = [generate(source, 40, SamplingParams(temperature=0.7, seed=seed)) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1] and sampled[0] == generate(source, 40, SamplingParams(temperature=0.9, seed=1))


async def test_tokens_of_a_model_folder_exclude_special_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 512, "vocab_size": 40, "eos_token_id": 2})
    )
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    added = [{"id": number, "special": number < 30} for number in range(35)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    runner = SimRunner(replace(CONFIG, model_path=tmp_path, sim_profile="instant"))
    capabilities = await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
    assert (capabilities.vocab_size, capabilities.max_context_tokens) == (40, 512)
    assert runner.eos_token_ids == {2}
    seen = set()
    for position in range(200):
        sampled = await runner.run(Batch((chunk([3] * (position + 1), prompt_tokens=1),)))
        seen.add(sampled[1].token_id)
    assert seen == set(range(30, 40))


def virtual_s(work: Coroutine[Any, Any, object]) -> float:
    """Return the time on a loop whose timers are exact and on which computing takes no time."""
    loop = SimLoop(Random(0))
    try:
        loop.run_until_complete(work)
        return loop.time()
    finally:
        loop.close()


def test_steps_take_the_modelled_time() -> None:
    async def steps() -> None:
        runner = SimRunner(replace(CONFIG, sim_profile="llama-8b-h100", sim_speedup=3.0))
        for _ in range(60):
            await runner.run(Batch((chunk([*PROMPT, 97]),)))

    modelled_s = 60 * (7e6 + 20_000 + 52 * (len(PROMPT) + 1)) / 3 / 1e9
    assert virtual_s(steps()) == pytest.approx(modelled_s, rel=1e-6)


async def test_steps_on_a_real_loop_take_no_less_than_modelled_on_average() -> None:
    runner = SimRunner(replace(CONFIG, sim_profile="llama-8b-h100", sim_speedup=3.0))
    clock = asyncio.get_running_loop().time
    start = clock()
    for _ in range(30):
        await runner.run(Batch((chunk([*PROMPT, 97]),)))
    modelled_s = 30 * (7e6 + 20_000 + 52 * (len(PROMPT) + 1)) / 3 / 1e9
    assert clock() - start >= modelled_s * 0.95


async def test_time_too_short_to_sleep_is_added_to_the_next_call() -> None:
    clock, pacer = asyncio.get_running_loop().time, Pacer()
    start = clock()
    for _ in range(1000):
        await pacer.spend(20e-6)
    assert 0.016 <= clock() - start < 0.3


def test_a_transfer_takes_the_time_of_its_bytes_and_transfers_are_serial() -> None:
    async def transfers() -> None:
        runner = SimRunner(replace(CONFIG, sim_link_gbps=8.0))
        await asyncio.gather(*(runner.transfer(10_000_000) for _ in range(3)))

    assert virtual_s(transfers()) == pytest.approx(0.03)


def test_blocks_contain_no_bytes() -> None:
    runner = SimRunner(CONFIG)
    blocks = np.array([1, 2], dtype=np.int32)
    assert runner.read_blocks(blocks) == ()
    runner.write_blocks(blocks, (), ())
    with pytest.raises(KvMismatch):
        runner.write_blocks(blocks, [memoryview(b"real")] * 2, (1, 2))


def test_an_unknown_profile_is_refused_at_once() -> None:
    with pytest.raises(StartupError, match="instant"):
        SimRunner(replace(CONFIG, sim_profile="abacus"))


async def test_runners_of_one_gpu_step_in_turns_and_copy_weights_one_after_another() -> None:
    gpu = SimGpu()
    fast = replace(CONFIG, sim_profile="instant", sim_weights_bytes=1, sim_load_overhead_s=0.0)
    first, second = SimRunner(fast, gpu), SimRunner(fast, gpu)
    for each in (first, second):
        await each.load(IDENTITY, lambda stage, fraction: None)
    async with gpu.steps:
        waits = asyncio.create_task(second.run(Batch((chunk([*PROMPT, 97]),))))
        await asyncio.sleep(0.05)
        assert not waits.done(), "the GPU is another's for the time of a step"
    await waits
    async with gpu.link:
        sleeps = asyncio.create_task(second.sleep())
        await first.run(Batch((chunk([*PROMPT, 97]),)))  # steps go on beside a copy
        await asyncio.sleep(0.05)
        assert not sleeps.done()
    await sleeps


async def test_a_part_of_a_gpu_has_a_part_of_its_memory() -> None:
    whole, half = (SimRunner(replace(CONFIG, gpu_share=share)) for share in (1.0, 0.5))
    blocks = [(await each.load(IDENTITY, lambda stage, fraction: None)).kv_blocks for each in (whole, half)]
    assert abs(blocks[0] - 2 * blocks[1]) <= 1
