"""KV transfers between vLLM engines that fail: no answer has another prompt's tokens, and no block stays held."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
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
from libs.testing.engines.vllm_core import NoFetcher, processes_of
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
OUTPUT_TOKENS = 8
PROMPT_TOKENS = 200
LEASE_S = 12
ENDS_S = 60.0
"""Bound on the end of a sequence, or of a lease that nothing renews."""
IDLE = EngineIntegrity(0, 0, 0)
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


@dataclass
class Side:
    engine: VllmEngine
    reader: EventReader
    core: VllmCore


@dataclass
class Pair:
    source: Side
    target: Side
    fault: Path
    """The file that names the present fault."""
    keys: Iterator[int]

    async def prefill(self, prompt: NDArray[np.int32]) -> KvHandle:
        key = next(self.keys)
        self.source.engine.submit(request(key, EnginePhase.PREFILL, prompt))
        end = (await self.source.reader.ended(key)).end
        assert end is not None and end.handle is not None, end
        return end.handle

    def decode(self, prompt: NDArray[np.int32], handle: KvHandle) -> int:
        """Submit to the target, and return the sequence's id there."""
        key = next(self.keys)
        self.target.engine.submit(request(key, EnginePhase.DECODE, prompt, handle))
        return key

    async def end(self, key: int) -> tuple[SequenceOutput, list[int]]:
        """Wait for the end of a sequence on the target, and return it with all tokens."""
        async with asyncio.timeout(ENDS_S):
            log = await self.target.reader.ended(key)
        assert log.end is not None
        return log.end, log.token_ids

    async def whole(self, prompt: NDArray[np.int32]) -> list[int]:
        """Return the answer that the source computes alone."""
        key = next(self.keys)
        self.source.engine.submit(request(key, EnginePhase.BOTH, prompt))
        return (await self.source.reader.ended(key)).token_ids

    async def moved(self, prompt: NDArray[np.int32]) -> list[int]:
        end, tokens = await self.end(self.decode(prompt, await self.prefill(prompt)))
        assert end.finish is FinishReason.LENGTH, end
        return tokens

    async def until_idle(self) -> None:
        for side in (self.source, self.target):
            await until(lambda engine=side.engine: engine.integrity() == IDLE, timeout_s=ENDS_S)  # type: ignore[misc]


def request(key: int, phase: EnginePhase, prompt: NDArray[np.int32], kv: KvHandle | None = None) -> EngineRequest:
    # Without a root nothing is shared with other sequences, so every block is pulled.
    return EngineRequest(key, f"request-{key}", phase, prompt, len(prompt), OUTPUT_TOKENS, GREEDY, b"", kv)


def prompts(count: int, seed: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 255, PROMPT_TOKENS, dtype=np.int32) for _ in range(count)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("faults")
    nixl_faults.offer(folder / "plugin")
    fault = folder / "fault"
    fault.write_text("")
    model = write_random_llama(folder / "model", **SHAPE)
    config = EngineConfig(
        model, "m", threads=1, block_size_tokens=32, kv_memory_mb=8, max_sequences=4, kv_lease_ms=LEASE_S * 1000,
        vllm_arguments={"max_model_len": 512},
    )  # fmt: skip
    sides = []
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder / "plugin")  # processes that are spawned have the path of this one
        patched.setenv(nixl_faults.FILE_VARIABLE, str(fault))
        for name in ("prefill", "decode"):
            core = VllmCore()
            engine = VllmEngine(config, SystemClock(), core)
            await engine.start(EngineIdentity(name, 1, "127.0.0.1:1"), NoFetcher(), lambda _stage, _fraction: None)
            sides.append(Side(engine, EventReader(engine), core))
    source, target = sides
    yield Pair(source, target, fault, itertools.count(1))
    await asyncio.gather(*(side.engine.close() for side in sides))
    for side in sides:
        await side.reader.close()


@pytest.mark.parametrize("fault", [nixl_faults.LOST, nixl_faults.DUPLICATED, f"{nixl_faults.LATE} {LEASE_S + 3}"])
async def test_a_fault_of_notifications_changes_no_token_and_holds_no_block(pair: Pair, fault: str) -> None:
    first, second = prompts(2, seed=len(fault))
    expected = await pair.whole(first), await pair.whole(second)
    pair.fault.write_text(fault)
    began_s = time.monotonic()
    assert await pair.moved(first) == expected[0]
    await pair.until_idle()
    if fault != nixl_faults.DUPLICATED:
        assert time.monotonic() - began_s > LEASE_S / 2, "only the end of the lease frees the blocks"
    assert await pair.moved(second) == expected[1]
    pair.fault.write_text("")
    await pair.until_idle()
    assert await pair.moved(first) == expected[0], "the engines go on after the fault"


async def test_a_failed_transfer_ends_its_sequence_without_a_token(pair: Pair) -> None:
    prompt = prompts(1, seed=20)[0]
    expected = await pair.whole(prompt)
    pair.fault.write_text(nixl_faults.FAILED)
    end, tokens = await pair.end(pair.decode(prompt, await pair.prefill(prompt)))
    pair.fault.write_text("")
    assert (end.finish, tokens) == (FinishReason.KV_LOST, [])
    await pair.until_idle()
    assert await pair.moved(prompt) == expected


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_a_read_that_is_done_without_all_blocks_ends_its_sequence_without_a_token(
    pair: Pair, share: float
) -> None:
    prompt = prompts(1, seed=25)[0]
    expected = await pair.whole(prompt)
    pair.fault.write_text(f"{nixl_faults.SHORT} {share}")
    end, tokens = await pair.end(pair.decode(prompt, await pair.prefill(prompt)))
    pair.fault.write_text("")
    assert (end.finish, tokens) == (FinishReason.KV_LOST, [])
    await pair.until_idle()
    assert await pair.moved(prompt) == expected


async def test_a_handle_that_covers_other_tokens_than_the_prompt_is_refused(pair: Pair) -> None:
    from libs.engine.vllm import wire

    prompt = prompts(1, seed=30)[0]
    handle = await pair.prefill(prompt)
    handover = wire.unpack_handover(handle.opaque)
    assert handover is not None and handover.parameters["remote_num_tokens"] == PROMPT_TOKENS
    other = wire.Handover(handover.parameters | {"remote_num_tokens": PROMPT_TOKENS - 1}, handover.expires_unix_ns)
    end, tokens = await pair.end(pair.decode(prompt, replace(handle, opaque=wire.pack_handover(other))))
    assert (end.finish, tokens) == (FinishReason.KV_LOST, []) and "lacks" in end.detail
    pair.source.engine.release(handle.opaque)
    await pair.until_idle()


async def test_a_receiver_that_stood_still_past_the_lease_does_not_read_another_prompts_blocks(pair: Pair) -> None:
    prompt, *others = prompts(30, seed=40)
    handle = await pair.prefill(prompt)
    processes = processes_of(pair.target.core)
    for process in processes:
        process.suspend()
    try:
        key = pair.decode(prompt, handle)
        await until(lambda: pair.source.engine.integrity() == IDLE, timeout_s=ENDS_S, what="the end of the lease")
        for other in others:
            pair.source.engine.release((await pair.prefill(other)).opaque)
    finally:
        for process in processes:
            process.resume()
    end, tokens = await pair.end(key)
    assert (end.finish, tokens) == (FinishReason.KV_LOST, [])
    await pair.until_idle()
    assert await pair.moved(prompt) == await pair.whole(prompt)


async def test_a_source_killed_between_its_handle_and_the_read_costs_that_sequence_alone(pair: Pair) -> None:
    """The last test here, since the source is dead after it."""
    prompt, other = prompts(2, seed=50)
    handle = await pair.prefill(prompt)
    for process in processes_of(pair.source.core):
        process.kill()
    end, tokens = await pair.end(pair.decode(prompt, handle))
    assert (end.finish, tokens) == (FinishReason.KV_LOST, [])
    key = next(pair.keys)
    pair.target.engine.submit(request(key, EnginePhase.BOTH, other))
    end, tokens = await pair.end(key)
    assert (end.finish, len(tokens)) == (FinishReason.LENGTH, OUTPUT_TOKENS)
    with pytest.raises(Exception, match=r"(?i)engine ?core"):
        await pair.source.reader.finished()
    await until(lambda: pair.target.engine.integrity() == IDLE, timeout_s=ENDS_S)
