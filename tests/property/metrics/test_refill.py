"""Properties of telemetry filled in after the live reader skipped it, against a service that read all of it."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.policy.reading import (
    MARGIN_AT_LEAST_NS,
    MARGIN_NS,
    MAX_CHUNK,
    MAX_GAPS,
    Behind,
    ChunkRead,
    Fate,
    GapChunk,
    Gaps,
    Stretch,
)
from libs.telemetry.columns import prefill_shares
from libs.telemetry.rollups import TIERS
from libs.testing.examples import examples
from libs.testing.workers.telemetry import at, step, step_batch
from services.metrics.refill import fill
from services.metrics.requests import RequestMetrics
from services.metrics.state import MetricsState

WORKERS = ("a", "b", "c")
BATCH_MS = 100
MARGIN = MARGIN_NS // 10**6 // BATCH_MS * len(WORKERS)
"""The margin in records."""


def new_state() -> MetricsState:
    return MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))


def telemetry(worker: str, step_ms: int, idle_ms: int, until_ms: int, reborn_at_ms: int) -> Iterator[StepBatch]:
    """Draw a batch every 100 ms. Steps that outlast their batch are announced in it, and end in a later one. From
    `reborn_at_ms` on the process is another one."""
    for number, low in enumerate(range(0, until_ms, BATCH_MS)):
        high, steps = low + BATCH_MS, []
        period_ms = step_ms + idle_ms
        for start in range(max(low - step_ms, 0) // period_ms * period_ms, high, period_ms):
            end = start + step_ms
            if low < end <= high:
                steps.append(step(start, end, prefill=start % 3, decode=1))
            elif low <= start < high:
                steps.append(step(start, None, prefill=start % 3, decode=1))
        life = 1 + (low >= reborn_at_ms)
        born_ms = reborn_at_ms if life == 2 else 0
        steps = [each for each in steps if each.start_unix_ns >= at(born_ms)]
        batch = step_batch(number, (low, high), steps, worker=worker, incarnation=life)
        batch.kv_transfers.append(KvTransfer(bytes=number + 1))
        yield batch


def live(state: MetricsState, batches: list[StepBatch], since_ms: int, until_ms: int) -> None:
    """Feed batches as they arrive: windows are written as time passes, with data or without."""
    waiting = iter(batches)
    batch = next(waiting, None)
    for now in range(since_ms, until_ms + 1, BATCH_MS):
        while batch is not None and batch.covered_to_unix_ns <= at(now):
            state.fleet.add(batch, at(now))
            batch = next(waiting, None)
        state.history.advance(at(now))


def chunks_of(gap: Stretch[int], size: int) -> Iterator[GapChunk[int]]:
    for end in range(gap.end, gap.start, -size):
        start = max(gap.start, end - size)
        yield GapChunk(gap, start, end, max(start - MARGIN, 0), end + MARGIN)


def tiers(state: MetricsState, until_ms: int) -> list[list[list[list[int]]]]:
    """Return the known figures of every worker in every window, by tier."""
    return [state.rollups.read(tier.window_ns, at(0), at(until_ms), WORKERS).times_ns.tolist() for tier in TIERS[1:3]]


@settings(max_examples=examples(5), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    cut=st.tuples(st.integers(30, 400), st.integers(1, 2800)),
    chunk=st.integers(100, 700),
    shapes=st.lists(st.tuples(st.integers(10, 900), st.integers(0, 300)), min_size=3, max_size=3),
    reborn_at_ms=st.integers(0, 100_000),
)
@pytest.mark.parametrize("until_ms", [30_000, pytest.param(140_000, marks=pytest.mark.slow)])
def test_a_filled_gap_gives_the_windows_of_a_reader_that_missed_nothing(until_ms, cut, chunk, shapes, reborn_at_ms):
    """At 140 s a part of it is older than the finest windows."""
    reborn_at_ms -= reborn_at_ms % BATCH_MS
    all_of = [
        batch
        for batches in zip(
            *(telemetry(w, *s, until_ms, reborn_at_ms) for w, s in zip(WORKERS, shapes, strict=True)), strict=True
        )
        for batch in batches
    ]
    start = cut[0]
    end = min(start + cut[1], len(all_of) - 150)
    whole, state = new_state(), new_state()
    live(whole, all_of, 0, until_ms)
    live(state, all_of[:start] + all_of[end:], 0, until_ms)
    gap = Stretch(0, start, end)
    for each in chunks_of(gap, chunk):
        read, own = all_of[each.read_from : each.read_to], slice(each.start - each.read_from, each.end - each.read_from)
        for _ in fill(state, prefill_shares, read, own, at(until_ms)):
            state.history.advance(at(until_ms))
    state.history.advance(at(until_ms))
    assert tiers(state, until_ms) == tiers(whole, until_ms)
    assert state.fleet.kv_bytes == whole.fleet.kv_bytes
    if reborn_at_ms <= start // len(WORKERS) * BATCH_MS:  # otherwise data of the earlier process count as lost
        assert not any(state.fleet.directory.lost_batches(worker) for worker in WORKERS)


def test_an_unfilled_gap_lowers_coverage():
    state, batches = new_state(), list(telemetry("a", 40, 20, 20_000, 0))
    live(state, batches[:50] + batches[150:], 0, 20_000)
    covered = state.rollups.read(10**9, at(0), at(20_000), ["a"]).times_ns[:, 0, 0].tolist()
    assert covered == [10**9] * 5 + [0] * 10 + [10**9] * 5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50_000)), max_size=200), st.floats(0.1, 1e12))
def test_every_skipped_record_has_exactly_one_fate(jumps, rate):
    """The chunks of a gap are also adjacent, with the newest first."""
    gaps, at_offset, total = Gaps(), [0] * 4, 0
    for number, (partition, length) in enumerate(jumps):
        gap = Stretch(partition, at_offset[partition], at_offset[partition] + length)
        at_offset[partition] = gap.end + 1
        total += length
        gaps.add(gap, number)
    assert gaps.records <= total
    ends: dict[tuple[int, int], int] = {}
    while chunk := gaps.next(10**12):
        name = (chunk.gap.partition, chunk.gap.end)
        assert chunk.end == ends.get(name, chunk.gap.end)
        assert chunk.gap.start <= chunk.start < chunk.end
        assert chunk.read_to - chunk.read_from <= 3 * MAX_CHUNK
        ends[name] = chunk.start
        gaps.seen(chunk.gap, rate)
        gaps.filled(chunk, None)
    assert gaps.records == 0
    assert gaps.fates.total() == total
    if len(jumps) <= MAX_GAPS:
        assert gaps.fates[Fate.FILLED] == total


def test_the_newest_of_several_partitions_is_read_first():
    gaps = Gaps()
    for partition in range(2):
        gaps.add(Stretch(partition, 0, 1_000), 0)
    read = []
    while chunk := gaps.next(10**12):
        read.append((chunk.gap.partition, chunk.start))
        gaps.seen(chunk.gap, 30.0)
        gaps.filled(chunk, chunk.start)
    assert {partition for partition, _ in read[:2]} == {0, 1}
    starts = [start for _, start in read]
    assert starts == sorted(starts, reverse=True)


def test_a_gap_is_read_once_later_telemetry_has_come_and_without_what_the_broker_dropped():
    gaps, gap = Gaps(), Stretch(0, 100, 1_000)
    gaps.add(gap, 0)
    assert gaps.next(MARGIN_NS - 1) is None
    gaps.held_from(gap, 700)
    chunk = gaps.next(MARGIN_NS)
    assert chunk is not None
    assert (chunk.gap.start, chunk.end) == (700, 1_000)
    gaps.held_from(chunk.gap, 1_000)
    assert gaps.next(MARGIN_NS) is None
    assert gaps.fates[Fate.FORGOTTEN] == 900


@given(st.integers(1, 10**6), st.integers(0, MARGIN_NS // 2))
def test_a_chunk_with_short_margins_is_read_with_doubled_margins_until_they_suffice(records, before_ns):
    """Telemetry is too dense for the margins that were read: each try reads more, and the tries are bounded."""
    gaps: Gaps[int] = Gaps()
    gaps.add(Stretch(0, 10**9, 10**9 + 5_000_000), 0)
    margins = []
    while chunk := gaps.next(MARGIN_NS):
        margins.append(chunk.read_to - chunk.end)
        read = ChunkRead(
            low=chunk.read_from, high=chunk.read_to, begins=False, ends=False, records=records,
            first_ns=0, own_first_ns=before_ns, own_last_ns=10**10, last_ns=10**10 + MARGIN_NS,
        )  # fmt: skip
        if gaps.suffices(chunk, read):
            break
    assert margins[-1] == MAX_CHUNK
    assert all(later >= min(2 * earlier, MAX_CHUNK) for earlier, later in itertools.pairwise(margins))


@given(st.booleans(), st.booleans(), st.integers(0, 2 * MARGIN_NS), st.integers(0, 2 * MARGIN_NS))
def test_a_margin_may_be_short_only_where_the_broker_holds_no_more(begins, ends, before_ns, after_ns):
    gaps: Gaps[int] = Gaps()
    gaps.add(Stretch(0, 10**9, 10**9 + 1_000), 0)
    chunk = gaps.next(MARGIN_NS)
    read = ChunkRead(
        low=chunk.read_from, high=chunk.read_to, begins=begins, ends=ends, records=1_000,
        first_ns=0, own_first_ns=before_ns, own_last_ns=before_ns + 10**9, last_ns=before_ns + 10**9 + after_ns,
    )  # fmt: skip
    enough = (begins or before_ns >= MARGIN_AT_LEAST_NS) and (ends or after_ns >= MARGIN_AT_LEAST_NS)
    assert gaps.suffices(chunk, read) is enough


def test_a_reader_is_behind_if_it_has_not_reached_where_a_partition_ended_before_the_bound():
    behind: Behind[str] = Behind(3.0)
    assert behind.note(0.0, {"p": 0}, {"p": 100}) == []
    assert behind.note(2.0, {"p": 50}, {"p": 200}) == []
    assert behind.note(3.0, {"p": 99}, {"p": 300}) == ["p"]
    assert behind.note(3.1, {"p": 100}, {"p": 300}) == []


def test_a_reader_that_was_delayed_and_catches_up_is_not_behind():
    behind: Behind[str] = Behind(3.0)
    behind.note(0.0, {"p": 100}, {"p": 100})
    assert behind.note(60.0, {"p": 100}, {"p": 90_000}) == []
    assert behind.note(62.0, {"p": 90_000}, {"p": 90_100}) == []
    assert behind.note(64.0, {"p": 90_050}, {"p": 90_100}) == []


def test_a_reader_that_is_always_slightly_late_is_not_behind():
    behind: Behind[str] = Behind(3.0)
    for second in range(100):
        assert behind.note(second, {"p": 100 * second}, {"p": 100 * second + 150}) == []
