"""Properties of telemetry batches against an engine that runs steps and KV waits at any times."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import step_rows
from libs.engine.reports import EngineEvent, EngineLoad, StepReport
from libs.worker.telemetry import StepBatchBuilder, TelemetrySource

START_NS, NEVER = 1_000_000, 2**62


def report(start: int, end: int) -> StepReport:
    return StepReport(start, end, 1, 1, 1, 0, 0, 0, 0)


@dataclass(frozen=True)
class Span:
    kind: str  # "idle", "wait", "step", "dummy"
    duration: int
    announced: bool


spans = st.lists(
    st.builds(Span, st.sampled_from(["idle", "wait", "step", "dummy"]), st.integers(1, 50), st.booleans()), max_size=30
)


class Timeline:
    """The steps and events of an engine as a function of time."""

    def __init__(self, spans: list[Span]) -> None:
        self.steps: list[tuple[int, int]] = []
        self.waits: list[tuple[int, int]] = []
        self.dummies: list[tuple[int, int]] = []
        self.events: list[tuple[int, EngineEvent, int]] = []  # (when put out, event, earliest start in it)
        now = START_NS
        for span in spans:
            start, now = now, now + span.duration
            if span.kind == "step":
                if span.announced and span.duration > 1:
                    self.events.append((start + 1, EngineEvent(step=report(start, 0)), start))
                self.steps.append((start, now))
                self.events.append((now, EngineEvent(step=report(start, now)), start))
            elif span.kind == "dummy":  # of which batches may be cut before it is heard of
                self.dummies.append((start, now))
                self.events.append((now, EngineEvent(dummy_steps=((start, now),)), NEVER))
            elif span.kind == "wait":
                if self.waits and self.waits[-1][1] == start:
                    start = self.waits.pop()[0]
                    self.events.pop()
                self.waits.append((start, now))
                self.events.append((now, EngineEvent(kv_waits=((start, now),)), start))
        self.end = now

    def load(self, now: int, read: int) -> EngineLoad:
        """Return the queue depths at `now` for a reader that has read the first `read` events."""
        unread = [start for when, _, start in self.events[read:] if when <= now]
        known = {event.step.start_unix_ns for _, event, _ in self.events[:read] if event.step}
        running = [s for s, e in self.steps if s <= now < e and s not in known]
        waiting = next((s for s, e in self.waits if s <= now < e), 0)
        return EngineLoad(0, 0, 0, 0, 0, waiting, min([*unread, *running], default=0))


def batches_of(timeline: Timeline, pauses: list[tuple[int, int]]) -> list[StepBatch]:
    builder = StepBatchBuilder(TelemetrySource("w", 1, "n", 1, "sim"), START_NS)
    batches: list[StepBatch] = []
    now, read = START_NS, 0
    for pause, lag in [*pauses, (timeline.end, 0)]:
        now += pause
        there = sum(when <= now for when, _, _ in timeline.events)
        for _, event, _ in timeline.events[read : max(read, there - lag)]:
            builder.add(event, epoch=1)
        read = max(read, there - lag)
        batch = builder.cut(now, timeline.load(now, read), Assignment(model="m", epoch=1))
        if batch is not None:
            batches.append(batch)
    return batches


@given(spans, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=30))
def test_covers_are_contiguous_and_every_interval_is_reported_once_within_its_cover(
    spans: list[Span], pauses: list[tuple[int, int]]
) -> None:
    timeline = Timeline(spans)
    batches = batches_of(timeline, pauses)
    covered_to = START_NS
    announced: set[int] = set()
    steps: list[tuple[int, int]] = []
    waited: set[int] = set()
    dummies: list[tuple[int, int]] = []
    for number, batch in enumerate(batches, start=1):
        assert (batch.sequence, batch.covered_from_unix_ns) == (number, covered_to)
        assert batch.covered_to_unix_ns > covered_to
        rows = step_rows(batch.steps)
        assert len({step.start_unix_ns for step in rows}) == len(rows)
        for step in rows:
            if not step.end_unix_ns:
                assert covered_to <= step.start_unix_ns < batch.covered_to_unix_ns
                announced.add(step.start_unix_ns)
                continue
            steps.append((step.start_unix_ns, step.end_unix_ns))
            assert step.end_unix_ns <= batch.covered_to_unix_ns
            assert step.start_unix_ns >= covered_to or step.start_unix_ns in announced
        for wait in batch.kv_waits:
            assert covered_to <= wait.start_unix_ns < wait.end_unix_ns <= batch.covered_to_unix_ns
            reported = set(range(wait.start_unix_ns, wait.end_unix_ns))
            assert not reported & waited
            waited |= reported
        ended = [(span.start_unix_ns, span.end_unix_ns) for span in batch.dummy_steps.spans]
        assert all(end <= batch.covered_to_unix_ns for _, end in ended)
        dummies += ended
        covered_to = batch.covered_to_unix_ns
    assert steps == timeline.steps
    assert waited == {ns for start, end in timeline.waits for ns in range(start, end)}
    assert dummies == timeline.dummies
    assert batches[-1].dummy_steps.steps == len(dummies)
    assert covered_to == max(batches[-1].covered_to_unix_ns, timeline.end)
