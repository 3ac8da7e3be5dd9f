from libs.telemetry import timeline as timelines
from libs.telemetry.columns import prefill_shares
from libs.telemetry.steps import FewBusyTime, PhaseTime
from libs.telemetry.timeline import MAX_STEPS, UNCOUNTED_PART, BatchOutcome, Timeline
from libs.testing.workers.telemetry import MS, at, step, step_batch


def timeline_of(*batches):
    timeline = Timeline(prefill_shares)
    for batch in batches:
        timeline.add(batch)
    return timeline


def phases_ms(timeline, low_ms, high_ms):
    used = timeline.phases(at(low_ms), at(high_ms))
    parts = (used.covered_ns, used.prefill_ns, used.decode_ns, used.kv_wait_ns, used.idle_ns)
    return tuple(part / MS for part in parts)


def test_steps_waits_and_the_remainder_of_a_cover_become_the_four_phases():
    batch = step_batch(1, (0, 100), [step(10, 40, prefill=8), step(50, 60, decode=1)], waits_ms=[(60, 75)])
    assert phases_ms(timeline_of(batch), 0, 100) == (100, 30, 10, 15, 45)


def test_a_window_cuts_steps_and_waits_at_its_edges():
    batch = step_batch(1, (0, 100), [step(10, 40, prefill=8), step(50, 60, decode=1)], waits_ms=[(60, 75)])
    assert phases_ms(timeline_of(batch), 30, 65) == (35, 10, 10, 5, 10)


def test_a_wait_counts_only_while_no_step_runs():
    batch = step_batch(1, (0, 100), [step(20, 30, decode=1)], waits_ms=[(10, 50)])
    assert phases_ms(timeline_of(batch), 0, 100) == (100, 0, 10, 30, 60)


def test_a_mixed_step_is_split_by_the_step_time_model():
    mixed = step(0, 100, prefill=256, decode=8)
    used = timeline_of(step_batch(1, (0, 100), [mixed])).phases(at(0), at(100))
    assert 0 < used.prefill_ns < 100 * MS
    assert used.prefill_ns + used.decode_ns == 100 * MS
    assert used.idle_ns == 0


def test_time_of_a_lost_batch_is_unknown_and_not_idle():
    timeline = timeline_of(step_batch(1, (0, 100)), step_batch(3, (200, 300), [step(200, 250, decode=1)]))
    assert phases_ms(timeline, 0, 300) == (200, 0, 50, 0, 150)
    assert timeline.lost_batches == 1


def test_a_late_batch_fills_its_gap_and_is_no_longer_lost():
    timeline = timeline_of(step_batch(1, (0, 100)), step_batch(3, (200, 300)), step_batch(2, (100, 200)))
    assert phases_ms(timeline, 0, 300) == (300, 0, 0, 0, 300)
    assert timeline.lost_batches == 0


def test_batches_before_the_first_received_one_are_not_lost():
    assert timeline_of(step_batch(700, (0, 100))).lost_batches == 0


def test_a_step_that_ends_after_its_cover_counts_only_where_time_is_covered():
    timeline = timeline_of(step_batch(1, (0, 100), [step(80, 150, decode=1)]))
    assert phases_ms(timeline, 0, 200) == (100, 0, 20, 0, 80)
    timeline.add(step_batch(2, (100, 200)))
    assert phases_ms(timeline, 0, 200) == (200, 0, 70, 0, 130)


def test_an_announced_step_continues_through_covers_until_its_end_replaces_it():
    timeline = timeline_of(step_batch(1, (0, 100), [step(40, None, prefill=8)]))
    assert phases_ms(timeline, 0, 100) == (100, 60, 0, 0, 40)
    assert timeline.phases(at(0), at(100)).provisional
    timeline.add(step_batch(2, (100, 200)))
    timeline.add(step_batch(3, (200, 300)))
    assert phases_ms(timeline, 0, 300) == (300, 260, 0, 0, 40)
    timeline.add(step_batch(4, (300, 400), [step(40, 290, prefill=8)]))
    assert phases_ms(timeline, 0, 400) == (400, 250, 0, 0, 150)
    assert not timeline.phases(at(0), at(400)).provisional


def test_an_announced_step_does_not_continue_after_a_gap_or_a_newer_step():
    timeline = timeline_of(step_batch(1, (0, 100), [step(40, None, prefill=8)]), step_batch(3, (200, 300)))
    assert phases_ms(timeline, 0, 300) == (200, 60, 0, 0, 140)
    timeline.add(step_batch(2, (100, 200), [step(150, 160, decode=1)]))
    assert phases_ms(timeline, 0, 300) == (300, 110, 10, 0, 180)


def test_an_announcement_after_the_end_changes_nothing():
    finished, announced = step(40, 60, decode=1), step(40, None, decode=1)
    timeline = timeline_of(step_batch(2, (100, 200), [finished]), step_batch(1, (0, 100), [announced]))
    assert phases_ms(timeline, 0, 200) == (200, 0, 20, 0, 180)


def test_a_new_incarnation_ends_running_steps_of_the_old_one_and_voids_its_late_batches():
    timeline = timeline_of(step_batch(8, (0, 100), [step(50, None, decode=1)], incarnation=1))
    assert timeline.add(step_batch(1, (300, 400), incarnation=2)) is BatchOutcome.COUNTED
    assert timeline.add(step_batch(9, (100, 200), incarnation=1)) is BatchOutcome.VOID
    assert phases_ms(timeline, 0, 400) == (200, 0, 50, 0, 150)
    assert timeline.lost_batches == 0


def test_a_repeated_batch_is_counted_once():
    batch = step_batch(1, (0, 100), [step(10, 40, prefill=8)], waits_ms=[(60, 75)])
    timeline = timeline_of(batch)
    assert timeline.add(batch) is BatchOutcome.DUPLICATE
    assert phases_ms(timeline, 0, 100) == (100, 30, 0, 15, 55)


def test_an_invalid_batch_is_refused_completely():
    timeline = timeline_of()
    backwards = step_batch(1, (100, 0))
    far_off = step_batch(1, (0, 100))
    far_off.covered_to_unix_ns = 2**64 - 1
    before_it_began = step_batch(1, (0, 100), [step(50, 40, decode=1)])
    for batch in (backwards, far_off, before_it_began):
        assert timeline.add(batch) is BatchOutcome.MALFORMED
    assert timeline.phases(at(0), at(100)) == PhaseTime()
    assert timeline.facts is None


def test_more_steps_than_the_bound_shorten_history_and_never_turn_idle():
    timeline = Timeline(prefill_shares)
    each = 1024
    for number in range(MAX_STEPS // each + 2):
        first = number * each
        steps = [step(index, index + 1, decode=1) for index in range(first, first + each)]
        timeline.add(step_batch(number, (first, first + each), steps))
    end_ms = (MAX_STEPS // each + 2) * each
    covered, _, decode, _, idle = phases_ms(timeline, 0, end_ms)
    assert 0.9 * MAX_STEPS < covered < end_ms
    assert decode == covered
    assert idle == 0


def test_steps_of_unknown_work_have_a_part_of_the_bound_until_the_work_of_one_is_known():
    timeline, each, batches = Timeline(prefill_shares), 16, 24
    timeline.max_steps = 128
    for number in range(batches):
        first = number * each
        timeline.add(step_batch(number, (first, first + each), [step(at, at + 1) for at in range(first, first + each)]))
    covered, *_, idle = phases_ms(timeline, 0, batches * each)
    assert 0.8 * 128 / UNCOUNTED_PART < covered <= 128 / UNCOUNTED_PART + each
    assert idle == 0
    for number in range(batches, 2 * batches):
        first = number * each
        steps = [step(at, at + 1, decode=1) for at in range(first, first + each)]
        timeline.add(step_batch(number, (first, first + each), steps))
    covered, *_, idle = phases_ms(timeline, 0, 2 * batches * each)
    assert 0.8 * 128 < covered <= 128 + each
    assert idle == 0


def test_each_step_is_matched_only_with_the_covers_it_ran_in(monkeypatch):
    looked_at = []

    class Counted(FewBusyTime):
        def between(self, spans):
            looked_at.extend(spans)
            return super().between(spans)

    monkeypatch.setattr(timelines, "FewBusyTime", Counted)
    gaps = 1000
    batches = [step_batch(2 * n, (10 * n, 10 * n + 5), [step(10 * n, 10 * n + 3, decode=1)]) for n in range(gaps)]
    timeline = timeline_of(*batches)
    assert sum(each.decode_ns for each in timeline.steps(at(0), at(10 * gaps))) == 3 * gaps * MS
    assert len(looked_at) == gaps
