"""Properties of busy time by a loop and by arrays, equal to the nanosecond, and of roles over time."""

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from libs.telemetry import steps as module
from libs.telemetry.intervals import MAX_SPANS, RoleLog
from libs.telemetry.steps import FULL_SHARE, StepCounts, StepLog

spans = st.lists(st.integers(0, 2_000), min_size=0, max_size=6, unique=True).map(
    lambda edges: list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)
step_parts = st.tuples(st.integers(0, 2_000), st.integers(0, 300), st.integers(0, FULL_SHARE), st.booleans())


@given(st.lists(step_parts, max_size=20), st.tuples(st.integers(0, 1_000), st.integers(1, 1_000)), spans)
def test_the_loop_and_the_arrays_agree(entered, window, inside):
    log = StepLog()
    for start, length, share, announced in entered:
        log.add(start, start + length, share, announced=announced)
    low, high = window[0], window[0] + window[1]
    clipped = [(max(a, low), min(b, high)) for a, b in inside if max(a, low) < min(b, high)]
    few = log.busy(low, high, lambda point: point + 7)
    kept, module.FEW_STEPS = module.FEW_STEPS, -1
    try:
        many = log.busy(low, high, lambda point: point + 7)
    finally:
        module.FEW_STEPS = kept
    assert few.between(clipped) == many.between(clipped)
    assert few.provisional == many.provisional


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 2_000), st.integers(0, FULL_SHARE)), min_size=1, max_size=6),
    st.lists(st.integers(1, 3_000), max_size=8, unique=True),
    st.integers(0, 3 * module._TURN_NS),
    st.sampled_from([-1, module.FEW_STEPS]),
)
def test_prefill_of_a_steps_parts_in_several_windows_adds_up_to_the_whole(lengths, edges, ran_ns, few_steps):
    log, at = StepLog(), -ran_ns  # the first has run for up to half an hour when the windows begin
    for number, (gap, length, share) in enumerate(lengths):
        end = at + gap + length + (0 if number else ran_ns)
        log.add(at + gap, end, share)
        at = end
    kept, module.FEW_STEPS = module.FEW_STEPS, few_steps
    try:
        windows = [(low, high) for low, high in pairwise([0, *sorted(edges), at]) if low < high]
        parts = [log.busy(low, high, int).between([(low, high)]) for low, high in windows]
        whole = log.busy(0, at, int).between([(0, at)]) if at > 0 else (0, 0)
    finally:
        module.FEW_STEPS = kept
    if windows and windows[-1][1] == at:
        assert tuple(map(sum, zip(*parts, strict=True))) == whole


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_roles_reported_every_window_are_known_in_any_order_of_arrival(lengths, random):
    reported = [role for index, length in enumerate(lengths) for role in ["ab"[index % 2]] * length]
    log, order = RoleLog(), list(range(len(reported)))
    random.shuffle(order)
    for at in order:
        log.add(10 * at, 10 * at + 10, reported[at])
    assert [log.at(10 * at + 9) for at in range(len(reported))] == reported


@given(st.integers(0, 100), st.integers(0, 100))
def test_roles_of_a_new_incarnation_replace_those_of_an_old_one(cut, at):
    log = RoleLog()
    log.add(0, 100, "a")
    log.forget_from(cut)
    log.add(cut, 200, "b")
    assert log.at(at) == ("b" if at >= cut else "a")


def test_the_log_of_roles_is_bounded():
    log = RoleLog()
    for at in range(3 * MAX_SPANS):
        log.add(at, at + 1, "ab"[at % 2])
    assert log.at(3 * MAX_SPANS) == "b"
    assert log.at(0) == log.at(2 * MAX_SPANS)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 9)), min_size=1, max_size=12))
def test_steps_of_unknown_work_stay_so_beside_others(parts: list[tuple[bool, bool, int]]) -> None:
    """Steps come one by one or in columns, with or without their work, which no other step's work changes."""
    log, expected, at = StepLog(), [], 1
    for in_columns, known, steps in parts:
        counts = StepCounts(*range(at, at + len(StepCounts._fields))) if known else StepCounts()
        starts = [at + each for each in range(steps)]
        if in_columns:
            columns = [array("q", starts), array("q", [each + 1 for each in starts]), array("q", [FULL_SHARE] * steps)]
            work = [array("Q", [count] * steps).tobytes() if known else b"" for count in counts]
            log.extend([*(each.tobytes() for each in columns), *work])
        else:
            for start in starts:
                log.add(start, start + 1, FULL_SHARE, counts)
        expected += [counts] * steps
        at += steps
    assert [each.counts for each in log.ran(0, at, lambda end: end)] == expected
    assert log.finished(0, at).counts.T.tolist() == [list(each) for each in expected if any(each)]
    log.forget_before(at // 2)
    kept = [each.counts for each in log.ran(0, at, lambda end: end)]
    assert kept == expected[len(expected) - len(kept) :]
