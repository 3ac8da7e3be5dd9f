"""Properties of the detection of poison prompts under losses in any order."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.policy.gateway.suspicion import (
    FRESH_TOKENS,
    HOLD_NS,
    MAX_LOSSES,
    MAX_POISON,
    MAX_SUSPECTS,
    SUSPECTED_NS,
    HeldChoice,
    Prompt,
    Suspicion,
    Worker,
    WorkStage,
)

SECOND_NS = 1_000_000_000
MEMORY_NS = 600 * SECOND_NS
POISON = b"poison"
A, B, C, D = (("a", 1), ("b", 1), ("c", 1), ("d", 1))

innocents = st.sampled_from([b"i%d" % number for number in range(8)])
stages = st.sampled_from(WorkStage)
tokens = st.integers(0, 2 * FRESH_TOKENS)


def held(prompt: Prompt, stage: WorkStage = WorkStage.PROMPT, made: int = 0, *others: Prompt) -> HeldChoice:
    return HeldChoice(prompt, frozenset((prompt, *others)), stage, made)


company = st.builds(held, innocents, stages, tokens)


def die(suspicion: Suspicion, worker: Worker, on_it: Iterable[HeldChoice], now_ns: int = 0) -> set[Prompt]:
    suspicion.lost(worker, list(on_it), now_ns)
    return suspicion.died(worker, now_ns)


@given(first=st.lists(company), second=st.lists(company), stage=st.sampled_from((WorkStage.PROMPT, WorkStage.AGAIN)))
def test_a_prompt_that_kills_two_workers_is_found(
    first: list[HeldChoice], second: list[HeldChoice], stage: WorkStage
) -> None:
    """Other prompts may be on the first worker and on the second, as far as dispatch allows."""
    suspicion = Suspicion(MEMORY_NS)
    poison = held(POISON, stage)
    assert not die(suspicion, A, [*first, poison])
    assert suspicion.is_alone(POISON)
    let_in = [each for each in second if each.stage is WorkStage.TOKENS or not suspicion.is_alone(each.prompt)]
    assert die(suspicion, B, [*let_in, poison]) == {POISON}
    assert suspicion.is_poison(POISON, 0)
    for each in (*first, *let_in):
        assert suspicion.stage(each.prompt, 0) is None, "the others were only there"


@given(crowd=st.sets(innocents), made=st.lists(tokens, min_size=8, max_size=8), on_first=tokens)
def test_the_prompt_common_to_several_losses_is_found_in_a_crowd(
    crowd: set[Prompt], made: list[int], on_first: int
) -> None:
    """Some of the crowd reach the second worker, and none the third: they are kept apart, or have passed the stage."""
    suspicion = Suspicion(MEMORY_NS)
    others = [held(prompt, WorkStage.TOKENS, count) for prompt, count in zip(sorted(crowd), made, strict=False)]
    assert not die(suspicion, A, [*others, held(POISON, WorkStage.TOKENS, on_first)])
    found = die(
        suspicion, B, [*(held(each.prompt, WorkStage.TOKENS) for each in others), held(POISON, WorkStage.TOKENS)]
    )
    assert found == (set() if others else {POISON})
    if others:
        newcomer = held(b"new", WorkStage.TOKENS)
        assert die(suspicion, C, [newcomer, held(POISON, WorkStage.TOKENS)]) == {POISON}


@given(on_first=tokens.filter(lambda made: made >= FRESH_TOKENS), beside=st.lists(company))
def test_a_prompt_whose_late_token_kills_is_found_by_its_second_worker(on_first: int, beside: list[HeldChoice]) -> None:
    suspicion = Suspicion(MEMORY_NS)
    others = [each for each in beside if not each.exposed]
    die(suspicion, A, [*others, held(POISON, WorkStage.TOKENS, on_first)])
    assert not suspicion.is_alone(POISON), "it ran well, with many others"
    assert die(suspicion, B, [held(POISON, WorkStage.TOKENS, 1)]) == {POISON}


def test_two_losses_at_different_stages_give_no_verdict_and_a_third_does() -> None:
    """Its decode worker is killed, and then the one that recomputes its prompt, as in a storm of faults."""
    suspicion = Suspicion(MEMORY_NS)
    die(suspicion, A, [held(POISON, WorkStage.TOKENS, 5)])
    assert not die(suspicion, B, [held(POISON, WorkStage.AGAIN)])
    assert suspicion.is_alone(POISON)
    assert die(suspicion, C, [held(POISON, WorkStage.AGAIN)]) == {POISON}


def test_a_prompt_that_keeps_ending_well_is_found_only_by_two_losses_in_a_row() -> None:
    suspicion = Suspicion(MEMORY_NS)
    for number in range(10):
        suspicion.ended_well(POISON, number)
        assert not die(suspicion, ("w", number), [held(POISON)], number)
    assert not die(suspicion, A, [held(POISON)], 10)
    assert die(suspicion, B, [held(POISON)], 10) == {POISON}


def test_no_prompt_is_found_if_several_were_on_both_workers() -> None:
    suspicion = Suspicion(MEMORY_NS)
    both = [held(b"one", WorkStage.TOKENS, 0), held(b"two", WorkStage.TOKENS, 0)]
    assert not die(suspicion, A, both)
    assert not die(suspicion, B, both)
    assert die(suspicion, C, both[:1]) == {b"one"}


def test_a_prompt_that_ran_well_is_not_found_while_workers_die_without_it() -> None:
    suspicion = Suspicion(MEMORY_NS)
    die(suspicion, A, [held(POISON, WorkStage.TOKENS, FRESH_TOKENS)])
    die(suspicion, B, [held(b"other", WorkStage.TOKENS, FRESH_TOKENS)])
    assert not die(suspicion, C, [held(POISON, WorkStage.TOKENS)])
    assert die(suspicion, D, [held(POISON, WorkStage.TOKENS)]) == {POISON}


@pytest.mark.parametrize(
    ("stage", "passed"), [(WorkStage.PROMPT, WorkStage.PROMPT), (WorkStage.TOKENS, WorkStage.TOKENS)]
)
def test_a_prompt_that_passes_the_stage_is_no_longer_suspected(stage: WorkStage, passed: WorkStage) -> None:
    suspicion = Suspicion(MEMORY_NS)
    die(suspicion, A, [held(POISON, stage)])
    suspicion.passed(POISON, passed)
    assert not suspicion.is_alone(POISON)
    assert not die(suspicion, B, [held(POISON, stage)])


def test_an_accused_prompt_computed_elsewhere_meanwhile_is_not_poison() -> None:
    suspicion = Suspicion(MEMORY_NS)
    suspicion.lost(A, [held(POISON)], 0)
    suspicion.lost(B, [held(POISON)], 0)
    suspicion.passed(POISON, WorkStage.PROMPT)
    assert not suspicion.is_accused(POISON)
    assert not suspicion.overdue(HOLD_NS)


def test_a_computed_prompt_does_not_excuse_a_loss_at_its_tokens() -> None:
    suspicion = Suspicion(MEMORY_NS)
    die(suspicion, A, [held(POISON, WorkStage.TOKENS)])
    suspicion.passed(POISON, WorkStage.PROMPT)
    assert die(suspicion, B, [held(POISON, WorkStage.TOKENS)]) == {POISON}


def test_losses_of_all_prompts_of_a_request_count_for_the_request() -> None:
    suspicion = Suspicion(MEMORY_NS)
    die(suspicion, A, [held(b"one", WorkStage.PROMPT, 0, b"two")])
    assert die(suspicion, B, [held(b"two", WorkStage.PROMPT, 0, b"one")]) == {b"two"}


@given(returns=st.sampled_from([A, B]), after=st.booleans())
def test_a_worker_that_returns_does_not_count_as_killed(returns: Worker, after: bool) -> None:
    suspicion = Suspicion(MEMORY_NS)
    suspicion.lost(A, [held(POISON)], 0)
    suspicion.lost(B, [held(POISON)], 0)
    assert suspicion.is_accused(POISON)
    if after:
        assert suspicion.overdue(HOLD_NS) == {POISON}
    assert suspicion.returned(returns) != after
    assert not suspicion.is_accused(POISON)
    assert not suspicion.is_poison(POISON, HOLD_NS)
    assert not suspicion.died(A, HOLD_NS) and not suspicion.died(B, HOLD_NS)


def test_a_verdict_waits_a_bounded_time_for_the_death_of_both_workers() -> None:
    suspicion = Suspicion(MEMORY_NS)
    suspicion.lost(A, [held(POISON)], 0)
    suspicion.lost(B, [held(POISON)], 0)
    assert not suspicion.died(B, 1)
    assert not suspicion.overdue(HOLD_NS - 1)
    assert suspicion.overdue(HOLD_NS) == {POISON}
    assert not suspicion.overdue(HOLD_NS)


def test_suspicion_and_verdicts_expire() -> None:
    suspicion = Suspicion(MEMORY_NS)
    die(suspicion, A, [held(POISON)])
    assert suspicion.stage(POISON, SUSPECTED_NS) is None
    assert not die(suspicion, B, [held(POISON)], SUSPECTED_NS)
    assert die(suspicion, C, [held(POISON)], SUSPECTED_NS) == {POISON}
    assert suspicion.is_poison(POISON, SUSPECTED_NS + MEMORY_NS - 1)
    assert not suspicion.is_poison(POISON, SUSPECTED_NS + MEMORY_NS)


def test_remembered_prompts_are_bounded() -> None:
    suspicion = Suspicion(MEMORY_NS)
    for number in range(MAX_POISON + 10):
        bad, first, second = held(b"bad%d" % number), ("a", number), ("b", number)
        die(suspicion, first, [bad], number)
        die(suspicion, second, [bad], number)
    assert suspicion.poison(MAX_POISON) == MAX_POISON
    assert not suspicion.is_poison(b"bad0", 0) and suspicion.is_poison(b"bad%d" % MAX_POISON, 0)
    crowd = [held(b"c%d" % number) for number in range(MAX_SUSPECTS + 10)]
    suspicion.lost(("c", 0), crowd, 0)
    for number in range(1, MAX_LOSSES + 10):
        suspicion.lost(("c", number), crowd[:1], 0)
    assert len(suspicion._suspects) == MAX_SUSPECTS
    assert len(suspicion._lost) == MAX_LOSSES


def test_the_return_of_a_worker_clears_a_prompt_that_was_on_it_at_two_stages() -> None:
    suspicion, prompt = Suspicion(MEMORY_NS), b"i3"
    suspicion.lost(("w", 1), [held(prompt, WorkStage.TOKENS, 0)], 0)
    suspicion.lost(("w", 2), [held(prompt, WorkStage.TOKENS, 0), held(prompt, WorkStage.PROMPT, 0)], 0)
    assert suspicion.is_accused(prompt)
    suspicion.returned(("w", 2))
    assert not suspicion.is_accused(prompt)
    assert suspicion.died(("w", 1), 0) == set()


class AnyOrder(RuleBasedStateMachine):
    """Losses, returns and progress of a few prompts on a few workers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.suspicion = Suspicion(MEMORY_NS)
        self.now_ns = 0
        self.exposed: dict[Prompt, set[Worker]] = {}
        """The workers that each prompt may have killed, and that have not returned."""
        self.on: dict[Prompt, set[Worker]] = {}
        self.found: set[Prompt] = set()
        self.incarnations = 0
        self.workers: list[Worker] = []

    @rule(on_it=st.lists(company, max_size=5), dies=st.booleans())
    def lose(self, on_it: list[HeldChoice], dies: bool) -> None:
        self.incarnations += 1
        worker = ("w", self.incarnations)
        self.workers.append(worker)
        for each in on_it:
            self.on.setdefault(each.prompt, set()).add(worker)
            if each.exposed:
                self.exposed.setdefault(each.prompt, set()).add(worker)
        self.suspicion.lost(worker, on_it, self.now_ns)
        if dies:
            self.take(self.suspicion.died(worker, self.now_ns))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), dead=st.booleans())
    def hear(self, data: st.DataObject, dead: bool) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if dead:
            self.take(self.suspicion.died(worker, self.now_ns))
            return
        self.suspicion.returned(worker)
        for places in (self.on, self.exposed):
            for each in places.values():
                each.discard(worker)

    @rule(prompt=innocents, stage=stages)
    def get_past(self, prompt: Prompt, stage: WorkStage) -> None:
        self.suspicion.passed(prompt, stage)

    @rule(seconds=st.integers(0, 700))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND_NS
        self.take(self.suspicion.overdue(self.now_ns))

    def take(self, found: set[Prompt]) -> None:
        for prompt in found:
            assert len(self.on.get(prompt, ())) >= 2, "it was on two workers that are gone"
            assert self.exposed.get(prompt), "of one of which it was new, at least"
            assert not self.suspicion.is_accused(prompt)
        self.found |= found

    @invariant()
    def only_what_was_found_is_refused(self) -> None:
        for number in range(8):
            prompt = b"i%d" % number
            if self.suspicion.is_poison(prompt, self.now_ns):
                assert prompt in self.found
            if self.suspicion.is_accused(prompt):
                assert len(self.on[prompt]) >= 2


TestAnyOrder = AnyOrder.TestCase
