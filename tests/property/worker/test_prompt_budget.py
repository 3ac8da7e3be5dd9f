"""Properties of the prompt tokens that a step may compute, by role and by earlier prompts."""

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.roles import Assignment, Role
from libs.policy.worker.credits import WHOLE_CHUNK_TOKENS, SlotFacts, engine_budget, role_budget, slots

FACTS = SlotFacts(max_sequences=32, prompt_tokens=5000.0, chunk_tokens=512, step_s=0.1)


@dataclass(frozen=True)
class Taken:
    budget_tokens: int
    awaits_prompt: bool = True
    yields: bool = False


budgets = st.integers(0, 10_000)
taken = st.lists(st.builds(Taken, budgets, st.booleans(), st.booleans()), max_size=8)


def test_each_role_has_its_slots_and_its_budget() -> None:
    found = {
        (role, budget): (role_budget(Assignment("m", role, budget, 1)), slots(role, FACTS))
        for role, budget in ((Role.PREFILL, 0), (Role.MIXED, 0), (Role.MIXED, 64), (Role.STANDBY, 0))
    }
    assert found == {
        (Role.PREFILL, 0): (WHOLE_CHUNK_TOKENS, (4, 0)),
        (Role.MIXED, 0): (0, (0, 32)),
        (Role.MIXED, 64): (64, (0, 32)),
        (Role.STANDBY, 0): (0, (0, 0)),
    }


@given(budgets, taken)
def test_a_prompt_is_computed_at_least_at_the_pace_of_its_acceptance(own_tokens: int, before: list[Taken]) -> None:
    budget = engine_budget(own_tokens, before)
    awaited = [each for each in before if each.awaits_prompt]
    assert all(budget >= each.budget_tokens for each in awaited if not each.yields)
    assert budget in {own_tokens, *(each.budget_tokens for each in awaited)}
    assert budget >= own_tokens
    assert engine_budget(own_tokens, []) == own_tokens


@given(st.integers(1, 10_000), budgets)
def test_a_yielding_prompt_is_waited_for_only_if_it_would_otherwise_never_be_computed(
    own_tokens: int, was: int
) -> None:
    prompt = Taken(was, yields=True)
    assert engine_budget(own_tokens, [prompt]) == own_tokens
    assert engine_budget(0, [prompt]) == was
    assert engine_budget(0, [replace(prompt, awaits_prompt=False)]) == 0
