"""Tests of LoRA adapters on the vllm engine over a hand-off, against a model with merged weights."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libs.engine.config import EngineConfig
from libs.engine.kv_port import KvHandle
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.runtime.clock import SystemClock
from libs.testing.engines.adapters import merged_tokens, write_adapter
from libs.testing.engines.engine import EventReader
from libs.testing.engines.real_model import write_random_llama
from libs.testing.engines.vllm_core import NoFetcher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = np.random.default_rng(4).integers(3, 250, 70, dtype=np.int32)
TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


async def test_sequences_of_several_adapters_are_computed_side_by_side_and_moved(tmp_path: Path) -> None:
    model = write_random_llama(tmp_path / "model", **SHAPE)
    folders = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("sql", "chat"))}
    config = EngineConfig(
        model, "random", threads=1, block_size_tokens=32, kv_memory_mb=64, max_sequences=8, adapters=folders,
        vllm_arguments={"max_model_len": 256},
    )  # fmt: skip
    engines = []
    for name in ("prefill", "decode"):
        engine = VllmEngine(config, SystemClock(), VllmCore())
        await engine.start(EngineIdentity(name, 1, "127.0.0.1:1"), NoFetcher(), lambda _stage, _fraction: None)
        engines.append((engine, EventReader(engine)))
    (source, source_reader), (target, target_reader) = engines

    def request(key: int, phase: EnginePhase, adapter: str, kv: KvHandle | None = None) -> EngineRequest:
        root = f"chain {adapter}".encode()
        return EngineRequest(key, f"r-{key}", phase, PROMPT, len(PROMPT), TOKENS, GREEDY, root, kv, adapter=adapter)

    async def ask(key: int, adapter: str) -> list[int]:
        source.submit(request(key, EnginePhase.PREFILL, adapter))
        prefilled = (await source_reader.ended(key)).end
        assert prefilled is not None and prefilled.handle is not None, prefilled
        target.submit(request(key, EnginePhase.DECODE, adapter, prefilled.handle))
        return (await target_reader.ended(key)).token_ids

    names = ("sql", "", "chat", "sql")
    found = await asyncio.gather(*(ask(key, name) for key, name in enumerate(names, 1)))
    await asyncio.gather(*(engine.close() for engine, _ in engines))
    for _, reader in engines:
        await reader.close()
    truth = {name: merged_tokens(model, folders.get(name), PROMPT, TOKENS) for name in set(names)}
    assert found == [truth[name] for name in names]
    assert len({tuple(each) for each in truth.values()}) == 3, "adapters that change nothing show nothing"


@dataclass(eq=False)
class Adapter:
    lora_int_id: int


@dataclass(eq=False)
class AdapterRequest:
    lora_request: Adapter | None


def test_a_request_waits_while_adapters_of_hidden_requests_take_all_slots() -> None:
    """vLLM counts only adapters that it sees, and its engine fails once more run than there are slots."""
    from libs.engine.vllm.scheduler import StepScheduler

    hidden, other, plain, same = (
        AdapterRequest(Adapter(1)),
        AdapterRequest(Adapter(2)),
        AdapterRequest(None),
        AdapterRequest(Adapter(1)),
    )
    scheduler: Any = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=1), running=[hidden], waiting=[other, plain, same], kv_holding_waiting=[]
    )
    without_slot: Any = StepScheduler._without_slot
    assert without_slot(scheduler, {hidden}) == {other}
    assert without_slot(scheduler, set()) == set(), "vLLM sees all that run"
    scheduler.lora_config.max_loras = 2
    assert without_slot(scheduler, {hidden}) == set()
