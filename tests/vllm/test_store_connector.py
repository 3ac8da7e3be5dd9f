"""Test of a hand-over through a store: one engine writes the KV of prompts to a folder, the other continues."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

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

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LENGTHS = (40, 64, 66, 130, 160)
"""Together they fit one step: vLLM's connector keeps only the first part of a prompt that is computed in several."""
BLOCK_TOKENS = 32
MAX_TAIL_TOKENS = 2 * BLOCK_TOKENS
"""What vLLM's connector leaves out of a prompt at most. Of one whose last token begins a block it finds nothing."""
OUTPUT_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
IDLE = EngineIntegrity(0, 0, 0)


async def test_tokens_over_a_store_equal_those_of_one_engine_and_a_lost_store_is_recomputed(tmp_path: Path) -> None:
    model, store = write_random_llama(tmp_path / "llama", hidden_size=128, eos_token_id=257), tmp_path / "store"
    config = EngineConfig(
        model, "store", threads=1, block_size_tokens=BLOCK_TOKENS, kv_memory_mb=16, max_sequences=16,
        vllm_connector="ExampleConnector", vllm_connector_config={"shared_storage_path": str(store)},
    )  # fmt: skip
    engines = [VllmEngine(config, SystemClock(), VllmCore()) for _ in range(2)]
    for engine, name in zip(engines, ("prefill", "decode"), strict=True):
        identity = EngineIdentity(name, 1, "127.0.0.1:1")
        await engine.start(identity, DirectFetcher(), lambda _stage, _fraction: None)
    (source, source_reader), (target, target_reader) = ((engine, EventReader(engine)) for engine in engines)
    prompts = [np.random.default_rng(length).integers(0, 250, length, dtype=np.int32) for length in LENGTHS]

    async def ask(
        engine: VllmEngine, reader: EventReader, key: int, phase: EnginePhase, kv: KvHandle | None
    ) -> SequenceLog:
        prompt = prompts[key % len(prompts)]
        engine.submit(EngineRequest(key, f"request-{key}", phase, prompt, len(prompt), OUTPUT_TOKENS, GREEDY, b"", kv))
        return await reader.ended(key)

    async def over_store(key: int, *, lost: bool = False) -> SequenceLog:
        prefilled = (await ask(source, source_reader, key, EnginePhase.PREFILL, None)).end
        assert prefilled is not None and prefilled.finish is FinishReason.PREFILLED
        if lost:
            shutil.rmtree(store)
        return await ask(target, target_reader, key, EnginePhase.DECODE, prefilled.handle)

    target.set_prefill_budget(0)
    handed = await asyncio.gather(*map(over_store, range(len(prompts))))
    again = await over_store(0, lost=True)
    target.set_prefill_budget(512)
    shutil.rmtree(store, ignore_errors=True)
    alone = [await ask(target, target_reader, key, EnginePhase.BOTH, None) for key in range(10, 10 + len(prompts))]
    assert [log.token_ids for log in handed] == [log.token_ids for log in alone]
    assert again.token_ids == alone[0].token_ids
    ends = [log.end for log in handed if log.end is not None]
    assert all(0 < end.computed_prompt_tokens <= MAX_TAIL_TOKENS for end in ends)
    assert all(end.kv_bytes_received > 0 for end in ends)
    assert again.end is not None and again.end.computed_prompt_tokens == LENGTHS[0]
    await until(lambda: source.integrity() == target.integrity() == IDLE)
    await asyncio.gather(*(engine.close() for engine in engines))
    await asyncio.gather(source_reader.finished(), target_reader.finished())
