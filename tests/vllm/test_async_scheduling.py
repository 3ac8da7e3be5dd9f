"""Tests of asynchronous scheduling: two steps in flight, exhausted blocks, and aborts."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import DirectFetcher, EventReader
from libs.testing.engines.real_model import write_random_llama
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OUTPUT_TOKENS = 96
SEQUENCES = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
Side = tuple[VllmEngine, EventReader]


@pytest.fixture
async def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Side]:
    """An engine that schedules asynchronously, with KV for fewer sequences than it has places."""
    from libs.engine.vllm import launch
    from libs.testing.engines.async_executor import configured_asynchronously

    monkeypatch.setattr(launch, "configured", configured_asynchronously)
    model = write_random_llama(tmp_path / "llama", hidden_size=128, eos_token_id=257)
    config = EngineConfig(model, "async", threads=1, block_size_tokens=32, kv_memory_mb=2, max_sequences=16)
    engine = VllmEngine(config, SystemClock(), VllmCore())
    await engine.start(EngineIdentity("async", 1, "127.0.0.1:1"), DirectFetcher(), lambda _stage, _fraction: None)
    reader = EventReader(engine)
    yield engine, reader
    await engine.close()
    await reader.finished()


def prompt(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 250, 60 + 3 * seed, dtype=np.int32)


def request(key: int, seed: int) -> EngineRequest:
    tokens = prompt(seed)
    return EngineRequest(key, f"request-{key}", EnginePhase.BOTH, tokens, len(tokens), OUTPUT_TOKENS, GREEDY)


def under_way(engine: VllmEngine) -> bool:
    """Return whether a step ran while another was reported."""
    return bool(engine._report.running_since_ns)


async def test_preempted_sequences_have_the_tokens_of_each_alone(side: Side) -> None:
    engine, reader = side
    alone = []
    for seed in range(SEQUENCES):
        engine.submit(request(seed + 1, seed))
        await until(lambda: under_way(engine))  # synchronous scheduling never comes here
        alone.append((await reader.ended(seed + 1)).token_ids)
    assert not engine.load().preemptions
    for seed in range(SEQUENCES):
        engine.submit(request(100 + seed, seed))
    together = [(await reader.ended(100 + seed)).token_ids for seed in range(SEQUENCES)]
    assert engine.load().preemptions and engine.load().recomputed_tokens
    assert together == alone


async def test_two_steps_in_flight_never_overlap_and_add_up_to_the_computed_tokens(side: Side) -> None:
    engine, reader = side
    for seed in range(3):
        engine.submit(request(seed + 1, seed))
    for seed in range(3):
        await reader.ended(seed + 1)
    await until(lambda: not under_way(engine))
    steps = [event.step for event in reader.events if event.step and event.step.end_unix_ns]
    assert all(before.end_unix_ns <= after.start_unix_ns for before, after in itertools.pairwise(steps))
    assert sum(step.prefill_tokens for step in steps) == sum(len(prompt(seed)) for seed in range(3))
    assert sum(step.decode_sequences for step in steps) == 3 * (OUTPUT_TOKENS - 1)


async def test_an_abort_during_running_steps_leaves_nothing_and_does_not_affect_others(side: Side) -> None:
    engine, reader = side
    engine.submit(request(1, 1))
    alone = (await reader.ended(1)).token_ids
    for seed in range(4):
        engine.submit(request(10 + seed, seed))
    await reader.tokens(10, 5)
    await until(lambda: under_way(engine))
    for key in (10, 12, 13):
        engine.abort(key)
    ends = [(await reader.ended(key)).end for key in (10, 12, 13)]
    assert all(end is not None and end.finish is FinishReason.ABORTED for end in ends)
    assert (await reader.ended(11)).token_ids == alone
    await until(lambda: engine.integrity() == EngineIntegrity(0, 0, 0))


async def test_a_measuring_step_runs_alone(side: Side) -> None:
    engine, reader = side
    engine.submit(request(1, 1))
    await reader.tokens(1, 3)
    measured_ns = await engine.measure_prefill(128)
    assert measured_ns is None or measured_ns > 0
    assert len((await reader.ended(1)).token_ids) == OUTPUT_TOKENS
    while (measured_ns := await engine.measure_prefill(128)) is None:
        pass
    of_trial = [event.step for event in reader.events if event.step and event.step.prefill_tokens == 128]
    assert of_trial and all(step.decode_sequences == 0 for step in of_trial)
    assert measured_ns in {step.end_unix_ns - step.start_unix_ns for step in of_trial}
