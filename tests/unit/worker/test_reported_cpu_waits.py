"""What a worker's batches say of its waits for a CPU, and the number of its description."""

from types import SimpleNamespace
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.engine.reports import EngineLoad
from libs.perfmodel.learner import StepTimeLearner
from libs.policy.step_time import StepTimeModel
from libs.testing.workers.hosts import RecordingBus
from libs.worker.telemetry import StepBatchBuilder, TelemetryPublisher, TelemetrySource

LOAD = EngineLoad(running=0, waiting=0, waiting_prefill_tokens=0, awaiting_kv=0, free_kv_blocks=0)


class Waits:
    """A reader that has counted `waits_ns` between reports."""

    def __init__(self, *waits_ns: int | None) -> None:
        self._waits_ns = list(waits_ns)

    def take(self) -> int | None:
        return self._waits_ns.pop(0)


def publisher(bus: RecordingBus, waits: Any, clock: Any) -> TelemetryPublisher:
    host: Any = SimpleNamespace(
        engine=SimpleNamespace(load=lambda: LOAD),
        assignment=SimpleNamespace(message=Assignment(model="m")),
        speed=SimpleNamespace(settled_kv_token_ns=0.0),
    )
    step_times: Any = SimpleNamespace(
        fitted=StepTimeLearner(StepTimeModel(1e6, 1e3, 0.0, 1e6, 1e3, 1.0, interference=0.0)).fitted()
    )
    kv: Any = SimpleNamespace(pulls=0, refused_kv_pulls=0, refused_pulls=0)
    gpus: Any = SimpleNamespace(take=lambda: ())
    builder = StepBatchBuilder(TelemetrySource("w", 1, "n", 1, "sim"), 0)
    return TelemetryPublisher(
        builder, host, step_times, bus, clock, kv=kv, gpus=gpus, cpu_waits=waits, period_ms=100
    )  # fmt: skip


@pytest.mark.parametrize(
    ("waits", "reported"), [(Waits(30, 0), [30, 0]), (Waits(None, 7), [None, 7]), (None, [None, None])]
)
def test_each_batch_has_the_wait_since_the_last_one_or_none(waits: Any, reported: list[int | None]) -> None:
    bus, moments = RecordingBus(), iter((1_000, 2_000))
    reports = publisher(bus, waits, SimpleNamespace(now_ns=lambda: next(moments)))
    reports.publish()
    reports.publish()
    found: list[Any] = bus.published
    assert [each.sched_delay_ns if each.HasField("sched_delay_ns") else None for each in found] == reported


def test_the_number_of_a_description_changes_with_the_assignment_alone() -> None:
    builder = StepBatchBuilder(TelemetrySource("w", 1, "n", 1, "sim"), 0)
    assignment, found = Assignment(model="m", epoch=1), []
    for number in range(1, 7):
        assignment.epoch = 1 + number // 3  # the same message, changed in place
        busy = EngineLoad(running=number, waiting=0, waiting_prefill_tokens=0, awaiting_kv=0, free_kv_blocks=0)
        batch = builder.cut(number, busy, assignment, dropped_batches=number)
        assert batch is not None
        found.append(batch.description)
    assert found == [1, 1, 2, 2, 2, 3]
