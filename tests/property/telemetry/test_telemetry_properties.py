"""Properties of random step layouts against a slow reference that walks every unit of time."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.step_row import step_rows
from libs.telemetry.columns import prefill_shares
from libs.telemetry.intervals import Intervals
from libs.telemetry.timeline import Timeline
from libs.testing.examples import examples
from libs.testing.workers.telemetry import MS, at, step, step_batch

pieces = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode", "mixed", "wait", "idle"]), st.integers(1, 60)),
    min_size=1,
    max_size=25,
)


def lay_out(layout):
    """Return the pieces one after another: (kind, start_ms, end_ms)."""
    spans, now_ms = [], 0
    for kind, length in layout:
        spans.append((kind, now_ms, now_ms + length))
        now_ms += length
    return spans, now_ms


def as_step(kind, start_ms, end_ms):
    return step(start_ms, end_ms, prefill=64 * (kind != "decode"), decode=4 * (kind != "prefill"))


def batches_of(layout, cuts):
    """Return the batches of a worker that cuts its covers at `cuts`. A step is in the cover it began in, announced
    if it outlasts that, and reported again in the cover of its end.
    """
    spans, end_ms = lay_out(layout)
    edges = sorted({0, end_ms, *(cut for cut in cuts if 0 < cut < end_ms)})
    batches = []
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        steps, waits = [], []
        for kind, start, end in spans:
            if kind == "wait" and start < high and end > low:
                waits.append((max(start, low), min(end, high)))
            elif kind not in ("wait", "idle") and low < end <= high:
                steps.append(as_step(kind, start, end))
            elif kind not in ("wait", "idle") and low <= start < high:
                steps.append(as_step(kind, start, None))
        batches.append(step_batch(number, (low, high), steps, waits_ms=waits))
    return batches, spans, end_ms


def reference(spans, covers, low_ms, high_ms):
    """Return (covered, busy, wait) in ms, counted millisecond by millisecond."""
    covered = busy = wait = 0
    for moment in range(low_ms, high_ms):
        if any(start <= moment < end for start, end in covers):
            covered += 1
            kind = next((kind for kind, start, end in spans if start <= moment < end), "idle")
            busy += kind in ("prefill", "decode", "mixed")
            wait += kind == "wait"
    return covered, busy, wait


def timeline_of(batches):
    timeline = Timeline(prefill_shares)
    for batch in batches:
        timeline.add(batch)
    return timeline


def parts(used):
    return (used.covered_ns, used.prefill_ns, used.decode_ns, used.kv_wait_ns, used.idle_ns)


@settings(max_examples=examples(150), deadline=None)
@given(pieces, st.lists(st.integers(1, 1500), max_size=8), st.data())
def test_phases_equal_the_reference_whatever_is_lost(layout, cuts, data):
    batches, spans, end_ms = batches_of(layout, cuts)
    kept = [batch for batch in batches if data.draw(st.booleans())]
    low, high = sorted((data.draw(st.integers(0, end_ms)), data.draw(st.integers(0, end_ms))))
    # A step whose end was lost with its batch is known only as far as covers reach, so the reference needs all ends.
    reported = {s.start_unix_ns for batch in kept for s in step_rows(batch.steps) if s.end_unix_ns}
    known = [span for span in spans if span[0] in ("wait", "idle") or at(span[1]) in reported]
    unfinished = {s.start_unix_ns for batch in kept for s in step_rows(batch.steps)} - reported
    used = timeline_of(kept).phases(at(low), at(high))
    covers = [(round((b.covered_from_unix_ns - at(0)) / MS), round((b.covered_to_unix_ns - at(0)) / MS)) for b in kept]
    covered, busy, wait = reference(known, covers, low, high)
    assert used.covered_ns == covered * MS
    assert min(parts(used)) >= 0
    assert sum(parts(used)[1:]) == used.covered_ns
    if not unfinished:
        assert used.prefill_ns + used.decode_ns == busy * MS
        assert used.kv_wait_ns == wait * MS


@settings(max_examples=examples(100), deadline=None)
@given(pieces, st.lists(st.integers(1, 1500), max_size=8), st.data())
def test_order_and_repetition_change_nothing(layout, cuts, data):
    batches, _, end_ms = batches_of(layout, cuts)
    again = data.draw(st.lists(st.sampled_from(batches), max_size=6))
    shuffled = data.draw(st.permutations([*batches, *again]))
    expected = timeline_of(batches).phases(at(0), at(end_ms))
    assert timeline_of(shuffled).phases(at(0), at(end_ms)) == expected


@settings(max_examples=examples(100), deadline=None)
@given(pieces, st.lists(st.integers(1, 1500), max_size=8), st.lists(st.integers(0, 1500), max_size=5))
def test_adjacent_windows_add_up_to_the_whole(layout, cuts, edges):
    batches, _, end_ms = batches_of(layout, cuts)
    timeline = timeline_of(batches)
    edges = sorted({0, end_ms, *(edge for edge in edges if edge < end_ms)})
    windows = [timeline.phases(at(low), at(high)) for low, high in itertools.pairwise(edges)]
    whole = timeline.phases(at(0), at(end_ms))
    assert sum(window.covered_ns for window in windows) == whole.covered_ns
    assert sum(window.kv_wait_ns for window in windows) == whole.kv_wait_ns
    assert sum(window.idle_ns for window in windows) == whole.idle_ns
    # A mixed step that a window cuts is split on each side, to the nanosecond below.
    assert abs(sum(window.prefill_ns for window in windows) - whole.prefill_ns) <= len(windows)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=30),
    st.integers(0, 80),
    st.integers(0, 80),
)
def test_intervals_are_the_union_of_what_was_added(spans, low, high):
    intervals, points = Intervals(), set()
    for start, end in spans:
        intervals.add(start, end)
        points.update(range(start, end))
    found = [point for start, end in intervals.within(low, high) for point in range(start, end)]
    assert found == sorted(point for point in points if low <= point < high)
    assert [point in intervals for point in range(81)] == [point in points for point in range(81)]
    low, high = sorted((low, high))
    intervals.forget_before(low)
    intervals.forget_from(high)
    kept = [point for start, end in intervals.within(0, 200) for point in range(start, end)]
    assert kept == sorted(point for point in points if low <= point < high)
