"""Tests of events about workers and planner decisions in the metrics service."""

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_PREFILL, Assignment, Load
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_RECOMMEND,
    ACTION_SET_ROLE,
    MODE_AUTO,
    Action,
    Candidate,
    Decision,
    Measured,
    Seen,
    WorkerChange,
)
from libs.telemetry.lives import SILENT_AFTER_NS
from libs.telemetry.workers import WorkerFacts
from services.metrics.cluster_events import (
    LOOK_NS,
    MAX_DECISIONS,
    DecisionLog,
    EventLog,
    Life,
    LifeChange,
    WorkerLives,
    pressure_change,
    together,
)

S_NS = 1_000_000_000
BEGIN_NS = 1_800_000_000 * S_NS


def facts(
    name: str, covered_to_ns: int, *, incarnation: int = BEGIN_NS - 3600 * S_NS, left: bool = False
) -> WorkerFacts:
    assigned = Assignment(model="sim", role=ROLE_PREFILL, epoch=1)
    return WorkerFacts(name, incarnation, "n", 1, "sim", assigned, Load(), covered_to_ns, 0, left=left)


def look(lives: WorkerLives, at_ns: int, *workers: WorkerFacts) -> list[tuple[LifeChange, str]]:
    newest_ns = max((worker.covered_to_unix_ns for worker in workers), default=0)
    return [(life.change, life.worker) for life in lives.look(workers, newest_ns, at_ns)]


def test_workers_present_at_the_first_look_are_no_events() -> None:
    lives = WorkerLives()
    assert look(lives, BEGIN_NS, facts("a", BEGIN_NS)) == []
    at_ns = BEGIN_NS + S_NS
    newcomer = facts("b", at_ns, incarnation=at_ns - S_NS)
    long_there = facts("c", at_ns)
    assert look(lives, at_ns, facts("a", at_ns), newcomer, long_there) == [(LifeChange.STARTED, "b")]


def test_a_worker_that_returns_under_its_name_reports_how_its_predecessor_ended() -> None:
    for left, how in ((False, "had not drained"), (True, "had drained")):
        lives = WorkerLives()
        look(lives, BEGIN_NS, facts("a", BEGIN_NS, left=left))
        again = facts("a", BEGIN_NS + 2 * S_NS, incarnation=BEGIN_NS + S_NS)
        (life,) = lives.look([again], BEGIN_NS + 2 * S_NS, BEGIN_NS + 2 * S_NS)
        assert life.change is LifeChange.RESTARTED
        assert "back after 2.0 s" in life.reason
        assert how in life.reason


def test_silence_is_reported_once_and_so_is_its_end() -> None:
    lives = WorkerLives()
    found = []
    for second in range(12):
        at_ns = BEGIN_NS + second * S_NS
        reported_ns = at_ns if second in (0, 1) or second >= 8 else BEGIN_NS + S_NS
        found += look(lives, at_ns, facts("a", reported_ns), facts("b", at_ns))
    assert found == [(LifeChange.LOST, "a"), (LifeChange.BACK, "a")]


def test_while_every_worker_is_silent_the_broker_is_reported_and_no_worker_is_lost() -> None:
    lives = WorkerLives()
    for second in range(20):
        assert look(lives, BEGIN_NS + second * S_NS, facts("a", BEGIN_NS), facts("b", BEGIN_NS)) == []


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), max_size=30))
def test_a_worker_is_lost_at_most_once_before_it_returns_or_restarts(story: list[tuple[bool, bool, int]]) -> None:
    lives, at_ns, reported_ns, incarnation, reported = WorkerLives(), BEGIN_NS, BEGIN_NS, BEGIN_NS - S_NS, []
    for received, restarts, seconds in story:
        at_ns += seconds * S_NS + LOOK_NS
        if received:
            reported_ns = at_ns
            incarnation = at_ns if restarts else incarnation
        workers = [facts("a", reported_ns, incarnation=incarnation), facts("b", at_ns)]
        reported += [life.change for life in lives.look(workers, at_ns, at_ns) if life.worker == "a"]
    for before, after in pairwise(reported):
        assert not (before is after is LifeChange.LOST)
        assert after is not LifeChange.BACK or before is LifeChange.LOST


def test_eight_workers_that_fall_silent_together_are_one_event() -> None:
    lives = [Life(LifeChange.LOST, f"gpu-{n}", "decode", f"no telemetry for {SILENT_AFTER_NS}") for n in range(12)]
    (alike,) = together(lives)
    event = EventLog().add_lives(alike, BEGIN_NS)
    assert event.action == "worker_lost"
    assert event.worker.startswith("gpu-0, gpu-1, gpu-10")
    assert event.worker.endswith("and 4 more")


def decision(sequence: int, action: Action = ACTION_SET_ROLE, **more: object) -> Decision:
    return Decision(
        planner_id="planner", incarnation=7 * S_NS, sequence=sequence, decided_unix_ns=BEGIN_NS + sequence * S_NS,
        action=action, mode=MODE_AUTO, reason="prompts press", reason_code="prompts_press", model="sim",
        changes=[WorkerChange(worker_id="gpu-2", assignment=Assignment(model="sim", role=ROLE_PREFILL))],
        candidates=[Candidate(prefill=5, decode=3, prompt_pressure=0.9, decode_pressure=0.4)], **more,
    )  # fmt: skip


def entered(*decisions: Decision) -> DecisionLog:
    log = DecisionLog()
    for each in decisions:
        log.add(each)
    return log


def test_a_decision_reported_again_with_its_outcome_is_one_event() -> None:
    measured = Measured(before=Seen(prompt_pressure=1.8), after=Seen(prompt_pressure=0.93), after_ms=2000)
    (reported,) = entered(decision(1), decision(1, measured=measured)).newest(10)
    assert reported.id == "planner.7.1"
    assert reported.changes[0].worker == "gpu-2"
    assert reported.candidates[0].prompt_pressure == 0.9
    assert reported.measured is not None
    assert reported.measured.after.prompt_pressure == 0.93


def test_decisions_without_a_change_are_omitted_by_default_and_only_the_newest_is_stored() -> None:
    log = entered(*(decision(number, ACTION_KEEP) for number in range(5)), decision(9))
    assert [each.action for each in log.newest(10)] == ["set_role"]
    assert [(each.action, each.id) for each in log.newest(10, keeps=True)][1] == ("keep", "planner.7.4")


def test_only_the_newest_of_a_run_of_recommendations_is_shown() -> None:
    log = entered(*(decision(number, ACTION_RECOMMEND) for number in range(1, 6)), decision(7))
    assert [each.id for each in log.newest(10)] == ["planner.7.7", "planner.7.5"]


def test_stored_decisions_are_bounded(numbers: Iterable[int] = range(1, MAX_DECISIONS + 40)) -> None:
    log = entered(*map(decision, numbers))
    reported = log.newest(10 * MAX_DECISIONS)
    assert len(reported) == MAX_DECISIONS
    assert reported[0].id.endswith(f".{MAX_DECISIONS + 39}")


def test_the_outcome_of_a_decision_is_an_event_of_its_own_and_comes_once() -> None:
    log = EventLog()
    change = WorkerChange(worker_id="d", assignment=Assignment(model="sim", role=ROLE_PREFILL))
    decided = Decision(
        planner_id="p", incarnation=1, sequence=3, decided_unix_ns=BEGIN_NS, action=ACTION_SET_ROLE, changes=[change]
    )
    assert log.add(decided) is not None and log.add(decided) is None
    before, after = Seen(prompt_pressure=1.8, decode_pressure=0.25), Seen(prompt_pressure=0.9, decode_pressure=0.5)
    decided.measured.CopyFrom(Measured(before=before, after=after, after_ms=2_000))
    effect = log.add(decided)
    assert effect is not None and log.add(decided) is None
    assert (effect.action, effect.worker, effect.unix_ms) == ("effect", "d", BEGIN_NS // 1_000_000 + 2_000)
    assert effect.reason == "2.0 s later prefill pressure 1.80 → 0.90, decode pressure 0.25 → 0.50"
    assert [each.action for each in log.after(0)] == ["set_role", "effect"]


def test_an_infinite_pressure_is_not_shown_as_a_figure() -> None:
    measured = Measured(before=Seen(decode_pressure=1_000.0), after=Seen(decode_pressure=0.06))
    assert pressure_change(measured, "decode_pressure") == "without bound → 0.06"
