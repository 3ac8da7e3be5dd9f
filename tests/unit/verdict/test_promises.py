"""Tests of predictions of advice: scored once the command was followed, and widened by misses."""

from dataclasses import replace

import pytest

from libs.policy.verdict.causes import CauseCode
from libs.policy.verdict.promises import FOLLOWED_NS, LEAST_OUTCOMES, MAX_OUTCOMES
from libs.policy.verdict.state import PromisedFigure
from libs.policy.verdict.watch import VerdictWatch
from tests.unit.verdict.test_verdicts import LIMITS, MS, S, state

PROMPTS = 5.0


def advised(watch, start_ms):
    """A shortage that is named with a command; returns that command's action."""
    for at_ms in range(start_ms, start_ms + 2_000, 100):
        found = watch.look([state(prompts=PROMPTS, decodes=20)], at_ms * MS)
    return found.causes[0].action


def pressed(watch):
    return watch.promises.outcomes[PromisedFigure.PRESSURE]


def follow(watch, start_ms, *, prompts=PROMPTS, acts=False):
    """Advise, move the workers, and let that many prompts arrive from then on; return the action."""
    action = advised(watch, start_ms)
    count = len(action.workers)
    after = state(prompts=prompts, decodes=20, prefill=3 + count, mixed=5 - count)
    for at_ms in range(start_ms + 2_000, start_ms + 10_000, 100):
        watch.look([after], at_ms * MS, acts=acts)
    return action


def test_a_followed_command_is_scored_by_the_resulting_pressure():
    watch = VerdictWatch(LIMITS)
    action = follow(watch, 0)
    (outcome,) = pressed(watch)
    assert (outcome.id, outcome.code, outcome.role) == (action.id, CauseCode.PREFILL_BOUND, "prefill")
    assert outcome.came == pytest.approx(action.pressure_then, rel=0.05) and outcome.kept
    follow(watch, 20_000, prompts=2 * PROMPTS)
    assert [each.kept for each in pressed(watch)] == [True, False]


def test_a_command_that_is_not_followed_is_not_scored():
    watch = VerdictWatch(LIMITS)
    advised(watch, 0)
    for at_ms in range(2_000, 30_000, 100):
        watch.look([state(prompts=1.0, decodes=20)], at_ms * MS)
    assert pressed(watch) == ()


def test_roles_changed_long_after_a_command_ended_do_not_count_for_it():
    watch = VerdictWatch(LIMITS)
    action = advised(watch, 0)
    for at_ms in range(2_000, 2_000 + (FOLLOWED_NS + 5 * S) // MS, 100):
        watch.look([state(prompts=1.0, decodes=20)], at_ms * MS)
    moved = state(prompts=1.0, decodes=20, prefill=3 + len(action.workers), mixed=5 - len(action.workers))
    for at_ms in range(60_000, 65_000, 100):
        watch.look([moved], at_ms * MS)
    assert pressed(watch) == ()


def test_moves_of_a_planner_are_not_scored_as_advice():
    watch = VerdictWatch(LIMITS)
    follow(watch, 0, acts=True)
    assert pressed(watch) == ()


def test_ranges_widen_by_misses_and_unreliable_advice_carries_a_warning():
    watch = VerdictWatch(LIMITS)
    first = follow(watch, 0, prompts=1.6 * PROMPTS)
    for number in range(1, LEAST_OUTCOMES):
        follow(watch, number * 20_000, prompts=1.6 * PROMPTS)
    assert [each.kept for each in pressed(watch)] == [False] * LEAST_OUTCOMES
    then = advised(watch, 200_000)
    assert then.pressure_then == pytest.approx(first.pressure_then)
    assert then.pressure_range[1] >= pressed(watch)[-1].came > first.pressure_range[1]
    assert then.pressure_range[0] == first.pressure_range[0]
    said = watch.look([state(prompts=PROMPTS, decodes=20)], 202_000 * MS).sentence
    assert f"Of the last {LEAST_OUTCOMES} such moves 0 left what was promised." in said


def test_outcomes_are_bounded():
    watch = VerdictWatch(LIMITS)
    follow(watch, 0)
    outcome = pressed(watch)[0]
    for number in range(MAX_OUTCOMES + 5):
        watch.promises._outcomes[PromisedFigure.PRESSURE].append(replace(outcome, id=str(number)))
    assert len(pressed(watch)) == MAX_OUTCOMES
