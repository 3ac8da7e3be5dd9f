"""Tests of the loop around the engine core: failure, slowness and time."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine, PoolFault, make_engine
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import (
    MAX_UNREAD_STEPS,
    BlockEvents,
    EngineEvent,
    EventQueue,
    FinishReason,
    SequenceOutput,
    StepReport,
)
from libs.engine.runner import Batch, Sampled
from libs.engine.sim import SimRunner
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import DirectFetcher, EventReader
from libs.testing.wait import until

CONFIG = EngineConfig(None, "sim", sim_profile="instant")
IDENTITY = EngineIdentity("one", 1, "")
Step = Callable[[], Awaitable[None]]


class HookedRunner(SimRunner):
    """The sim runner with something to await in each step."""

    def __init__(self, hook: Step) -> None:
        super().__init__(CONFIG)
        self.steps = 0
        self._hook = hook

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        self.steps += 1
        await self._hook()
        return await super().run(batch)


@dataclass
class Started:
    """An engine whose steps wait for `gate`, and fail when `error` is set."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.runner = HookedRunner(self._hook)
        self.engine = LocalEngine(self.runner, CONFIG, SystemClock())

    async def _hook(self) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    def submit(self, sequence_id: int, output: int = 4) -> None:
        prompt = np.arange(20, dtype=np.int32)
        self.engine.submit(
            EngineRequest(sequence_id, f"r{sequence_id}", EnginePhase.BOTH, prompt, 20, output, SamplingParams())
        )


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    started = Started()
    await started.engine.start(IDENTITY, DirectFetcher(), lambda _stage, _fraction: None)
    yield started
    await started.engine.close()


async def test_a_failing_runner_ends_the_events_with_its_error(started: Started) -> None:
    started.error = OSError("device lost")
    started.gate.set()
    started.submit(1)
    with pytest.raises(OSError, match="device lost"):
        async for _ in started.engine.events():
            pass
    await started.engine.close()
    assert started.engine.integrity().live_sequences == 0


async def test_a_long_step_is_announced_before_it_ends(started: Started) -> None:
    reader = EventReader(started.engine)
    started.submit(1, output=1)
    await until(lambda: started.runner.steps == 1)
    assert started.engine.load().reported_to_unix_ns > 0
    await reader.until(lambda: any(event.step for event in reader.events))
    announced = reader.events[-1].step
    assert announced is not None and announced.end_unix_ns == 0 and announced.prefill_tokens == 20
    assert started.engine.load().reported_to_unix_ns == 0
    started.gate.set()
    await reader.ended(1)
    ended = reader.events[-1].step
    assert ended is not None and ended.start_unix_ns == announced.start_unix_ns
    assert ended.end_unix_ns - ended.start_unix_ns >= 100_000_000
    await reader.close()


async def test_a_long_measurement_is_announced_like_any_step(started: Started) -> None:
    reader = EventReader(started.engine)
    trial = asyncio.ensure_future(started.engine.measure_prefill(64))
    await until(lambda: started.runner.steps == 1)
    await reader.until(lambda: any(event.step for event in reader.events))
    announced = reader.events[-1].step
    assert announced is not None and announced.end_unix_ns == 0 and announced.prefill_tokens == 64
    assert started.engine.load().reported_to_unix_ns == 0, "telemetry must go on while it runs"
    started.gate.set()
    took_ns = await trial
    await reader.until(lambda: len(reader.events) > 1)
    ended = reader.events[-1].step
    assert ended is not None and ended.start_unix_ns == announced.start_unix_ns
    assert ended.end_unix_ns - ended.start_unix_ns == took_ns
    await reader.close()


async def test_a_lagging_consumer_stops_the_engine_and_loses_nothing(started: Started) -> None:
    started.gate.set()
    output = 2 * MAX_UNREAD_STEPS
    started.submit(1, output=output)
    await until(lambda: started.runner.steps == MAX_UNREAD_STEPS)
    for _ in range(20):
        await asyncio.sleep(0)
    assert started.runner.steps == MAX_UNREAD_STEPS
    oldest = started.engine.load().reported_to_unix_ns
    reader = EventReader(started.engine)
    assert len((await reader.ended(1)).token_ids) == output
    steps = [event.step for event in reader.events if event.step]
    assert len(steps) == output and steps[0].start_unix_ns == oldest
    await reader.close()


async def test_work_that_arrives_during_a_step_joins_the_next_one(started: Started) -> None:
    reader = EventReader(started.engine)
    started.submit(1)
    await until(lambda: started.runner.steps == 1)
    started.submit(2)
    started.gate.set()
    await reader.ended(2)
    steps = [event.step for event in reader.events if event.step]
    assert (steps[1].decode_sequences, steps[1].prefill_tokens) == (1, 20)
    await reader.close()


async def test_abort_during_a_step_takes_effect_when_it_ends(started: Started) -> None:
    reader = EventReader(started.engine)
    started.submit(1)
    await until(lambda: started.runner.steps == 1)
    started.engine.abort(1)
    assert started.engine.integrity().referenced_blocks > 0
    started.gate.set()
    log = await reader.ended(1)
    assert log.end is not None and (log.end.finish, log.token_ids) == (FinishReason.ABORTED, [])
    await reader.close()


async def test_an_engine_that_has_lost_a_block_dies_once_it_is_idle(started: Started) -> None:
    reader = EventReader(started.engine)
    started.gate.set()
    started.submit(1)
    await reader.ended(1)
    assert started.engine.integrity().pool_faults == started.engine.load().pool_faults == 0
    started.engine._core._pool.allocate(1)
    started.submit(2)
    with pytest.raises(PoolFault, match="1 KV blocks count as held, 0 are"):
        await reader.finished()
    assert started.engine.integrity().pool_faults == started.engine.load().pool_faults == 1


async def test_a_busy_engine_checks_its_pool_too(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.engine.local.POOL_CHECK_STEPS", 2)
    reader = EventReader(started.engine)
    started.submit(1, output=50)
    await until(lambda: started.runner.steps == 1)
    started.engine._core._pool.allocate(1)
    started.gate.set()
    with pytest.raises(PoolFault):
        await reader.finished()
    assert len(reader.log(1).token_ids) == 2


def step(start_ns: int) -> StepReport:
    return StepReport(start_ns, start_ns + 1, 0, 0, 0, 1, 1, 0, 0)


async def test_changes_between_steps_join_the_last_unread_event() -> None:
    queue = EventQueue()
    queue.put(EngineEvent(outputs=(SequenceOutput(1),), step=step(10), blocks=BlockEvents((b"a", b"b"), (b"c",))))
    queue.put(EngineEvent(outputs=(SequenceOutput(2),), kv_waits=((5, 8),), blocks=BlockEvents((b"c",), (b"a",))))
    assert queue.oldest_start_ns() == 5
    event = await queue.get()
    assert event is not None and [output.sequence_id for output in event.outputs] == [1, 2]
    assert event.step == step(10) and event.blocks == BlockEvents((b"b",), ())
    assert queue.oldest_start_ns() == 0


async def test_a_closed_queue_first_returns_its_unread_events() -> None:
    queue = EventQueue()
    queue.put(EngineEvent(step=step(1)))
    queue.end(OSError("gone"))
    queue.put(EngineEvent(step=step(2)))
    assert await queue.get() == EngineEvent(step=step(1))
    with pytest.raises(OSError, match="gone"):
        await queue.get()


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(StartupError, match="torch, sim"):
        make_engine("cuda", CONFIG, SystemClock())


async def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("libs.engine.torch.")]:
        monkeypatch.delitem(sys.modules, name)
    engine = make_engine("torch", CONFIG, SystemClock())
    with pytest.raises(StartupError, match=r"torch.*pip install 'fulcrum-serving\[torch\]'"):
        await engine.start(IDENTITY, DirectFetcher(), lambda _stage, _fraction: None)
    await engine.close()


@pytest.mark.system
def test_making_an_engine_imports_no_torch() -> None:
    code = "import sys, libs.engine.local; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
