"""Test of prefill and decode of different tensor-parallel widths over NIXL."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from libs.engine.config import EngineConfig
from libs.engine.kv_port import KvHandle
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason, SequenceOutput
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.runtime.clock import SystemClock
from libs.testing.engines import nixl_faults
from libs.testing.engines.engine import EventReader
from libs.testing.engines.real_model import write_random_llama
from libs.testing.engines.vllm_core import NoFetcher
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OUTPUT_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip

Engines = dict[int, tuple[VllmEngine, EventReader]]


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the file that names the present fault of NIXL."""
    folder = tmp_path_factory.mktemp("faults")
    nixl_faults.offer(folder / "plugin")
    file = folder / "fault"
    file.write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder / "plugin")  # processes that are spawned have the path of this one
        patched.setenv(nixl_faults.FILE_VARIABLE, str(file))
        yield file


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(tmp_path_factory: pytest.TempPathFactory, fault: Path) -> AsyncIterator[Engines]:
    """Yield engines by width."""
    assert not fault.read_text()
    model = write_random_llama(tmp_path_factory.mktemp("model"), **SHAPE)
    found: Engines = {}
    for width in (1, 2):
        config = EngineConfig(
            model, "m", threads=1, block_size_tokens=32, kv_memory_mb=32, max_sequences=4,
            vllm_arguments={"max_model_len": 256, "tensor_parallel_size": width},
        )  # fmt: skip
        engine = VllmEngine(config, SystemClock(), VllmCore())
        await engine.start(EngineIdentity(f"tp{width}", 1, "127.0.0.1:1"), NoFetcher(), lambda _stage, _fraction: None)
        found[width] = engine, EventReader(engine)
    yield found
    await asyncio.gather(*(engine.close() for engine, _ in found.values()))
    for _, reader in found.values():
        await reader.close()


def request(key: int, phase: EnginePhase, prompt: NDArray[np.int32], kv: KvHandle | None = None) -> EngineRequest:
    return EngineRequest(key, f"request-{key}", phase, prompt, len(prompt), OUTPUT_TOKENS, GREEDY, b"", kv)


async def moved(
    engines: Engines, key: int, first: int, second: int, prompt: NDArray[np.int32]
) -> tuple[SequenceOutput, list[int]]:
    """Prefill on one width and decode on the other; return the end there and all tokens."""
    (source, source_reader), (target, target_reader) = engines[first], engines[second]
    source.submit(request(key, EnginePhase.PREFILL, prompt))
    prefilled = (await source_reader.ended(key)).end
    assert prefilled is not None and prefilled.finish is FinishReason.PREFILLED
    target.submit(request(key, EnginePhase.DECODE, prompt, prefilled.handle))
    log = await target_reader.ended(key)
    assert log.end is not None
    return log.end, log.token_ids


async def test_answers_over_two_widths_equal_those_of_one_engine_in_both_directions(engines: Engines) -> None:
    kinds = {replace(engine.capabilities, kv_blocks=0, compute=None, variant="") for engine, _ in engines.values()}
    assert len(kinds) == 1, "one layout, and the same bytes of KV"
    rng = np.random.default_rng(1)
    alone, reader = engines[1]
    for key, length in enumerate((1, 32, 33, 100, 200), 1):
        prompt = rng.integers(3, 500, length, dtype=np.int32)
        alone.submit(request(key, EnginePhase.BOTH, prompt))
        expected = (await reader.ended(key)).token_ids
        assert len(expected) == OUTPUT_TOKENS
        for first, second in ((1, 2), (2, 1)):
            end, tokens = await moved(engines, 100 * first + key, first, second, prompt)
            assert end.finish is FinishReason.LENGTH, end
            assert tokens == expected, (first, second, length)
    pulled = [each for _, reader in engines.values() for event in reader.events for each in event.kv_transfers]
    assert len(pulled) == 10 and all(each.data_bytes > 0 for each in pulled)
    await until(lambda: all(engine.integrity() == EngineIntegrity(0, 0, 0) for engine, _ in engines.values()))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_a_read_between_widths_that_left_out_blocks_ends_its_sequence_without_a_token(
    engines: Engines, fault: Path, first: int, second: int, share: float
) -> None:
    key = 1000 * first + int(100 * share)
    prompt = np.random.default_rng(key).integers(3, 500, 200, dtype=np.int32)
    alone, reader = engines[1]
    alone.submit(request(key, EnginePhase.BOTH, prompt))
    expected = (await reader.ended(key)).token_ids
    fault.write_text(f"{nixl_faults.SHORT} {share}")
    end, tokens = await moved(engines, key + 1, first, second, prompt)
    fault.write_text("")
    assert (end.finish, tokens) == (FinishReason.KV_LOST, [])
    end, tokens = await moved(engines, key + 2, first, second, prompt)
    assert (end.finish, tokens) == (FinishReason.LENGTH, expected)
    await until(lambda: all(engine.integrity() == EngineIntegrity(0, 0, 0) for engine, _ in engines.values()))
