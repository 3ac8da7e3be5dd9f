"""Properties of roll-ups against sums over writes that come late, twice or after a pause."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import History
from libs.telemetry.rollups import RollUps, Tier, Written
from libs.telemetry.steps import PhaseTime
from libs.telemetry.workers import Members
from libs.testing.examples import examples
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch

TIERS = (Tier(100, 40), Tier(1000, 20), Tier(5000, 10))
WORKERS = ("a", "b", "c")

times = st.tuples(*[st.integers(0, 33)] * 3).map(lambda parts: PhaseTime(sum(parts) + 1, *parts))
writes = st.lists(st.tuples(st.integers(0, 120), st.sampled_from(WORKERS), times), max_size=80)


def parts(time):
    return [time.covered_ns, time.prefill_ns, time.decode_ns, time.kv_wait_ns]


@settings(max_examples=examples(200), deadline=None)
@given(writes)
def test_every_tier_is_the_sum_of_the_last_writes_it_still_holds(written):
    rollups, known, newest = RollUps(TIERS), {}, 0
    for number, worker, time in written:
        newest = max(newest, number)
        if number > newest - TIERS[0].windows:
            known[number, worker] = time
        rollups.write(number * 100, [Written(worker, time, 1)])
    for tier in TIERS:
        end = (newest * 100 // tier.window_ns + 1) * tier.window_ns
        series = rollups.read(tier.window_ns, 0, end)
        for start, window in zip(series.starts_ns, series.times_ns, strict=True):
            for worker, found in zip(series.worker_ids, window, strict=True):
                inside = [
                    parts(time)
                    for (number, of), time in known.items()
                    if of == worker and start <= number * 100 < start + tier.window_ns
                ]
                assert found.tolist() == np.sum(inside or [[0] * 4], axis=0).tolist()


def test_more_workers_than_slots_are_counted_separately():
    rollups = RollUps(TIERS)
    names = [f"w{number:03}" for number in range(100)]
    rollups.write(0, [Written(name, PhaseTime(100, number, 0, 0), 1) for number, name in enumerate(names)])
    series = rollups.read(1000, 0, 1000)
    assert list(series.worker_ids) == names
    assert series.times_ns[0, :, 1].tolist() == list(range(100))


def test_an_overwritten_window_is_not_written_again():
    rollups = RollUps(TIERS)
    rollups.write(4000, [Written("a", PhaseTime(100, 1, 0, 0), 1)])
    rollups.write(0, [Written("a", PhaseTime(100, 50, 0, 0), 1)])
    assert rollups.read(1000, 0, 5000).times_ns[:, 0, 1].tolist() == [0, 0, 0, 0, 1]


def test_the_finest_windows_that_still_hold_a_time_are_used_for_it():
    """However long ago it was: what is asked for is short, and no longer in the finest tier."""
    rollups, length = RollUps(TIERS), TIERS[0].window_ns
    for number in range(200):
        rollups.write(number * length, [Written("a", PhaseTime(length, 10, 20, 30), 1)])
    assert rollups.phases("a", 19_000, 20_000) == PhaseTime(1000, 100, 200, 300)
    assert rollups.phases("a", 2_000, 4_000) == PhaseTime(2000, 200, 400, 600)
    assert rollups.phases("a", 16_100, 16_200) == PhaseTime(100, 10, 20, 30)
    assert rollups.phases("unknown", 0, 1_000) == PhaseTime()


@given(st.permutations([(number, worker) for number in range(12) for worker in WORKERS]))
def test_coarse_roles_are_each_workers_newest_in_any_order_of_writes(order):
    """Some workers' windows are written a while after others', but each worker's in their order."""
    rollups, numbers = RollUps(TIERS), dict.fromkeys(WORKERS, 0)
    for _, worker in order:
        number = numbers[worker]
        rollups.write(number * 100, [Written(worker, PhaseTime(100), 1 if number < 7 else 2)])
        numbers[worker] += 1
    assert rollups.read(1000, 0, 1000).roles.tolist() == [[2] * len(WORKERS)]


def test_reading_one_worker_costs_nothing_for_the_others():
    rollups = RollUps((Tier(100, 400),))
    names = [f"w{number}" for number in range(1_000)]
    for number in range(400):
        rollups.write(number * 100, [Written(name, PhaseTime(100), 1) for name in names[: 1000 if not number else 1]])
    tracemalloc.start()
    rollups.phases("w0", 0, 40_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 400 * 1_000


def test_a_length_that_no_tier_has_is_refused():
    with pytest.raises(ValueError, match="100, 1000, 5000"):
        RollUps(TIERS).read(300, 0, 1000)


def follow(batches, order, ends_ms):
    """Enter batches in an order, advancing as far as `ends_ms` says after each; the roll-ups."""
    fleet, rollups = FleetTelemetry(prefill_shares), RollUps()
    history = History(fleet, rollups, Members())
    history.advance(at(0))
    for index, end_ms in zip(order, ends_ms, strict=True):
        fleet.add(batches[index], at(100_000))
        history.advance(at(end_ms))
    history.advance(at(3000))
    history.advance(at(3000))
    return rollups


@settings(max_examples=examples(60), deadline=None)
@given(st.permutations(range(10)), st.lists(st.integers(200, 2900), min_size=10, max_size=10))
def test_late_batches_give_the_same_roll_ups_as_punctual_ones(order, ends_ms):
    batches = [
        step_batch(number, (200 * number, 200 * number + 200), [step(200 * number + 30, 200 * number + 170, decode=1)])
        for number in range(10)
    ]
    punctual = follow(batches, range(10), [200 * number + 200 for number in range(10)])
    late = follow(batches, order, sorted(ends_ms))
    for window_ns in (100 * MS, 1000 * MS):
        want, found = (each.read(window_ns, ORIGIN_NS, at(3000)) for each in (punctual, late))
        assert np.array_equal(want.times_ns, found.times_ns)
        assert want.times_ns[:, 0, 0].sum() == 2000 * MS


def coarse(rollups, end):
    """Return the content of the coarse tiers, by tier and worker."""
    found = {}
    for tier in TIERS[1:]:
        series = rollups.read(tier.window_ns, 0, end + tier.window_ns)
        for place, worker in enumerate(series.worker_ids):
            for start, times, role in zip(
                series.starts_ns, series.times_ns[:, place], series.roles[:, place], strict=True
            ):
                if role or times.any():
                    found[tier.window_ns, int(start), worker] = (*times.tolist(), int(role))
    return found


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(WORKERS), times), max_size=60), st.data())
def test_history_continues_after_a_restart_as_without_one(written, data):
    """Windows are kept as of a moment; those after it are written again, as telemetry that is read again has it."""
    written = [(index // 3 + number, worker, time) for index, (number, worker, time) in enumerate(written)]
    stop = data.draw(st.integers(0, len(written)), label="stop")
    saves = data.draw(st.sets(st.integers(0, stop)), label="saves") | {stop}
    whole, before, file, from_ns = RollUps(TIERS), RollUps(TIERS), {}, 0
    for index in range(stop + 1):
        if index in saves:
            newest = max((number for number, *_ in written[:index]), default=0)
            from_ns = max((newest - 3) * 100, 0, from_ns)
            taken = before.take_changed(from_ns)
            if data.draw(st.booleans(), label="the disk is full") and index < stop:
                before.give_back(taken)
            else:
                file |= {(kept.window_ns, kept.start_ns): kept for kept in taken}
        if index < stop:
            number, worker, time = written[index]
            # What came late for a time that is in the file already is told to the file at the next save.
            before.write(number * 100, [Written(worker, time, 1)])
    after = RollUps(TIERS)
    for kept in file.values():
        after.restore(kept)
    lived = {}
    for number, worker, time in written:
        lived[number, worker] = time
        whole.write(number * 100, [Written(worker, time, 1)])
    for (number, worker), time in sorted(lived.items(), key=lambda entry: entry[0]):
        if number * 100 >= from_ns:
            after.write(number * 100, [Written(worker, time, 1)])
    end = 100 * max((number for number, *_ in written), default=0)
    late = {n for n, *_ in written[stop:] if n * 100 < from_ns}
    if not late:
        assert coarse(after, end) == coarse(whole, end)
