"""Test that vLLM's handles serve one receiver (`kv_once`), which frees the blocks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.engine.config import EngineConfig
from libs.engine.kv_port import KvHandle
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import DirectFetcher, EventReader, SequenceLog
from libs.testing.engines.real_model import write_random_llama
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 300, 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
IDLE = EngineIntegrity(0, 0, 0)
FREED_S = 10.0
"""Well before the end of a lease of 30 s."""

Side = tuple[VllmEngine, EventReader]


@asynccontextmanager
async def running_pair(folder: Path) -> AsyncIterator[tuple[Side, Side]]:
    """A source whose pool is small, and a target."""
    model = write_random_llama(folder / "llama", hidden_size=128, eos_token_id=257)
    config = EngineConfig(model, "once", threads=1, block_size_tokens=BLOCK_TOKENS, kv_memory_mb=4, max_sequences=16)
    engines = [VllmEngine(config, SystemClock(), VllmCore()) for _ in range(2)]
    for engine, name in zip(engines, ("prefill", "decode"), strict=True):
        identity = EngineIdentity(name, 1, "127.0.0.1:1")
        await engine.start(identity, DirectFetcher(), lambda _stage, _fraction: None)
    source, target = ((engine, EventReader(engine)) for engine in engines)
    yield source, target
    await asyncio.gather(*(engine.close() for engine in engines))
    await asyncio.gather(source[1].finished(), target[1].finished())


def prompt(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 250, PROMPT_TOKENS, dtype=np.int32)


def request(key: int, phase: EnginePhase, seed: int, kv: KvHandle | None = None) -> EngineRequest:
    return EngineRequest(key, f"request-{key}", phase, prompt(seed), PROMPT_TOKENS, OUTPUT_TOKENS, GREEDY, b"", kv)


async def ask(side: Side, key: int, phase: EnginePhase, seed: int, kv: KvHandle | None = None) -> SequenceLog:
    engine, reader = side
    engine.submit(request(key, phase, seed, kv))
    return await reader.ended(key)


async def prefilled(source: Side, key: int, seed: int) -> KvHandle:
    end = (await ask(source, key, EnginePhase.PREFILL, seed)).end
    assert end is not None and end.finish is FinishReason.PREFILLED and end.handle is not None
    return end.handle


async def test_blocks_serve_one_receiver_which_frees_them(tmp_path: Path) -> None:
    async with running_pair(tmp_path) as (source, target):
        assert source[0].capabilities.kv_once
        await second_reader(source, target)
        await aborted_reader(source, target, 20, pulls=False)
        await aborted_reader(source, target, 21, pulls=True)


async def second_reader(source: Side, target: Side) -> None:
    """Check that a second reader gets other tokens and no error. Should vLLM refuse it, `kv_once` can go."""
    alone = (await ask(source, 1, EnginePhase.BOTH, 1)).token_ids
    handle = await prefilled(source, 2, 1)
    assert (await ask(target, 3, EnginePhase.DECODE, 1, handle)).token_ids == alone
    await until(lambda: source[0].integrity() == IDLE)
    pool_tokens = source[0].capabilities.kv_blocks * BLOCK_TOKENS
    others = range(100, 100 + 2 * pool_tokens // PROMPT_TOKENS)
    await asyncio.gather(*(ask(source, number, EnginePhase.BOTH, number) for number in others))
    second = await ask(target, 4, EnginePhase.DECODE, 1, handle)
    assert second.end is not None and second.end.finish is FinishReason.LENGTH
    assert second.token_ids != alone
    again = await prefilled(source, 5, 1)
    assert (await ask(target, 6, EnginePhase.DECODE, 1, again)).token_ids == alone
    await until(lambda: source[0].integrity() == target[0].integrity() == IDLE)


async def aborted_reader(source: Side, target: Side, key: int, *, pulls: bool) -> None:
    """Check that the source frees the blocks without another message, which could only come too soon."""
    engine, reader = target
    handle = await prefilled(source, key, key)
    assert source[0].integrity().leased_handles == 1
    engine.submit(request(key, EnginePhase.DECODE, key, handle))
    if pulls:
        await reader.until(lambda: reader.log(key).pulled == 1)
    engine.abort(key)
    assert (await reader.ended(key)).end is not None
    await until(lambda: source[0].integrity() == engine.integrity() == IDLE, timeout_s=FREED_S)
