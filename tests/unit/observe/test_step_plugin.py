"""Tests of the vLLM plugin: its records of steps, their encoding, and its behaviour without a receiver."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fulcrum_observe.engine import follow, role_of
from fulcrum_observe.recorder import LONGEST_NS, MAX_STEPS, StepRecorder
from fulcrum_observe.reporter import MAX_BATCHES, Reporter, Unreachable
from fulcrum_observe.wire import ROLE_MIXED, ROLE_PREFILL, Batch, Load, Source, Span, Step, encode
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import StepRow, step_rows

DECODE = Step(0, 0, decode_sequences=1, decode_kv_tokens=9)
PROMPT = Step(0, 0, 40, 1, 40, prefill_squared_tokens=1600)
SOURCE = Source("s", 5, "node", 2, "vllm (plugin)", "m", ROLE_PREFILL, 0, 100, 16, 32, 2048, "g")


@dataclass
class Clock:
    now_ns: int = 1_000

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Service:
    """A metrics service that answers with one status; None for no answer."""

    status: int | None = 204
    taken: list[StepBatch] = field(default_factory=list)

    def __call__(self, body: bytes) -> tuple[int, str]:
        if self.status is None:
            raise Unreachable("refused")
        if self.status == 204:
            self.taken.append(StepBatch.FromString(body))
        return self.status, ""


def test_a_batch_is_encoded_as_our_own_step_batch() -> None:
    step = Step(10, 20, 1, 2, 3, 4, 5, 6)
    batch = Batch(7, 8, 300, [step, Step(30, 0)], [Span(1, 2)], Load(1, 2, 3, 4, 5, 6), 9, 3, (Span(3, 4),), last=True)
    read = StepBatch.FromString(encode(SOURCE, batch))
    assert (read.worker_id, read.incarnation, read.node, read.gpus, read.engine) == ("s", 5, "node", 2, "vllm (plugin)")
    assert (read.assignment.model, read.assignment.role, read.assignment.budget_tokens) == ("m", ROLE_PREFILL, 0)
    assert (read.kv_blocks, read.block_size_tokens, read.max_sequences, read.chunk_tokens) == (100, 16, 32, 2048)
    assert (read.sequence, read.covered_from_unix_ns, read.covered_to_unix_ns) == (7, 8, 300)
    assert (read.group, read.dropped_batches, read.last) == ("g", 9, True)
    assert step_rows(read.steps) == [StepRow(*step), StepRow(30, 0)]
    assert [(each.start_unix_ns, each.end_unix_ns) for each in read.kv_waits] == [(1, 2)]
    assert (read.load.running, read.load.waiting, read.load.waiting_prefill_tokens) == (1, 2, 3)
    assert (read.load.awaiting_kv, read.load.free_kv_blocks, read.load.preemptions) == (4, 5, 6)
    assert read.dummy_steps.steps == 3 and read.dummy_steps.spans[0].end_unix_ns == 4


def test_covers_are_contiguous_and_every_step_is_in_one_batch() -> None:
    clock = Clock()
    recorder = StepRecorder(clock)
    recorder.decided(PROMPT)
    clock.now_ns += 30
    recorder.ended()
    clock.now_ns += 10
    (first,) = recorder.cut()
    recorder.decided(DECODE)
    clock.now_ns += 5
    recorder.ended()
    clock.now_ns += 5
    (second,) = recorder.cut()
    assert (first.from_ns, first.to_ns, second.from_ns, second.to_ns) == (1_000, 1_040, 1_040, 1_050)
    assert first.steps == [PROMPT._replace(start_ns=1_000, end_ns=1_030)]
    assert second.steps == [DECODE._replace(start_ns=1_040, end_ns=1_045)]
    assert (first.sequence, second.sequence) == (1, 2)


def test_a_running_step_is_announced_once_and_reported_again_at_its_end() -> None:
    clock = Clock()
    recorder = StepRecorder(clock)
    recorder.decided(PROMPT)
    found = []
    for _ in range(2):
        clock.now_ns += 100
        found += recorder.cut()
    recorder.ended()
    clock.now_ns += 100
    found += recorder.cut()
    assert [[(step.start_ns, step.end_ns) for step in each.steps] for each in found] == [
        [(1_000, 0)], [], [(1_000, 1_200)],
    ]  # fmt: skip


def test_the_second_of_two_steps_in_flight_begins_when_the_first_has_ended() -> None:
    clock = Clock()
    recorder = StepRecorder(clock)
    for work in (PROMPT, DECODE):
        recorder.decided(work)
        clock.now_ns += 1
    clock.now_ns += 50
    recorder.ended()
    clock.now_ns += 20
    recorder.ended()
    clock.now_ns += 1
    (batch,) = recorder.cut()
    assert [(step.start_ns, step.end_ns) for step in batch.steps] == [(1_000, 1_052), (1_052, 1_072)]


def test_a_wait_for_kv_ends_with_the_next_step_and_is_cut_at_covers() -> None:
    clock = Clock()
    recorder = StepRecorder(clock)
    recorder.nothing_to_compute(awaiting_kv=True)
    clock.now_ns += 100
    (first,) = recorder.cut()
    clock.now_ns += 50
    recorder.decided(DECODE)
    clock.now_ns += 50
    (second,) = recorder.cut()
    assert (first.kv_waits, second.kv_waits) == ([Span(1_000, 1_100)], [Span(1_100, 1_150)])


def test_time_since_a_long_pause_is_cut_into_pieces() -> None:
    clock = Clock()
    recorder = StepRecorder(clock)
    recorder.decided(PROMPT)
    clock.now_ns += 2 * LONGEST_NS + 5
    recorder.ended()
    clock.now_ns += 5
    pieces = recorder.cut()
    assert [each.to_ns - each.from_ns for each in pieces] == [LONGEST_NS, LONGEST_NS, 10]
    assert [len(each.steps) for each in pieces] == [1, 0, 0]


def test_time_of_dropped_steps_is_not_covered() -> None:
    clock = Clock()
    recorder = StepRecorder(clock)
    for _ in range(MAX_STEPS + 1):
        recorder.decided(DECODE)
        clock.now_ns += 1
        recorder.ended()
    clock.now_ns += 1
    (batch,) = recorder.cut()
    assert batch.from_ns == 1_000 + MAX_STEPS + 1 and len(batch.steps) == 1
    assert batch.dropped_batches == 1


def test_data_for_an_absent_service_are_bounded_counted_and_sent_later() -> None:
    clock, service = Clock(), Service(status=None)
    recorder = StepRecorder(clock)
    reporter = Reporter(recorder, SOURCE, service)
    for _ in range(MAX_BATCHES + 10):
        clock.now_ns += 100
        reporter.turn()
    assert reporter.dropped == 10
    service.status = 204
    while len(service.taken) < MAX_BATCHES:
        reporter.turn()
    clock.now_ns += 100
    reporter.turn()
    assert [each.sequence for each in service.taken] == list(range(11, MAX_BATCHES + 12))
    assert service.taken[-1].dropped_batches == 10


@pytest.mark.parametrize(("status", "dropped"), [(400, 1), (401, 1), (404, 1), (429, 0), (503, 0)])
def test_a_permanently_refused_batch_is_dropped_and_a_temporarily_refused_one_is_retried(
    status: int, dropped: int
) -> None:
    clock = Clock()
    reporter = Reporter(StepRecorder(clock), SOURCE, Service(status))
    clock.now_ns += 100
    reporter.turn()
    assert reporter.dropped == dropped


def test_a_batch_that_was_accepted_without_an_answer_is_not_counted_as_dropped() -> None:
    clock, service = Clock(), Service(status=None)
    reporter = Reporter(StepRecorder(clock), SOURCE, service)
    clock.now_ns += 100
    reporter.turn()
    service.status = 409
    reporter.turn()
    assert reporter.dropped == 0
    clock.now_ns += 100
    reporter.turn()
    assert reporter.dropped == 1


class Scheduler:
    """A scheduler that has computed what it decides, as vLLM's counts it."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 7))

    def schedule(self, **tokens: int) -> Any:
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return SimpleNamespace(total_num_scheduled_tokens=sum(tokens.values()), num_scheduled_tokens=tokens)

    def update_from_output(self, output: Any, _result: Any) -> str:
        return "outputs"


def test_scheduler_decisions_are_recorded_and_results_are_unchanged() -> None:
    began_ns = 10**9
    clock = Clock(began_ns)
    scheduler, recorder = Scheduler(), StepRecorder(clock)
    follow(scheduler, recorder, clock)
    status = SimpleNamespace(name="RUNNING")
    scheduler.requests = {
        "prompt": SimpleNamespace(num_computed_tokens=10, num_tokens=100, status=status),
        "decode": SimpleNamespace(num_computed_tokens=49, num_tokens=50, status=status),
    }
    scheduler.running = list(scheduler.requests.values())
    output = scheduler.schedule(prompt=30, decode=1)
    clock.now_ns += 100
    assert scheduler.update_from_output(output, None) == "outputs"
    clock.now_ns += 1
    (batch,) = recorder.cut()
    assert batch.steps == [Step(began_ns, began_ns + 100, 30, 1, 40, 1, 50, 40 * 40 - 10 * 10)]
    assert batch.load == Load(running=2, waiting_prefill_tokens=60, free_kv_blocks=7)


def test_an_unknown_scheduler_runs_on_and_its_time_is_not_covered() -> None:
    clock = Clock()
    scheduler, recorder = Scheduler(), StepRecorder(clock)
    follow(scheduler, recorder, clock)
    scheduler.requests = {"strange": SimpleNamespace(num_computed_tokens=5)}
    output = scheduler.schedule(strange=3)
    assert scheduler.update_from_output(output, None) == "outputs"
    clock.now_ns += 100
    assert recorder.cut() == []


@pytest.mark.parametrize(
    ("kv_role", "named", "expected"),
    [
        (None, "", (ROLE_MIXED, 512)),
        ("kv_producer", "", (ROLE_PREFILL, 0)),
        ("kv_consumer", "", (ROLE_MIXED, 0)),
        ("kv_both", "", (ROLE_MIXED, 512)),
        ("kv_both", "prefill", (ROLE_PREFILL, 0)),
    ],
)
def test_a_role_is_set_by_the_environment_or_by_the_kv_connector(
    kv_role: str | None, named: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULCRUM_OBSERVE_ROLE", named)
    transfer = None if kv_role is None else SimpleNamespace(kv_role=kv_role)
    assert role_of(transfer, 512) == expected


@pytest.mark.system
def test_the_plugin_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import fulcrum_observe.engine;"
        "print(*sorted({each.partition('.')[0] for each in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    env = os.environ | {"PYTHONPATH": "deploy/vllm-plugin"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["fulcrum_observe"]
