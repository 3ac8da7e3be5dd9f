"""Properties of alerts over any course of conditions: fire once, end once, never flap."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.alerts.burn import BUCKET_S, WINDOWS_S, BurnLog, JudgedRequest, missed_levels
from libs.policy.alerts.rules import Condition, Name, Rule
from libs.policy.alerts.store import FLAP_NS, GAP_NS, AlertStateMachine
from libs.policy.verdict.state import Grade, Threshold

S = 10**9
NAME = Name.IMBALANCE
FLOATS = st.floats(0, 1)
THRESHOLDS = st.tuples(FLOATS, FLOATS).filter(lambda pair: pair[0] != pair[1])
THRESHOLDS = THRESHOLDS.map(lambda pair: Threshold(max(pair), min(pair)))
RULES = st.builds(Rule, st.integers(0, 20 * S), st.integers(0, 60 * S))
SUBJECTS = st.sampled_from(("a", "b"))
GRADES = st.sampled_from((*Grade, None))
STEPS = st.tuples(st.integers(-S, 2 * GAP_NS), st.dictionaries(SUBJECTS, GRADES))
COURSES = st.lists(STEPS, max_size=150)


def condition(subject, grade):
    return Condition(NAME, (("worker", subject),), grade, str(grade))


def run(rule, course):
    """Return [(at_ns, transition)] for a sequence of (ns since the last step, grades)."""
    machine, now_ns, found = AlertStateMachine({NAME: rule}), 10**18, []
    for step_ns, grades in course:
        now_ns += step_ns
        found += [(now_ns, each) for each in machine.step(now_ns, [condition(*item) for item in grades.items()])]
    return found


@given(RULES, COURSES)
def test_an_alert_never_fires_twice_without_ending_nor_ends_without_firing(rule, course):
    firing = {}
    for now_ns, each in run(rule, course):
        if each.ended_ns is None:
            assert each.labels not in firing
            firing[each.labels] = each
        else:
            fired = firing.pop(each.labels)
            assert each.started_ns == fired.started_ns <= each.ended_ns == now_ns


@given(RULES, COURSES)
def test_an_alert_fires_only_after_its_condition_has_lasted_and_ends_only_after_it_was_clear(rule, course):
    since, now_ns, machine = {}, 10**18, AlertStateMachine({NAME: rule})
    last_ns = None
    for step_ns, grades in course:
        now_ns += step_ns
        changed = machine.step(now_ns, [condition(*item) for item in grades.items()])
        if last_ns is not None and now_ns <= last_ns:
            assert not changed
            continue
        if last_ns is not None and now_ns - last_ns > GAP_NS:
            since = {}
        last_ns = now_ns
        since = {
            (subject, grade): since.get((subject, grade), now_ns)
            for subject, grade in grades.items()
            if grade is not None
        }
        for each in changed:
            subject = dict(each.labels)["worker"]
            if each.ended_ns is None:
                assert now_ns - since[subject, Grade.FIRE] >= rule.for_ns
            elif "no data for" not in each.reason:
                assert now_ns - since[subject, Grade.CLEAR] >= rule.clear_ns


@given(THRESHOLDS, RULES, st.lists(FLOATS, max_size=100), st.integers(1, S))
def test_a_figure_that_only_grows_fires_at_most_once_and_never_ends(threshold, rule, values, step_ns):
    course = [(step_ns, {"a": threshold.grade(value)}) for value in sorted(values)]
    found = run(rule, course)
    assert [each.ended_ns for _, each in found] in ([], [None])


@given(THRESHOLDS, RULES, st.lists(FLOATS, max_size=100), st.integers(1, S))
def test_a_figure_that_only_falls_ends_at_most_once(threshold, rule, values, step_ns):
    course = [(step_ns, {"a": threshold.grade(value)}) for value in sorted(values, reverse=True)]
    assert [each.ended_ns is None for _, each in run(rule, course)] in ([], [True], [True, False])


@given(THRESHOLDS, st.lists(FLOATS, max_size=100))
def test_a_figure_that_stays_between_the_thresholds_changes_nothing(threshold, values):
    between = [threshold.clear + (threshold.fire - threshold.clear) * value for value in values]
    course = [(S, {"a": threshold.grade(value)}) for value in between if threshold.clear < value < threshold.fire]
    assert run(Rule(0, 0), course) == []
    fired = run(Rule(0, 0), [(S, {"a": Grade.FIRE}), *course])
    assert [each.ended_ns for _, each in fired] == [None]


@given(st.lists(st.sampled_from(Grade), min_size=600, max_size=600), st.integers(1, 6))
def test_an_alert_fires_at_most_a_few_times_an_hour(grades, length):
    """Clear times are 30 s at first, then 60, 120, 240, 480, 480 ...: at most 8 fires in half an hour, 14 an hour."""
    rule = Rule(0, 30 * S)
    course = [(S, {"a": grade}) for grade in grades for _ in range(length)]
    fires = [now_ns for now_ns, each in run(rule, course) if each.ended_ns is None]
    assert all(sum(0 <= other - start < FLAP_NS for other in fires) <= 8 for start in fires)


@given(st.lists(st.tuples(st.integers(0, 5_000), st.booleans()), max_size=200), st.integers(0, 400_000))
def test_burn_windows_count_requests_that_ended_in_them_to_the_bucket(requests, after_s):
    log, now_s, ends = BurnLog(), 1_700_000_000, []
    for step_s, bad in requests:
        now_s += step_s
        log.add("m", "ttft", now_s * S, bad=bad)
        ends.append((now_s // BUCKET_S, bad))
    now_s += after_s
    for burn in log.burns(now_s * S):
        for window_s in WINDOWS_S:
            inside = [bad for bucket, bad in ends if now_s // BUCKET_S - bucket < window_s // BUCKET_S]
            counted = burn.windows[window_s]
            assert (counted.total, counted.bad) == (len(inside), Counter(inside)[True])


REQUESTS = st.builds(
    JudgedRequest,
    failed=st.booleans(),
    shed=st.booleans(),
    arrival_unix_ns=st.integers(0, 10**18),
    ttft_ns=st.integers(0, 10**12),
    ttft_deadline_unix_ns=st.integers(0, 10**18 + 10**12),
    decode_ns=st.integers(0, 10**12),
    output_tokens=st.integers(0, 1_000),
    tpot_target_ns=st.integers(0, 10**9),
)


@given(REQUESTS, st.integers(1, 10**12))
def test_a_slower_request_never_meets_a_level_that_a_faster_one_missed(request, more_ns):
    slower = replace(
        request, ttft_ns=request.ttft_ns and request.ttft_ns + more_ns, decode_ns=request.decode_ns + more_ns
    )
    for faster_missed, slower_missed in zip(missed_levels(request), missed_levels(slower), strict=True):
        assert (faster_missed is None) == (slower_missed is None)
        assert not faster_missed or slower_missed


@given(REQUESTS)
def test_a_level_is_judged_only_by_the_requests_own_target_unless_it_failed_or_was_shed(request):
    judged = missed_levels(replace(request, ttft_deadline_unix_ns=0, tpot_target_ns=0))
    assert judged == (True if request.failed or request.shed else None, None)
