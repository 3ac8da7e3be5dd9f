"""Tests of what advice predicts after a move: the end of the backlog, and TTFT and TPOT from then on."""

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.verdict.advice import advice
from libs.policy.verdict.aftermath import MOST_S, aftermath, decodes_to_come
from libs.policy.verdict.causes import CauseCode, causes
from libs.policy.verdict.promises import AFTER_NS, ENDED_NS, LEAST_ANSWERS, LEAST_OUTCOMES, WATCHED_NS
from libs.policy.verdict.state import LEAST_YIELD, PromisedFigure, RoleCounts, as_roles_stand, in_hand_ns, prompt_yield
from libs.policy.verdict.watch import VerdictWatch
from tests.unit.verdict.test_verdicts import ENGINE, LIMITS, MS, S, state

BACKLOG, TTFT, TPOT = PromisedFigure.BACKLOG, PromisedFigure.TTFT, PromisedFigure.TPOT


def promised(*, rate, waits_s, counts, error=0.05, decodes=20, measured=1.0):
    """Return the prediction for these roles while prompts of `waits_s` worker-seconds wait."""
    now = state(prompts=rate, decodes=decodes)
    work = replace(now.work, waiting_ns=waits_s * S)
    now = replace(now, work=work, arrival_rate=rate, arrival_error=error, prompt_tokens=400.0, prompt_yield=measured)
    return aftermath(now, work, counts, as_roles_stand(ENGINE, work, counts))


def test_a_backlog_shrinks_by_the_speed_that_arrivals_leave():
    in_hand_s = in_hand_ns(ENGINE, 5) / S
    found = promised(rate=3.0, waits_s=12.0 + in_hand_s, counts=RoleCounts(5, 3, 0))[BACKLOG]
    assert found.then == pytest.approx(12.0 / (5 - 3))
    assert found.least < found.then < found.most
    faster = promised(rate=3.0, waits_s=12.0 + in_hand_s, counts=RoleCounts(6, 2, 0))[BACKLOG]
    assert faster.most < found.most


def test_the_predicted_end_of_a_backlog_uses_the_measured_prefill_speed():
    counts, in_hand_s = RoleCounts(5, 3, 0), in_hand_ns(ENGINE, 5) / S
    found = promised(rate=3.0, waits_s=12.0 + in_hand_s, counts=counts, measured=0.9)[BACKLOG]
    assert found.then == pytest.approx(12.0 / (5 * 0.9 - 3))
    assert BACKLOG not in promised(rate=3.0, waits_s=12.0, counts=counts, measured=0.6)


@given(st.floats(0, 4), st.floats(0, 100), st.floats(0.5, 1))
def test_slower_prefill_never_predicts_an_earlier_end(rate, waits_s, share):
    full, less = (
        promised(rate=rate, waits_s=waits_s, counts=RoleCounts(5, 3, 0), measured=each).get(BACKLOG)
        for each in (1.0, share)
    )
    if full is not None and less is not None:
        assert less.then >= full.then - 1e-9 and less.most >= full.most - 1e-9
        assert less.least <= less.then <= less.most


@given(st.floats(0, 1e6), st.floats(0, 1e11), st.floats(1e-7, 1e-4))
def test_the_measured_share_of_a_speed_is_bounded_and_is_one_for_full_steps(tokens, took_ns, speed):
    assert LEAST_YIELD <= prompt_yield(tokens, took_ns, speed) <= 1.0
    assert prompt_yield(speed * took_ns, took_ns, speed) == pytest.approx(1.0)
    assert prompt_yield(0.9 * speed * 2e9, 2e9, speed) == pytest.approx(0.9)
    assert prompt_yield(0.9 * speed * 5e8, 5e8, speed) == 1.0, "too little to say"


def test_without_a_queue_only_ttft_is_predicted():
    found = promised(rate=2.0, waits_s=0.0, counts=RoleCounts(4, 4, 0))
    assert BACKLOG not in found and TTFT in found


def test_a_backlog_that_grows_after_the_move_has_no_predicted_end_or_ttft():
    found = promised(rate=5.0, waits_s=20.0, counts=RoleCounts(4, 4, 0))
    assert BACKLOG not in found and TTFT not in found


def test_no_end_of_a_backlog_is_predicted_if_arrivals_may_equal_the_speed():
    counts = RoleCounts(5, 3, 0)
    assert BACKLOG in promised(rate=3.5, waits_s=20.0, counts=counts, error=0.1, measured=0.9)
    assert BACKLOG not in promised(rate=3.5, waits_s=20.0, counts=counts, error=0.2, measured=0.9)


def test_tpot_is_predicted_only_under_decode_pressure():
    assert TPOT not in promised(rate=1.0, waits_s=0.0, counts=RoleCounts(2, 6, 0))
    assert TPOT in promised(rate=1.0, waits_s=0.0, counts=RoleCounts(2, 6, 0), decodes=800)


@given(st.floats(0, 7), st.floats(0, 500), st.floats(0, 500), st.floats(0, 2), st.integers(1, 7))
def test_ranges_are_ordered_finite_and_grow_with_the_backlog(rate, waits_s, more_s, error, prefill):
    counts = RoleCounts(prefill, 8 - prefill, 0)
    less, more = (promised(rate=rate, waits_s=each, counts=counts, error=error) for each in (waits_s, waits_s + more_s))
    for found in (less, more):
        for each in found.values():
            assert 0 <= each.least <= each.then <= each.most and isfinite(each.most)
    if BACKLOG in less:
        before, after = less[BACKLOG], more[BACKLOG]
        assert after.least >= before.least - 1e-9
        assert after.then >= before.then - 1e-9
        assert after.most >= before.most - 1e-9
        assert after.most <= MOST_S
    assert (TTFT in less) == (TTFT in more)


def pressing(**more):
    """Build pressure of prompts with a queue of 9 s of one worker."""
    usual = state(prompts=5.0, decodes=20, waits_s=3.0)
    return replace(usual, arrival_rate=3.5, arrival_error=0.05, prompt_tokens=400.0, **more)


def test_the_sentence_names_the_end_of_the_backlog_and_ttft_from_then_on():
    found = causes(pressing(), LIMITS)[0]
    assert found.code is CauseCode.PREFILL_BOUND
    least, most = found.action.backlog_s.least, found.action.backlog_s.most
    assert f"the 90k waiting prompt tokens would be gone in {least:.1f} to {most:.1f} s" in found.sentence
    assert "TTFT p95 then under" in found.sentence


def follow(watch, start_ms, *, gone_s, ttft_ms):
    """Advise, move, let the backlog last `gone_s`, and answer requests; return the prediction."""
    for at_ms in range(start_ms, start_ms + 2_000, 100):
        found = watch.look([pressing()], at_ms * MS)
    action = found.causes[0].action
    count, moved_ms = len(action.workers), start_ms + 2_000
    after = state(prompts=3.5, decodes=20, prefill=3 + count, mixed=5 - count, waits_s=3.0)
    calm = state(prompts=3.5, decodes=20, prefill=3 + count, mixed=5 - count, waits_s=0.0)
    gone_ms = moved_ms + round(gone_s * 1_000)
    for at_ms in range(moved_ms, gone_ms + (ENDED_NS + S) // MS, 100):
        watch.look([after if at_ms < gone_ms else calm], at_ms * MS)
        if at_ms >= gone_ms:
            watch.promises.answered("m", at_ms * MS, ttft_ms * MS, 0.0)
    return action


def came(watch, figure):
    return watch.promises.outcomes[figure]


def test_backlog_and_ttft_are_scored_once_the_command_was_followed():
    watch = VerdictWatch(LIMITS)
    promise = advice(pressing())
    action = follow(watch, 0, gone_s=promise.backlog_s.then, ttft_ms=promise.ttft_ms.then)
    (backlog,), (ttft,) = came(watch, BACKLOG), came(watch, TTFT)
    assert (backlog.id, ttft.id) == (action.id, action.id)
    assert backlog.came == pytest.approx(promise.backlog_s.then, abs=0.11) and backlog.kept
    assert ttft.came == pytest.approx(promise.ttft_ms.then) and ttft.kept
    follow(watch, 200_000, gone_s=4 * promise.backlog_s.most, ttft_ms=2 * promise.ttft_ms.most)
    assert [each.kept for each in (*came(watch, BACKLOG), *came(watch, TTFT))] == [True, False, True, False]


def test_only_requests_that_arrive_soon_after_the_end_of_the_backlog_count_for_ttft():
    watch = VerdictWatch(LIMITS)
    log = watch.promises
    for at_ms in range(0, 2_000, 100):
        found = watch.look([pressing()], at_ms * MS)
    count = len(found.causes[0].action.workers)
    calm = state(prompts=3.5, decodes=20, prefill=3 + count, mixed=5 - count, waits_s=0.0)
    watch.look([calm], 2_000 * MS)
    watch.look([calm], 2_100 * MS)
    for _ in range(LEAST_ANSWERS):
        log.answered("m", 2_000 * MS, S, 0.0)
        log.answered("m", 2_100 * MS + AFTER_NS, S, 0.0)
        log.answered("other", 3_000 * MS, S, 0.0)
    for at_ms in range(2_200, 2_200 + (ENDED_NS + S) // MS, 100):
        watch.look([calm], at_ms * MS)
    assert (len(came(watch, BACKLOG)), came(watch, TTFT)) == (1, ())


def test_a_backlog_that_stays_is_a_miss_over_the_observed_time():
    watch = VerdictWatch(LIMITS)
    follow(watch, 0, gone_s=WATCHED_NS / S + 5, ttft_ms=100.0)
    (outcome,) = came(watch, BACKLOG)
    assert not outcome.kept and outcome.came == pytest.approx(WATCHED_NS / S, abs=0.11)
    assert came(watch, TTFT) == ()


def test_another_move_of_the_same_workers_ends_the_score_of_a_command():
    watch = VerdictWatch(LIMITS)
    for at_ms in range(0, 2_000, 100):
        found = watch.look([pressing()], at_ms * MS)
    count = len(found.causes[0].action.workers)
    after = state(prompts=3.5, decodes=20, prefill=3 + count, mixed=5 - count, waits_s=3.0)
    for at_ms in range(2_000, 6_000, 100):
        watch.look([after], at_ms * MS)
    for at_ms in range(6_000, 40_000, 100):
        watch.look([state(prompts=1.0, decodes=20, waits_s=0.0)], at_ms * MS)
    assert (len(came(watch, PromisedFigure.PRESSURE)), came(watch, BACKLOG)) == (1, ())


def test_each_figure_widens_by_its_own_misses_and_warns_of_its_unreliability():
    watch = VerdictWatch(LIMITS)
    promise = advice(pressing())
    for number in range(LEAST_OUTCOMES):
        follow(watch, number * 200_000, gone_s=3 * promise.backlog_s.most, ttft_ms=promise.ttft_ms.then)
    for at_ms in range(2_000_000, 2_002_000, 100):
        found = watch.look([pressing()], at_ms * MS)
    then = found.causes[0].action
    assert then.backlog_s.most > promise.backlog_s.most
    assert then.ttft_ms.most == pytest.approx(promise.ttft_ms.most)
    assert f"Of the last {LEAST_OUTCOMES} such moves 0 worked off the backlog in the time promised." in found.sentence
    assert "left the TTFT" not in found.sentence


def test_a_prediction_covers_the_answers_to_waiting_prompts():
    heedless, found = advice(pressing()), advice(pressing(output_tokens=20.0))
    assert (found.role, found.workers) == (heedless.role, heedless.workers)
    counts = RoleCounts(3 + len(found.workers), 5 - len(found.workers), 0)
    to_come = decodes_to_come(left := pressing(output_tokens=20.0), left.work, counts)
    later = as_roles_stand(ENGINE, to_come, counts).decode_pressure
    assert heedless.pressure_range[1] < later <= found.pressure_range[1]


@given(st.floats(0, 7), st.floats(0, 100), st.integers(1, 7), st.floats(1, 500))
def test_running_sequences_are_included_in_the_predicted_decodes(rate, waits_s, prefill, output_tokens):
    now = replace(state(prompts=rate), arrival_rate=rate, prompt_tokens=400.0, output_tokens=output_tokens)
    work = replace(now.work, waiting_ns=waits_s * S)
    later = decodes_to_come(now, work, RoleCounts(prefill, 8 - prefill, 0))
    assert later.decodes >= work.decodes and later.kv_tokens >= work.kv_tokens
