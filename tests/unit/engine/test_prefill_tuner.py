"""Tests of how a prefill worker finds its chunk size, on an engine whose steps take exactly their modelled time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from structlog.testing import capture_logs

from libs.contracts.errors import QueueFull
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL
from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, Progress, SamplingParams
from libs.engine.reports import EngineEvent
from libs.engine.runner import Batch, Sampled
from libs.engine.sim import SimRunner
from libs.model.info import load_model_info
from libs.perfmodel.profiles import prior_step_time, profile
from libs.policy.worker.pace import MAX_STEP_NS
from libs.policy.worker.saturation import (
    GROWTH,
    KNEE,
    MOST_TOKENS,
    Point,
    PrefillCurve,
    Saturation,
    knee_of,
    trial_work,
)
from libs.stores.steps import StepTimeKey
from libs.testing.engines.engine import DirectFetcher
from libs.testing.workers.hosts import RecordingStepTimes
from libs.worker.telemetry import StepTimes, step_time_key
from libs.worker.tuning import AGAIN, LEASE_S, LOOK_S, WAIT_S, PrefillTuner
from load.chaos.cluster import SimClock
from load.chaos.loop import SimLoop

PROFILE = "llama3.1-8b-h200-aic"
TRUE = profile(PROFILE).step_time
CONFIG = EngineConfig(None, "sim", sim_profile=PROFILE)
MS = 1_000_000
CURVE = PrefillCurve(Saturation(208, 1000.0, (Point(208, 1000.0, 1000.0),), TRUE), 1)


class HeldUp(SimRunner):
    """A runner whose prompt steps of one size are delayed once each: the first, and others in turn."""

    def __init__(self, config: EngineConfig, tokens: int, held_up: frozenset[int]) -> None:
        super().__init__(config)
        self._size = tokens
        self._held_up = held_up
        self._seen = 0

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        """Take 100 times as long if the step is delayed."""
        if batch.work.prefill_tokens == self._size:
            self._seen += 1
            if self._seen in self._held_up:
                await asyncio.sleep(TRUE.prefill_ns(batch.work) / 1e9 * 99)
        return await super().run(batch)


class Beside(SimRunner):
    """A device whose steps others hold up, each by another share, for its first so many seconds."""

    def __init__(self, config: EngineConfig, until_s: float) -> None:
        super().__init__(config)
        self._until_s = until_s
        self._random = Random(1)

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        """Take up to three times as long."""
        if asyncio.get_running_loop().time() < self._until_s:
            await asyncio.sleep(TRUE.prefill_ns(batch.work) / 1e9 * 2 * self._random.random())
        return await super().run(batch)


class Wide(SimRunner):
    """Another variant of the same device."""

    async def load(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Return the capabilities of four GPUs."""
        return replace(await super().load(identity, progress), variant="tp4")


@dataclass
class Worker:
    """The parts of a worker that its tuner uses."""

    engine: LocalEngine
    tuner: PrefillTuner
    store: RecordingStepTimes
    key: StepTimeKey
    events: list[EngineEvent]

    @property
    def trials(self) -> list[int]:
        """Return the prompt tokens of the steps so far."""
        steps = [event.step for event in self.events if event.step and event.step.end_unix_ns]
        return [step.prefill_tokens for step in steps if step.prefill_tokens and not step.decode_sequences]


@asynccontextmanager
async def worker(
    store: RecordingStepTimes | None = None, runner: SimRunner | None = None, *, kv_memory_mb: int = 0
) -> AsyncIterator[Worker]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    store, clock = store or RecordingStepTimes(), SimClock(loop)
    config = replace(CONFIG, sim_kv_memory_mb=kv_memory_mb)
    engine = LocalEngine(runner or SimRunner(config), config, clock)
    await engine.start(EngineIdentity("w", 1, ""), DirectFetcher(), lambda _stage, _fraction: None)
    key = step_time_key(engine, load_model_info("builtin:sim"))
    step_times = StepTimes(store, key, prior_step_time("sim", engine.device).scaled(5))
    step_times.on_change(engine.set_step_time)
    events: list[EngineEvent] = []

    async def read() -> None:
        async for event in engine.events():
            events.append(event)
            step_times.on_event(event)

    reading = asyncio.create_task(read())
    try:
        yield Worker(engine, PrefillTuner(engine, step_times, clock, lambda _tokens: None), store, key, events)
    finally:
        await engine.close()
        await reading


def virtual(work: Callable[[], Awaitable[None]]) -> float:
    """Run it on a loop whose timers are exact and on which computing takes no time; the seconds that it took."""
    loop = SimLoop(Random(0))
    try:
        loop.run_until_complete(work())
        return loop.time()
    finally:
        loop.close()


def saturates(chunk_tokens: int) -> bool:
    """Return whether it is the knee or next to it."""
    exact, plateau = knee_of(TRUE, MOST_TOKENS)
    rate = chunk_tokens / TRUE.prefill_ns(trial_work(chunk_tokens)) * 1e9
    return rate >= (KNEE - 0.01) * plateau and chunk_tokens <= GROWTH * exact


def test_the_first_worker_finds_the_knee_and_stores_its_curve() -> None:
    async def work() -> None:
        async with worker() as first:
            await first.tuner.settle(ROLE_PREFILL)
            assert saturates(first.tuner.chunk_tokens), first.tuner.chunk_tokens
            kept = first.store.curves[first.key].saturation
            assert kept.chunk_tokens == first.tuner.chunk_tokens and kept.curve[-1].tokens == MOST_TOKENS
            assert not first.store.claimed

    virtual(work)


def test_one_of_several_starting_workers_measures_and_the_others_use_its_curve() -> None:
    async def work() -> None:
        store = RecordingStepTimes()
        async with worker(store) as one, worker(store) as two, worker(store) as three:
            together = (one, two, three)
            await asyncio.gather(*(each.tuner.settle(ROLE_PREFILL) for each in together))
            assert [bool(each.trials) for each in together] == [True, False, False]
            assert {each.tuner.chunk_tokens for each in together} == {store.curves[one.key].saturation.chunk_tokens}

    virtual(work)


def test_a_worker_that_waits_too_long_for_another_starts_and_uses_a_later_curve() -> None:
    async def work() -> None:
        async with worker() as late:
            late.store.claimed.add(late.key)
            with capture_logs() as logs:
                await late.tuner.settle(ROLE_PREFILL)
            assert any("measuring for too long" in entry.get("reason", "") for entry in logs)
            assert (late.tuner.chunk_tokens, late.trials) == (512, [])
            late.store.curves[late.key] = CURVE
            await asyncio.wait_for(late.tuner.run(), LOOK_S + 1)
            assert late.tuner.chunk_tokens == 208

    assert WAIT_S <= virtual(work) < WAIT_S + LOOK_S + 2
    assert LEASE_S < WAIT_S, "what a dead one has claimed is free before others give up"


@pytest.mark.parametrize("width", [SimRunner, Wide])
def test_a_curve_is_used_by_equal_workers_only(width: type[SimRunner]) -> None:
    async def work() -> None:
        store = RecordingStepTimes()
        store.curves[StepTimeKey("sim", "sim@builtin-sim-1", f"sim:{PROFILE}", "")] = CURVE
        async with worker(store, width(CONFIG)) as other:
            await other.tuner.settle(ROLE_PREFILL)
            assert (other.tuner.chunk_tokens == 208) == (width is SimRunner)

    virtual(work)


def test_a_curve_that_ends_before_its_plateau_is_applied_but_not_stored() -> None:
    async def work() -> None:
        async with worker() as busy:
            found = await busy.tuner.tune(most_tokens=256)
            assert found is not None and found.truncated
            assert busy.tuner.chunk_tokens == found.chunk_tokens <= 256
            assert busy.store.curves == {}
            whole = await busy.tuner.tune()
            assert whole is not None and not whole.truncated
            assert busy.store.curves[busy.key] == whole.curve

    virtual(work)


def test_a_curve_measured_beside_neighbours_is_measured_again_once_they_have_gone() -> None:
    async def work() -> None:
        store = RecordingStepTimes()
        async with worker(store, Beside(CONFIG, LOOK_S)) as early, worker(store) as late:
            await early.tuner.settle(ROLE_PREFILL)
            first = store.curves[early.key]
            assert not first.saturation.is_steady
            await late.tuner.settle(ROLE_PREFILL)
            assert late.tuner.chunk_tokens == first.saturation.chunk_tokens and late.trials == [], "none waits for it"
            await asyncio.wait_for(early.tuner.run(), 3 * LOOK_S)
            second = store.curves[early.key].saturation
            assert second.is_steady and saturates(second.chunk_tokens)
            assert second.plateau_tokens_per_s > 1.2 * first.saturation.plateau_tokens_per_s
            await asyncio.wait_for(late.tuner.run(), 3 * LOOK_S)
            assert late.tuner.chunk_tokens == early.tuner.chunk_tokens == second.chunk_tokens

    virtual(work)


def test_a_worker_that_is_always_disturbed_repeats_its_measurement_a_few_times_and_starts() -> None:
    async def work() -> None:
        async with worker(runner=Beside(CONFIG, 1e9)) as unlucky:
            await unlucky.tuner.settle(ROLE_PREFILL)
            once = len(unlucky.trials)
            await asyncio.wait_for(unlucky.tuner.run(), (AGAIN + 1) * (LOOK_S + 20))
            assert once < len(unlucky.trials) <= (AGAIN + 1) * once

    virtual(work)


def test_no_measurement_is_repeated_while_prompts_run() -> None:
    async def work() -> None:
        async with worker(runner=Beside(CONFIG, 1e9)) as busy:
            await busy.tuner.settle(ROLE_PREFILL)
            once = len(busy.trials)
            prompt = np.ones(8, np.int32)
            busy.engine.submit(EngineRequest(1, "r", EnginePhase.BOTH, prompt, 8, 9000, SamplingParams()))
            running = asyncio.create_task(busy.tuner.run())
            await asyncio.sleep(LOOK_S + 5)
            assert busy.engine.load().running and len(busy.trials) == once + 1, "the prompt's own step"
            running.cancel()

    virtual(work)


def test_a_requested_measurement_waits_for_others_of_its_kind() -> None:
    async def work() -> None:
        store = RecordingStepTimes()
        async with worker(store) as one, worker(store) as two:
            together = await asyncio.gather(one.tuner.tune(), two.tuner.tune())
            assert all(together) and not store.claimed
            spans = [
                (steps[0].start_unix_ns, steps[-1].end_unix_ns)
                for each in (one, two)
                if (steps := [event.step for event in each.events if event.step])
            ]
            (_, end_ns), (begin_ns, _) = sorted(spans)
            assert end_ns <= begin_ns, "two that measure at once would measure each other"
            store.claimed.add(one.key)
            with pytest.raises(QueueFull, match="another worker of this kind measures"):
                await one.tuner.tune()

    virtual(work)


def test_a_worker_without_room_at_its_start_uses_what_another_measures_later() -> None:
    async def work() -> None:
        async with worker(kv_memory_mb=128) as small:
            await small.tuner.settle(ROLE_PREFILL)
            assert small.trials and max(small.trials) < 1024 and small.store.curves == {}
            small.store.curves[small.key] = CURVE
            await asyncio.wait_for(small.tuner.run(), LOOK_S)
            assert small.tuner.chunk_tokens == 208

    virtual(work)


@pytest.mark.parametrize("held_up", [{1}, {1, 2}, {1, 3, 4}])
def test_delayed_steps_do_not_prevent_a_measurement(held_up: set[int]) -> None:
    async def work() -> None:
        async with worker(runner=HeldUp(CONFIG, 64, frozenset(held_up))) as unlucky:
            await unlucky.tuner.settle(ROLE_PREFILL)
            assert saturates(unlucky.tuner.chunk_tokens), unlucky.tuner.chunk_tokens

    virtual(work)


class Slow(RecordingStepTimes):
    """A store whose curves come late."""

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Load after a second."""
        await asyncio.sleep(1)
        return await super().load_curve(key)


def test_a_size_set_during_a_measurement_is_not_overwritten() -> None:
    async def work() -> None:
        async with worker(Slow()) as named:
            named.store.curves[named.key] = CURVE
            taking = asyncio.create_task(named.tuner.run())
            named.tuner.role_is(ROLE_PREFILL)
            await asyncio.sleep(0.5)
            named.tuner.set(96)
            await taking
            assert named.tuner.chunk_tokens == 96

    virtual(work)


def test_a_size_cannot_be_set_while_a_measurement_would_overwrite_it() -> None:
    async def work() -> None:
        async with worker() as measuring:
            tuning = asyncio.create_task(measuring.tuner.tune())
            await asyncio.sleep(0.01)
            with pytest.raises(QueueFull, match="when it has ended"):
                measuring.tuner.set(96)
            await tuning
            assert measuring.tuner.set(96).chunk_tokens == measuring.tuner.chunk_tokens == 96

    virtual(work)


def test_a_worker_in_another_role_uses_no_curve() -> None:
    async def work() -> None:
        async with worker() as decodes:
            decodes.store.curves[decodes.key] = CURVE
            await decodes.tuner.settle(ROLE_MIXED)
            running = asyncio.create_task(decodes.tuner.run())
            decodes.tuner.role_is(ROLE_MIXED)
            await asyncio.sleep(2 * LOOK_S)
            assert decodes.tuner.chunk_tokens == 512
            decodes.tuner.role_is(ROLE_PREFILL)
            await running
            assert decodes.tuner.chunk_tokens == 208

    virtual(work)


@pytest.mark.parametrize("tpot_ms", [0, 100])
def test_a_measurement_delays_no_stream_beyond_its_target(tpot_ms: int) -> None:
    async def work() -> None:
        async with worker(runner=SimRunner(replace(CONFIG, sim_speedup=1 / 5))) as busy:
            busy.engine.set_step_time(TRUE.scaled(5))
            prompt = np.ones(8, np.int32)
            busy.engine.submit(
                EngineRequest(1, "r", EnginePhase.BOTH, prompt, 8, 300, SamplingParams(), tpot_target_ns=tpot_ms * MS)
            )
            while not busy.events:
                await asyncio.sleep(0.001)
            await busy.tuner.tune(apply=False)
            while busy.engine.load().running:
                await asyncio.sleep(0.01)
            came = [e.step.end_unix_ns for e in busy.events for o in e.outputs if e.step and o.token_ids]
            assert busy.trials and len(came) > 100
            if tpot_ms:
                late = [when - came[0] - tpot_ms * MS * number for number, when in enumerate(came)]
                assert max(late) <= MS, "every token comes on its line"
            else:
                assert max(later - when for when, later in pairwise(came)) <= MAX_STEP_NS

    virtual(work)
