"""Properties of windows accumulated as batches arrive, against windows cut from each worker's timeline."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.step_row import step_count, whole_columns
from libs.telemetry.columns import (
    MAX_AHEAD,
    UNREPORTED,
    WINDOW_NS,
    WINDOWS,
    StepBatchColumns,
    WindowAccumulator,
    lay,
    prefill_shares,
)
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.rollups import PROVISIONAL, ROLE_NUMBERS
from libs.telemetry.steps import FULL_SHARE
from libs.telemetry.timeline import Timeline
from libs.testing.examples import examples
from libs.testing.workers.telemetry import MS, at, step, step_batch

WORKERS = ("a", "b", "c")
UNUSUAL = ["gap", "over", "long", "announced", "waits", "role", "again", "back"]
ROLES = ("decode", "decode", "decode", "mixed", "prefill")


def to_ms(draw, low_ms, high_ms):
    return low_ms + draw(st.integers(0, round(1e6 * (high_ms - low_ms)))) / 1e6


@st.composite
def layouts(draw):
    """Draw batches of workers, which mostly continue where the last one ended, with all exceptions."""
    batches = []
    for worker in WORKERS:
        now_ms, role, incarnation = float(draw(st.integers(0, 99))), "decode", 1
        for sequence in range(draw(st.integers(1, 12))):
            kind = draw(
                st.sampled_from(
                    ["plain"] * 6 + ["encode", "gap", "over", "long", "announced", "waits", "role", "again", "back"]
                )
            )
            now_ms += {"gap": 70.5, "over": -40.5, "back": -60.25}.get(kind, 0)
            incarnation += kind in ("again", "back")
            role = draw(st.sampled_from(ROLES)) if kind == "role" else role
            end_ms = now_ms + (450 if kind == "long" else draw(st.integers(1, 160)))
            edges = sorted(to_ms(draw, now_ms, end_ms) for _ in range(draw(st.sampled_from([0, 2, 4, 6]))))
            spans = list(zip(edges[::2], edges[1::2], strict=True))
            waits = spans[-1:] if kind == "waits" else []
            steps = [
                step(start, end, prefill=draw(st.sampled_from([0, 7, 64])), decode=draw(st.sampled_from([0, 1, 9])))
                for start, end in spans[: len(spans) - len(waits)]
            ]
            if kind == "encode":
                steps = [row._replace(prefill_tokens=0, prefill_sequences=2, decode_sequences=0, encoded_images=2)
                         if draw(st.booleans()) else row for row in steps]  # fmt: skip
            if kind == "announced" and steps:
                steps[-1] = steps[-1]._replace(end_unix_ns=0)
            batches.append(
                step_batch(
                    sequence, (now_ms, end_ms), steps, waits_ms=waits, worker=worker, role=role, incarnation=incarnation
                )
            )
            now_ms = end_ms
    return sorted(batches, key=lambda batch: batch.covered_to_unix_ns)


def cut(fleet, worker, start_ns):
    """The window from the worker's timeline."""
    known = fleet.window(worker, start_ns, start_ns + WINDOW_NS)
    if known is None:
        return None
    time, role = known
    parts = [time.covered_ns, time.prefill_ns, time.decode_ns, time.kv_wait_ns]
    return parts, ROLE_NUMBERS[role] + PROVISIONAL * time.provisional


def added(fleet, start_ns):
    reported = fleet.cells(WORKERS, start_ns, start_ns + WINDOW_NS)
    rows = zip(reported.worker_ids, reported.times_ns.tolist(), reported.roles.tolist(), strict=True)
    return {worker: (times, role) for worker, times, role in rows}


@settings(max_examples=examples(200), deadline=None)
@given(layouts(), st.data())
def test_accumulated_windows_equal_those_of_the_timelines(batches, data):
    """Whatever comes late, twice, not at all, or from a clock that is ahead; at any moment."""
    order = list(batches)
    for _ in range(data.draw(st.integers(0, 3), label="changes")):
        index = data.draw(st.integers(0, len(order) - 1), label="of")
        moved = order.pop(index)
        order.insert(data.draw(st.integers(index, len(order)), label="until"), moved)
        if data.draw(st.booleans(), label="twice"):
            order.append(moved)
    fleet = FleetTelemetry(prefill_shares)
    ahead_ms = data.draw(st.sampled_from([0, 0, 5_000]), label="ahead")
    for batch in order:
        now_ns = batch.covered_to_unix_ns - ahead_ms * MS * (batch.worker_id == "c")
        fleet.add(batch, now_ns)
        newest_ns = batch.covered_to_unix_ns - batch.covered_to_unix_ns % WINDOW_NS
        for start_ns in range(newest_ns - 3 * WINDOW_NS, newest_ns + 2 * WINDOW_NS, WINDOW_NS):
            found = added(fleet, start_ns)
            for worker in WORKERS:
                assert found.get(worker) == cut(fleet, worker, start_ns)


def test_steady_workers_are_accumulated_from_their_second_batch_on(monkeypatch):
    fleet = FleetTelemetry(lambda batch: [FULL_SHARE // 3] * step_count(batch.steps))
    for number in range(2 * WINDOWS):
        low = 100 * number - 37
        steps = [step(low + 10, low + 30, prefill=1, decode=1), step(low + 30, low + 90, prefill=1, decode=1)]
        batch = step_batch(number, (low, low + 100), steps, waits_ms=[(low + 90, low + 95)], worker="a")
        fleet.add(batch, batch.covered_to_unix_ns)
    newest_ns = batch.covered_to_unix_ns - batch.covered_to_unix_ns % WINDOW_NS
    starts = range(newest_ns - (WINDOWS - 1) * WINDOW_NS, newest_ns + WINDOW_NS, WINDOW_NS)
    from_timeline = [cut(fleet, "a", start_ns) for start_ns in starts]
    monkeypatch.setattr(fleet, "window", lambda *_: None)
    assert [added(fleet, start_ns).get("a") for start_ns in starts] == from_timeline


def laid(batch):
    cover = (batch.covered_from_unix_ns, batch.covered_to_unix_ns)
    return lay(
        StepBatchColumns.of([(batch, "", *cover, whole_columns(batch.steps), 0, "", True, UNREPORTED)]), prefill_shares
    )


def test_a_worker_that_reuses_the_slot_of_a_forgotten_one_starts_empty():
    tally, batch = WindowAccumulator(1), step_batch(1, (0, 20), [step(0, 10, decode=1)])
    for worker in ("a", "b"):
        tally.begin(worker, at(0), 1)
        assert not tally.read(at(0), [worker])[0].any()
        assert tally.add([worker], laid(batch), np.array([at(20)])).all()
        assert tally.read(at(0), [worker])[0].tolist() == [[20 * MS, 0, 10 * MS, 0]]
        tally.forget(worker)


def test_a_clock_ahead_of_time_does_not_displace_present_windows():
    tally, batch = WindowAccumulator(2), step_batch(1, (100, 200))
    tally.begin("ahead", at(0), 1)
    assert not tally.add(["ahead"], laid(batch), np.array([at(200) - (MAX_AHEAD + 1) * WINDOW_NS])).any()
    assert tally.add(["ahead"], laid(batch), np.array([at(200)])).all()


@settings(max_examples=examples(200), deadline=None)
@given(layouts(), st.lists(st.booleans(), min_size=40, max_size=40))
def test_batches_gathered_together_equal_batches_sorted_in_one_by_one(batches, read):
    """However many are gathered before somebody reads."""
    fleet, timelines = FleetTelemetry(prefill_shares), {worker: Timeline(prefill_shares) for worker in WORKERS}
    for batch, looked_at in zip(batches, read, strict=False):
        assert fleet.add(batch, batch.covered_to_unix_ns) is timelines[batch.worker_id].add(batch)
        if looked_at:
            fleet.settle()
    for worker, timeline in timelines.items():
        found = fleet.timeline(worker)
        assert fleet.directory.facts(worker) == timeline.facts
        assert found is None or found.last_step_end_ns == timeline.last_step_end_ns
        for low_ms in range(0, 1200, 90):
            window = at(low_ms), at(low_ms + 170)
            assert fleet.phases(worker, *window) == timeline.phases(*window)
            assert found is None or list(found.steps(*window)) == list(timeline.steps(*window))
