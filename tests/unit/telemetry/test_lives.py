"""Tests of each worker's single state: a table of evidence, and invariants for any evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.telemetry.lives import (
    BACK_FOR_NS,
    FIRST_REPORT_NS,
    GONE_AFTER_NS,
    SERVING,
    SILENT_AFTER_NS,
    LifeSigns,
    LifeState,
    LifeWatch,
    WorkerLife,
    life_of,
    newest_of,
)

S = 1_000_000_000
NOW = 1_000 * S
BORN = NOW - 100 * S
STARTING, RUNNING, SILENT, RESTARTING, GONE, BACK = LifeState


def was(state, since_ns=NOW - 20 * S, incarnation=BORN, seen_ns=0):
    return WorkerLife(state, since_ns, incarnation, seen_ns=seen_ns)


QUIET = NOW - SILENT_AFTER_NS - 1
LONG_QUIET = NOW - GONE_AFTER_NS - 1
REBORN = NOW - S


@pytest.mark.parametrize(
    ("signs", "before", "state", "since_ns"),
    [
        (LifeSigns(BORN, NOW), None, RUNNING, BORN),
        (LifeSigns(BORN, NOW - SILENT_AFTER_NS), was(RUNNING), RUNNING, NOW - 20 * S),
        (LifeSigns(BORN, QUIET), was(RUNNING), SILENT, QUIET),
        (LifeSigns(BORN, QUIET), None, SILENT, QUIET),
        (LifeSigns(BORN, QUIET, leased=False), was(RUNNING), SILENT, QUIET),
        (LifeSigns(BORN, QUIET, left=True), was(RUNNING), GONE, QUIET),
        (LifeSigns(BORN, NOW, left=True), was(RUNNING), GONE, NOW),
        (LifeSigns(BORN, LONG_QUIET), was(SILENT, LONG_QUIET), GONE, LONG_QUIET),
        (LifeSigns(BORN, NOW), was(SILENT), BACK, NOW),
        (LifeSigns(BORN, NOW), was(GONE), BACK, NOW),
        (LifeSigns(BORN, NOW), was(BACK, NOW - BACK_FOR_NS + 1), BACK, NOW - BACK_FOR_NS + 1),
        (LifeSigns(BORN, NOW), was(BACK, NOW - BACK_FOR_NS), RUNNING, NOW - BACK_FOR_NS),
        (LifeSigns(REBORN, 0), was(RUNNING), RESTARTING, REBORN),
        (LifeSigns(REBORN, 0), was(SILENT), RESTARTING, REBORN),
        (LifeSigns(REBORN, 0), was(RESTARTING, REBORN, REBORN), RESTARTING, REBORN),
        (LifeSigns(REBORN, NOW), was(RESTARTING, REBORN, REBORN), BACK, NOW),
        (LifeSigns(REBORN, NOW), was(RUNNING), BACK, NOW),
        (LifeSigns(REBORN, 0, ready=False), None, STARTING, REBORN),
        (LifeSigns(REBORN, 0), None, STARTING, REBORN),
        (LifeSigns(BORN, 0), None, RUNNING, BORN),
        (LifeSigns(BORN, 0), was(RUNNING, BORN, seen_ns=NOW - FIRST_REPORT_NS), RUNNING, BORN),
        (LifeSigns(BORN, 0), was(RUNNING, BORN, seen_ns=NOW - FIRST_REPORT_NS - 1), SILENT, BORN),
        (LifeSigns(REBORN, 0), was(SILENT, QUIET, REBORN), SILENT, QUIET),
        (LifeSigns(REBORN, NOW), was(STARTING, REBORN, REBORN), RUNNING, REBORN),
        (LifeSigns(REBORN, 0, leased=False), was(STARTING, REBORN, REBORN), GONE, NOW),
    ],
)
def test_each_evidence_gives_one_state_with_its_start(signs, before, state, since_ns):
    assert life_of(signs, before, NOW, NOW)[:2] == (state, since_ns)


def test_no_worker_is_silent_while_all_telemetry_is_missing():
    assert life_of(LifeSigns(BORN, LONG_QUIET), was(RUNNING), LONG_QUIET, NOW).state is RUNNING


def test_without_any_telemetry_the_registry_decides():
    assert life_of(LifeSigns(BORN, 0), None, 0, NOW).state is RUNNING
    assert life_of(LifeSigns(BORN, 0, ready=False), None, 0, NOW).state is STARTING


def test_a_return_is_remembered_while_the_worker_is_known():
    watch = LifeWatch()
    for reported_ns, now_ns in (
        (NOW, NOW),
        (NOW, NOW + 3 * S),
        (NOW + 4 * S, NOW + 4 * S),
        (NOW + 90 * S, NOW + 90 * S),
    ):
        watch.look({"gpu-0": LifeSigns(BORN, reported_ns)}, now_ns, now_ns)
    assert watch.known["gpu-0"] == WorkerLife(RUNNING, NOW + 4 * S, BORN, NOW + 4 * S, NOW)
    assert watch.returned_ns("gpu-0") == NOW + 4 * S


def test_an_unregistered_worker_is_remembered_until_it_is_gone():
    watch = LifeWatch()
    watch.look({"gpu-0": LifeSigns(BORN, NOW)}, NOW, NOW)
    for after_s, states in ((3, [SILENT]), (61, [GONE]), (62, [])):
        watch.look({}, NOW + after_s * S, NOW + after_s * S)
        assert [each.state for each in watch.known.values()] == states


times = st.integers(0, 200 * S)
signs = st.builds(LifeSigns, times, times, st.booleans(), st.booleans(), st.booleans())


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), signs), st.integers(0, 80 * S)), max_size=12))
def test_every_named_worker_has_exactly_one_state_begun_by_now_and_no_other_is_invented(looks):
    watch, now_ns, ever = LifeWatch(), 200 * S, set()
    latest_ns, advanced_ns, stood, resumed = 0, 0, False, False
    for named, later_ns in looks:
        now_ns += later_ns
        ever |= named.keys()
        watch.look(named, newest_ns := newest_of(named.values()), now_ns)
        if newest_ns > latest_ns:
            latest_ns, advanced_ns, stood, resumed = newest_ns, now_ns, False, resumed or stood
        elif latest_ns and now_ns - advanced_ns > SILENT_AFTER_NS:
            stood = True
        assert named.keys() <= watch.known.keys() <= ever
        for name, each in named.items():
            life = watch.known[name]
            assert life.state in LifeState
            assert life.since_ns <= now_ns
            assert (life.state in SERVING) is watch.serves(name)
            if each.reported_ns and not each.left:
                late = newest_ns - each.reported_ns > SILENT_AFTER_NS
                # After a silence of all each has some time to report again.
                assert (life.state in (SILENT, GONE)) is late or (resumed and late)


def after_an_outage(returns_s, *, away_s=10.0, until_s=16.0):
    """Look five times a second at workers that all fall silent at 1 s and return at `returns_s`."""
    watch, states = LifeWatch(), {name: set() for name in returns_s}
    for tenth in range(0, round(until_s * 10), 2):
        at_s = tenth / 10
        now_ns = NOW + round(at_s * S)
        received = {
            name: now_ns if at_s <= 1 or (returns is not None and at_s >= 1 + away_s + returns) else NOW + S
            for name, returns in returns_s.items()
        }
        signs = {name: LifeSigns(BORN, reported_ns) for name, reported_ns in received.items()}
        watch.look(signs, newest_of(signs.values()), now_ns)
        for name in returns_s:
            states[name].add(watch.known[name].state)
    return watch, states


def test_workers_that_return_one_by_one_from_a_silence_of_all_were_never_silent():
    _, states = after_an_outage({"a": 0.0, "b": 0.8, "c": 1.8})
    assert states == {"a": {RUNNING}, "b": {RUNNING}, "c": {RUNNING}}


def test_a_worker_that_does_not_return_from_a_silence_of_all_is_silent_since_its_last_report():
    watch, states = after_an_outage({"a": 0.0, "b": None})
    assert states == {"a": {RUNNING}, "b": {RUNNING, SILENT}}
    assert watch.known["b"].since_ns == NOW + S


def test_a_worker_that_was_silent_before_a_silence_of_all_stays_silent():
    watch = LifeWatch()
    for at_s in range(0, 30):
        now_ns = NOW + at_s * S
        others_ns = now_ns if at_s < 5 or at_s >= 20 else NOW + 4 * S
        signs = {"a": LifeSigns(BORN, others_ns), "b": LifeSigns(BORN, NOW)}
        watch.look(signs, newest_of(signs.values()), now_ns)
        if at_s >= 4:
            assert watch.known["b"].state is SILENT


def test_a_worker_that_the_registry_loses_briefly_is_never_silent():
    """Redis returns without leases; workers register one after the other, and their telemetry never stopped."""
    watch = LifeWatch()
    for tenth in range(40):
        now_ns = NOW + tenth * S // 10
        signs = {"a": LifeSigns(BORN, now_ns), "b": LifeSigns(BORN, now_ns if tenth < 20 else 0)}
        if 10 <= tenth < 20:
            del signs["b"]
        watch.look(signs, now_ns, now_ns)
        if tenth < 39 - SILENT_AFTER_NS * 10 // S:
            assert watch.known["b"].state is RUNNING
