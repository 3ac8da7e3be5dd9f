"""Tests of dummy steps on vLLM's own EngineCore. On a CPU its experts do not run in a data-parallel group, so the
test triggers each dummy step by vLLM's own call, as a rank without work does in lockstep with the others."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import DirectFetcher, EventReader
from libs.testing.engines.real_model import write_random_llama
from libs.testing.wait import until
from libs.worker.telemetry import StepBatchBuilder, TelemetrySource

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS = 25
OUTPUT_TOKENS = 8
Side = tuple[VllmEngine, EventReader, VllmCore]


@pytest.fixture
async def side(tmp_path: Path) -> AsyncIterator[Side]:
    model = write_random_llama(tmp_path / "llama", hidden_size=128, eos_token_id=257)
    core = VllmCore()
    engine = VllmEngine(EngineConfig(model, "m", threads=1, block_size_tokens=32, kv_memory_mb=2), SystemClock(), core)
    await engine.start(EngineIdentity("one", 1, "127.0.0.1:1"), DirectFetcher(), lambda _stage, _fraction: None)
    reader = EventReader(engine)
    yield engine, reader, core
    await engine.close()
    await reader.finished()


def reported_steps(reader: EventReader) -> list[tuple[int, int]]:
    return [span for event in reader.events for span in event.dummy_steps]


async def test_each_dummy_step_is_reported_once_not_as_a_step_and_counts_as_idle(side: Side) -> None:
    engine, reader, core = side
    begun_ns = time.time_ns()
    builder = StepBatchBuilder(TelemetrySource("w", 1, "n", 1, "vllm", group="g"), begun_ns)
    for _ in range(STEPS):
        await core._running.execute_dummy_batch_async()
    ended_ns = time.time_ns()
    await until(lambda: len(reported_steps(reader)) == STEPS)
    spans = reported_steps(reader)
    assert begun_ns < spans[0][0] and spans[-1][1] < ended_ns
    assert all(start < end for start, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert not [event.step for event in reader.events if event.step]
    for event in reader.events:
        builder.add(event, epoch=1)
    batch = builder.cut(time.time_ns(), engine.load(), Assignment(model="m", epoch=1))
    assert batch is not None
    assert batch.dummy_steps.steps == len(batch.dummy_steps.spans) == STEPS
    assert (batch.group, batch.steps.start_unix_ns) == ("g", b"")


async def test_dummy_steps_between_those_of_a_sequence_do_not_change_it(side: Side) -> None:
    engine, reader, core = side
    tokens = np.arange(40, dtype=np.int32)

    def ask(key: int) -> EngineRequest:
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        return EngineRequest(key, f"request-{key}", EnginePhase.BOTH, tokens, len(tokens), OUTPUT_TOKENS, greedy)

    engine.submit(ask(1))
    alone = (await reader.ended(1)).token_ids
    engine.submit(ask(2))
    await asyncio.gather(*(core._running.execute_dummy_batch_async() for _ in range(STEPS)))
    assert (await reader.ended(2)).token_ids == alone
    await until(lambda: len(reported_steps(reader)) == STEPS)
    steps = [event.step for event in reader.events if event.step and event.step.end_unix_ns]
    assert sum(step.decode_sequences for step in steps) == 2 * (OUTPUT_TOKENS - 1)


def test_a_rank_without_work_runs_its_dummy_steps_by_the_call_that_is_counted() -> None:
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

    assert "self.execute_dummy_batch()" in inspect.getsource(DPEngineCoreProc)
    assert DPEngineCoreProc.execute_dummy_batch is EngineCore.execute_dummy_batch
