"""Properties of the decode admission guard: who waits, for whose sake, and how long at most."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import (
    ENOUGH_LENGTHS,
    MAX_HOLD_NS,
    MOST_KINDS,
    AnswerLengths,
    Decoding,
    TokenLine,
    beside,
    joins,
)

MS = 1_000_000
MODEL = StepTimeModel(0, 0, 0, 60 * MS, 5 * MS, 0, 1.0)
"""Eight decode in 100 ms a step, nine in 105."""
EIGHT = StepWork(decode_sequences=8)
NOW_NS = 10**12

models = st.builds(
    StepTimeModel,
    st.just(0.0), st.just(0.0), st.just(0.0), st.floats(0, 5e7), st.floats(0, 1e6), st.floats(0, 1e3), st.just(1.0),
)  # fmt: skip
lines = st.none() | st.builds(TokenLine, st.integers(NOW_NS - 10**10, NOW_NS), st.just(20 * MS), st.integers(0, 500))
running = st.lists(
    st.builds(Decoding, st.integers(0, 500), st.integers(1, 500), st.sampled_from((0, 20 * MS)), lines), max_size=8
)
known = st.lists(st.integers(2, 600), max_size=20)
held = st.integers(0, 2 * MAX_HOLD_NS)
dues = st.just(0) | st.integers(NOW_NS - 10**9, NOW_NS + 10**10)


def lengths(*ended: int) -> AnswerLengths:
    made = AnswerLengths()
    for tokens in ended:
        made.ended(tokens)
    return made


def decoding(tokens: int, left: int, *, ahead_ms: int = 0, target_ms: int = 100) -> Decoding:
    """Draw a sequence that is on schedule, or ahead of it."""
    line = TokenLine(NOW_NS + (ahead_ms - target_ms * tokens) * MS, target_ms * MS, tokens)
    return Decoding(tokens, left, target_ms * MS, line)


beside_eight = partial(joins, MODEL, EIGHT, kv_tokens=1, lengths=lengths(), held_ns=0, due_ns=0, now_ns=NOW_NS)


@given(models, running, known, held, dues)
def test_a_newcomer_waits_only_to_save_a_target_of_another_and_for_a_bounded_time(
    model: StepTimeModel, beside_whom: list[Decoding], ended: list[int], held_ns: int, due_ns: int
) -> None:
    work = StepWork(decode_sequences=len(beside_whom), decode_kv_tokens=100 * len(beside_whom))
    before, after = model.decode_ns(work), model.decode_ns(beside(work, 100))
    harmed = [each for each in beside_whom if each.keeps(before, NOW_NS) and not each.keeps(after, NOW_NS)]
    found = joins(model, work, beside_whom, 100, lengths(*ended), held_ns=held_ns, due_ns=due_ns, now_ns=NOW_NS)
    if found:
        return
    assert harmed and held_ns < MAX_HOLD_NS
    assert all(each.tpot_ns for each in harmed)
    later = joins(model, work, beside_whom, 100, lengths(*ended), held_ns=MAX_HOLD_NS, due_ns=due_ns, now_ns=NOW_NS)
    assert later


@given(models, running, known, held, dues, st.integers(0, MAX_HOLD_NS))
def test_a_newcomer_once_admissible_stays_admissible(  # noqa: PLR0917
    model: StepTimeModel, beside_whom: list[Decoding], ended: list[int], held_ns: int, due_ns: int, more_ns: int
) -> None:
    work = StepWork(decode_sequences=len(beside_whom), decode_kv_tokens=100 * len(beside_whom))
    ask = partial(joins, model, work, beside_whom, 100, lengths(*ended), now_ns=NOW_NS)
    if ask(held_ns=held_ns, due_ns=0):
        assert ask(held_ns=held_ns + more_ns, due_ns=0)
    if ask(held_ns=held_ns, due_ns=0):
        assert ask(held_ns=held_ns, due_ns=due_ns), "a deadline never makes it wait"


@pytest.mark.parametrize(
    ("beside_whom", "ended", "joined"),
    [
        ([decoding(12, 20)], (), False),  # nothing is known of when they end
        ([decoding(12, 24)], (36, 36), True),  # none ends in the 20 steps that it may wait
        ([decoding(12, 20)], (36, 36), False),  # it has ended by then, whatever others did
        ([decoding(12, 500)], (16, 24, 200), False),  # two in three have ended by then
        ([decoding(12, 500)], (16, 200, 300), True),
        ([decoding(12, 500)] * 3, (16, 200, 300), False),  # one of three will
        ([decoding(12, 500)], (4, 8, 11), True),  # it is longer than any: nobody knows
        ([decoding(12, 20, target_ms=200)], (), True),  # a target that holds with one more
        ([decoding(12, 20, target_ms=80)], (), True),  # one that does not hold without
        ([decoding(12, 20, ahead_ms=110)], (), True),  # 100 ms lost in 20 steps, and it is further ahead
        ([decoding(12, 20, ahead_ms=90)], (), False),
        ([decoding(12, 20, ahead_ms=-110)], (), True),  # it is late, and too late to make it good
        ([replace(decoding(12, 20), line=None)], (), False),  # its first token is yet to come
    ],
)
def test_a_newcomer_waits_if_that_helps_another_sequence(
    beside_whom: list[Decoding], ended: tuple[int, ...], joined: bool
) -> None:
    assert beside_eight(running=beside_whom, lengths=lengths(*ended)) == joined


def test_a_newcomer_waits_only_as_long_as_its_own_first_token_allows_unless_that_is_late_already() -> None:
    at = partial(beside_eight, running=[decoding(22, 10)], lengths=lengths(32))
    assert not at(), "the other one ends after a second"
    assert at(held_ns=MAX_HOLD_NS - 900 * MS)
    assert not at(due_ns=NOW_NS + 1110 * MS)
    assert at(due_ns=NOW_NS + 1090 * MS), "105 of these are its own step"
    assert not at(due_ns=NOW_NS + 50 * MS), "it is late whatever it does"


def test_only_the_latest_answers_count() -> None:
    made = lengths(*[300] * 1000)
    assert not made.one_ends([decoding(12, 500)], 20)
    for _ in range(200):
        made.ended(16)
    assert made.one_ends([decoding(12, 500)], 20)


def test_answers_are_expected_to_be_as_long_as_their_kind_once_enough_have_ended() -> None:
    made = lengths(*[300] * 100)
    brief = Decoding(12, 500, 100 * MS, None, "tenant/chat")
    for _ in range(ENOUGH_LENGTHS - 1):
        made.ended(16, "tenant/chat")
    assert not made.one_ends([brief], 20), "too few to know them by"
    made.ended(16, "tenant/chat")
    assert made.one_ends([brief], 20)
    assert not made.one_ends([Decoding(12, 500, 100 * MS, None, "tenant/writing")], 20), (
        "one kind says nothing of others"
    )


def test_only_the_latest_of_ever_new_kinds_are_remembered() -> None:
    made = lengths()
    for number in range(3 * MOST_KINDS):
        made.ended(16, f"tenant-{number}/chat")
    assert len(made) == MOST_KINDS
