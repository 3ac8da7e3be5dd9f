"""Tests that the seeded fault test passes on a few seeds, replays exactly and detects injected faults."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import DECISIONS
from libs.policy.worker.credits import CreditPool
from libs.testing.memory.broker import Incoming, MemoryBroker
from libs.worker.gateways import Outbox
from libs.worker.roles import AssignmentState
from load.chaos.faults import CONTROL_WEIGHTS
from load.chaos.run import Plan, run_seed
from services.metrics.accounting.answer import GpuTime
from services.metrics.state import MetricsState
from services.planner import run as planner
from services.planner.state import PlannerState

SHORT = Plan(requests=60)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_request_is_lost_repeated_or_wrong_and_nothing_is_left(seed: int) -> None:
    result = run_seed(seed, SHORT)
    assert result.wrong == []
    assert result.requests == SHORT.requests
    assert sum(result.faults.values()) > 2
    assert result.decisions > 10


@pytest.mark.parametrize(
    "kinds", [("kill planner", "kill metrics"), ("freeze planner", "freeze metrics", "freeze broker")]
)
def test_planner_and_metrics_recover_the_complete_state(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    for kind in CONTROL_WEIGHTS:
        monkeypatch.setitem(CONTROL_WEIGHTS, kind, int(kind in kinds))
    result = run_seed(4, Plan(requests=60, control_fault_every_s=0.2))
    assert result.wrong == []
    assert sum(result.faults[kind] for kind in kinds) > 2


def test_a_seed_gives_the_same_schedule_in_any_process() -> None:
    here = run_seed(7, SHORT)
    command = (sys.executable, "-m", "load.chaos", "--seed", "7", "--requests", str(SHORT.requests), "--json")
    there = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f'"7": "{here.digest:08x}"' in there.stdout


def test_different_seeds_give_different_schedules() -> None:
    assert run_seed(1, Plan(requests=5)).digest != run_seed(2, Plan(requests=5)).digest


def test_a_lost_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Outbox.add_tokens
    calls = []

    def forgetful(self: Any, output: Any) -> None:
        calls.append(output)
        if len(calls) % 50:
            add(self, output)

    monkeypatch.setattr(Outbox, "add_tokens", forgetful)
    assert any("said" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_an_epoch_won_by_two_orders_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    take = AssignmentState.set_role

    def lenient(self: Any, *, expected_epoch: int, **fields: Any) -> Any:
        return take(self, expected_epoch=self.current.epoch, **fields)

    monkeypatch.setattr(AssignmentState, "set_role", lenient)
    assert any("were taken at epoch" in wrong for wrong in run_seed(2, Plan(requests=200)).wrong)


def test_a_leaked_slot_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    free = CreditPool.free
    calls = []

    def forgetful(self: Any) -> None:
        calls.append(self)
        if len(calls) % 5:
            free(self)

    monkeypatch.setattr(CreditPool, "free", forgetful)
    assert any("at rest" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_a_planner_that_has_stopped_deciding_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    decide: Callable[..., Awaitable[None]] = planner.decide_forever

    async def tired(*given: Any, **named: Any) -> None:
        try:
            async with asyncio.timeout(2.0):
                await decide(*given, **named)
        except TimeoutError:
            await asyncio.Event().wait()

    monkeypatch.setattr(planner, "decide_forever", tired)
    assert any("decided nothing" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_a_planner_that_uses_a_stale_list_of_workers_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PlannerState.take_workers

    def early(self: Any, workers: Any, now_ns: int) -> Any:
        return take(self, workers if now_ns - self.started_ns < 2e9 else self.workers, now_ns)

    monkeypatch.setattr(PlannerState, "take_workers", early)
    assert any("planner knows of" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_a_decision_lost_by_the_broker_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    append = MemoryBroker.append
    taken = []

    def forgetful(self: Any, record: Incoming, partition: int | None = None) -> None:
        taken.append(DECISIONS.stem in record.topic)
        if not taken[-1] or sum(taken) % 5:
            append(self, record, partition)

    monkeypatch.setattr(MemoryBroker, "append", forgetful)
    assert any("the broker has nothing of decisions" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_time_that_metrics_does_not_count_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    take = MetricsState.take
    taken = []

    def forgetful(self: Any, record: Any, now_ns: int) -> None:
        taken.append(isinstance(record.value, StepBatch))
        if not taken[-1] or sum(taken) % 3:
            take(self, record, now_ns)

    monkeypatch.setattr(MetricsState, "take", forgetful)
    assert any("of the last quiet second" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_time_that_metrics_counts_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    of = GpuTime.of

    def generous(time: Any) -> GpuTime:
        reported = of(time)
        return GpuTime(
            covered=reported.covered,
            prefill=reported.prefill,
            decode=2 * reported.decode,
            kv_wait=reported.kv_wait,
            idle=reported.idle,
        )

    monkeypatch.setattr(GpuTime, "of", generous)
    assert any("do not make up" in wrong for wrong in run_seed(1, SHORT).wrong)
