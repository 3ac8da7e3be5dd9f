"""Tests of TPOT targets in the engine: prompts beside decodes, and transferred sequences that wait to join."""

from random import Random

import numpy as np
import pytest

from libs.contracts.errors import QueueFull
from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.kv_port import KvHandle
from libs.engine.local import make_engine
from libs.engine.port import Capabilities, Engine, EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.runner import Sampled
from libs.engine.sequence import Sequence
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.pace import MAX_HOLD_NS, PEOPLE_STAY_NS, YIELDING_PART, Pace
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EngineBench

MS = 1_000_000
MODEL = StepTimeModel(0, 0.1 * MS, 0, 5 * MS, 5 * MS, 0, 1.0)
"""A decode costs 5 ms, and 5 ms the step; 10 prompt tokens cost 1 ms on top."""
IDENTITY = EngineIdentity("a", 1, "a:1")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def sequence(sequence_id: int, tokens: int, *, target_ms: int = 0, transferred: bool = False) -> Sequence:
    kv = KvHandle("a", 1, "a:1", b"h", tokens - 1, 1) if transferred else None
    phase = EnginePhase.DECODE if transferred else EnginePhase.BOTH
    request = EngineRequest(
        sequence_id, "r", phase, np.zeros(tokens, np.int32), tokens - 1 if transferred else tokens, 50, GREEDY,
        kv=kv, tpot_target_ns=target_ms * MS,
    )  # fmt: skip
    made = Sequence(request, block_size_tokens=16, max_context_tokens=4096)
    made.admit(list(range(made.blocks_now)), 0)
    return made


def pace(budget: int = 512) -> Pace:
    made = Pace(budget)
    made.step_time = MODEL
    return made


def test_a_prompt_gets_the_time_that_the_tightest_running_sequence_leaves() -> None:
    running, prompt = sequence(1, 20, target_ms=20), sequence(2, 900)
    running.start_line(1000 * MS, 20)
    assert pace().prompt_tokens([running], [prompt], 1000 * MS) == 90, "a twentieth of 20 ms stays in hand"
    assert pace().prompt_tokens([running], [prompt], 1005 * MS) == 40
    assert pace(30).prompt_tokens([running], [prompt], 1000 * MS) == 30
    assert pace().prompt_tokens([sequence(1, 20)], [prompt], 1000 * MS) == 512, "no target, no limit"
    assert Pace(512).prompt_tokens([running], [prompt], 1000 * MS) == 512, "no model, no limit"


def test_prompts_that_have_waited_too_long_continue_regardless_of_the_pace() -> None:
    made = pace()
    running, prompt = sequence(1, 20, target_ms=10), sequence(2, 400)
    running.start_line(MS, 20)
    assert made.prompt_tokens([running], [prompt], MS) == 0
    assert made.prompt_tokens([running], [prompt], MS + MAX_HOLD_NS) > 0


def test_a_prompt_leaves_short_steps_to_a_sequence_in_transfer() -> None:
    coming, prompt = sequence(1, 20, target_ms=20, transferred=True), sequence(2, 900)
    assert pace().prompt_tokens([], [prompt], MS, [coming]) == 300, "30 ms: one and a half tokens of it"
    assert pace().prompt_tokens([], [prompt], MS) == 512
    assert pace().prompt_tokens([], [prompt], MS, [sequence(3, 20, transferred=True)]) == 512, "no target, no limit"
    running = sequence(4, 20, target_ms=200)
    running.start_line(1000 * MS, 20)
    assert pace().prompt_tokens([running], [prompt], 1000 * MS, [coming]) == 200


def test_a_newcomer_that_would_break_the_pace_waits_a_bounded_time_and_then_stays() -> None:
    made = pace()
    running, newcomer = sequence(1, 20, target_ms=12), sequence(2, 30, transferred=True)
    assert made.decodes([running, newcomer], MS) == [running]
    assert made.decodes([running, newcomer], MAX_HOLD_NS - 10 * MS) == [running]
    assert made.decodes([running, newcomer], MS + MAX_HOLD_NS) == [running, newcomer]
    assert made.decodes([running, newcomer], MS + MAX_HOLD_NS + 1) == [running, newcomer]


def test_a_newcomer_that_fits_or_meets_no_other_sequence_joins_at_once() -> None:
    assert len(pace().decodes([sequence(1, 20, target_ms=15), sequence(2, 30, transferred=True)], MS)) == 2
    alone = [sequence(2, 30, target_ms=1, transferred=True)]
    assert pace().decodes(alone, MS) == alone


def engine_bench() -> EngineBench:
    def make(**config: object) -> Engine:
        return make_engine("sim", EngineConfig(None, "sim", **{"sim_speedup": 20.0, **config}), SystemClock())  # type: ignore[arg-type]

    return EngineBench(make)


def test_every_token_beside_long_prompts_meets_its_target() -> None:
    capabilities = Capabilities(16, 2000, 1, 8192, 8, "test")
    core = Core(
        EngineConfig(None, "sim", prefill_chunk_tokens=4096),
        capabilities,
        frozenset(),
        IDENTITY,
        random_bytes=Random(1).randbytes,
    )
    core.set_step_time(MODEL)
    core.submit(
        EngineRequest(1, "r", EnginePhase.BOTH, np.ones(8, np.int32), 8, 40, GREEDY, tpot_target_ns=30 * MS), MS
    )
    core.submit(EngineRequest(2, "r", EnginePhase.BOTH, np.ones(4096, np.int32), 4096, 2, GREEDY), MS)
    core.set_prefill_budget(8)
    now_ns, came, sizes = MS, [], []
    while len(came) < 40:
        batch = core.plan(now_ns)
        assert batch is not None
        core.begin(batch, now_ns)
        now_ns += round(MODEL.step_ns(batch.work))
        report = core.apply(batch, {c.sequence_id: Sampled(7) for c in batch.chunks if c.sample}, now_ns)
        event = core.take_event(report)
        assert event is not None
        came += [now_ns for output in event.outputs if output.sequence_id == 1 and output.token_ids]
        sizes.append(report.prefill_tokens if report.decode_sequences else 0)
        core.set_prefill_budget(4096)
    assert all(when <= came[0] + 30 * MS * number for number, when in enumerate(came))
    assert 150 <= max(sizes) <= 300, "a chunk takes what 30 ms leave, and no more"
    assert sum(sizes) == 4096


async def test_one_measurement_waits_at_a_time_and_a_cancelled_one_makes_room() -> None:
    import asyncio

    bench = engine_bench()
    engine, _ = await bench.start("one", sim_speedup=0.05)
    first = asyncio.create_task(engine.measure_prefill(256))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await engine.measure_prefill(16)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await engine.measure_prefill(16)
    await bench.close()


def test_a_prompt_that_yields_is_computed_only_while_no_other_waits() -> None:
    capabilities = Capabilities(16, 2000, 1, 8192, 8, "test")
    core = Core(
        EngineConfig(None, "sim", prefill_chunk_tokens=64),
        capabilities,
        frozenset(),
        IDENTITY,
        random_bytes=Random(1).randbytes,
    )

    def ask(sequence_id: int, *, yields: bool) -> None:
        request = EngineRequest(sequence_id, "r", EnginePhase.BOTH, np.ones(96, np.int32), 96, 1, GREEDY, yields=yields)
        core.submit(request, now_ns)

    def step() -> None:
        batch = core.plan(now_ns)
        assert batch is not None
        core.begin(batch, now_ns)
        core.apply(batch, {c.sequence_id: Sampled(7) for c in batch.chunks if c.sample}, now_ns)
        order.append((batch.chunks[0].sequence_id, sum(len(chunk.token_ids) for chunk in batch.chunks)))
        assert order[-1][0] != 3 or len(batch.chunks) == 1

    now_ns, order = MS, list[tuple[int, int]]()
    ask(1, yields=True)
    ask(2, yields=True)
    step()
    ask(3, yields=False)
    step()
    step()
    assert order == [(1, 64), (3, 64), (3, 32)]
    step()
    assert order[-1] == (1, 64 // YIELDING_PART), "the next person does not wait for a whole chunk"
    now_ns += PEOPLE_STAY_NS
    step()
    assert order[-1] == (1, 64), "no sequence has arrived for long, so the device is used well"
    while core.load().running + core.load().waiting:
        step()
