"""Which split of roles presses least, and when workers move."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.planner.assigning import CALM_NS, PRESSES, REST_NS, Assigned, Code, Memory, Standing, assign
from libs.policy.planner.capacity import Engine, Work, ride, split, splits
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel

MS = 1_000_000
MODEL = StepTimeModel(8e6, 6e4, 0.4, 15e6, 3e4, 25.0, interference=1.0)
ENGINE = Engine(MODEL, chunk_tokens=2048, max_sequences=256, kv_tokens=400_000)
QUIET = Work(0.0, 0, 0, 50 * MS)

works = st.builds(
    lambda prompts, decodes, context: Work(prompts, decodes, decodes * context, 50 * MS),
    st.floats(0, 30),
    st.integers(0, 2000),
    st.integers(1, 8000),
)
engines = st.builds(lambda each: replace(ENGINE, step_time=replace(MODEL, interference=each)), st.floats(0, 1))


def pool(prefill: int, mixed: int, budget_tokens: int = 2048) -> list[Standing]:
    return [Standing(f"p{index}", Role.PREFILL, 0, True, index, 0) for index in range(prefill)] + [
        Standing(f"m{index}", Role.MIXED, budget_tokens, True, 0, index) for index in range(mixed)
    ]


def after(workers: list[Standing], assigned: Assigned) -> list[Standing]:
    told = {each.worker_id: each for each in assigned.changes}
    return [
        replace(each, role=told[each.id].role, budget_tokens=told[each.id].budget_tokens) if each.id in told else each
        for each in workers
    ]


def counts(workers: list[Standing], assigned: Assigned) -> tuple[int, int]:
    roles = {each.id: each.role for each in workers} | {each.worker_id: each.role for each in assigned.changes}
    found = list(roles.values())
    return found.count(Role.PREFILL), found.count(Role.MIXED)


@given(engines, works, st.integers(1, 16))
def test_a_mixed_worker_computes_prompts_at_most_as_fast_as_one_that_does_nothing_else(
    engine: Engine, work: Work, mixed: int
) -> None:
    assert 0 <= ride(engine, work, mixed) <= 1
    assert ride(engine, replace(work, decodes=0, kv_tokens=0), mixed) == 1


@given(works, st.integers(1, 16))
def test_more_decodes_leave_no_more_to_prompts(work: Work, mixed: int) -> None:
    more = replace(work, decodes=work.decodes * 2 + 1, kv_tokens=work.kv_tokens * 2 + 100)
    assert ride(ENGINE, more, mixed) <= ride(ENGINE, work, mixed) + 1e-9


@given(engines, works, st.integers(1, 8), st.integers(1, 8))
def test_a_worker_more_never_presses_more(engine: Engine, work: Work, prefill: int, mixed: int) -> None:
    here = split(engine, work, prefill, mixed)
    assert split(engine, work, prefill + 1, mixed).pressure <= here.pressure + 1e-9
    assert split(engine, work, prefill, mixed + 1).decode_pressure <= here.decode_pressure + 1e-9


@given(engines, works, st.integers(1, 6), st.integers(1, 6))
def test_a_decision_leaves_every_worker_a_role_and_less_pressure(
    engine: Engine, work: Work, prefill: int, mixed: int
) -> None:
    workers = pool(prefill, mixed)
    assigned = assign(engine, work, workers, Memory(), 10 * REST_NS)
    found = counts(workers, assigned)
    assert sum(found) == prefill + mixed and min(found) >= 1
    assert found == (assigned.then.prefill, assigned.then.mixed)
    if found != (prefill, mixed):
        assert assigned.now.cost >= PRESSES and assigned.then.cost < assigned.now.cost
        assert assigned.code in (Code.PROMPTS_PRESS, Code.DECODES_PRESS)


@given(engines, works, st.integers(1, 6), st.integers(1, 6))
def test_what_was_decided_is_decided_only_once(engine: Engine, work: Work, prefill: int, mixed: int) -> None:
    """The same work, asked about again once workers have moved and rested, moves nobody back or on."""
    workers = pool(prefill, mixed)
    first = assign(engine, work, workers, Memory(), 10 * REST_NS)
    moved = after(workers, first)
    second = assign(engine, work, moved, first.memory, 12 * REST_NS)
    assert counts(moved, second) == counts(moved, first) == counts(workers, first)


@given(works, st.floats(-0.05, 0.05))
def test_a_load_that_dithers_moves_nobody_who_has_just_been_placed(work: Work, by: float) -> None:
    workers = pool(4, 4)
    first = assign(ENGINE, work, workers, Memory(), 10 * REST_NS)
    moved = after(workers, first)
    other = replace(
        work,
        prompts=work.prompts * (1 + by),
        decodes=round(work.decodes * (1 - by)),
        kv_tokens=round(work.kv_tokens * (1 - by)),
    )
    if counts(workers, first) != (4, 4):
        assert counts(moved, assign(ENGINE, other, moved, first.memory, 12 * REST_NS)) == counts(workers, first)


def test_prompts_that_press_raise_budgets_before_any_role_changes() -> None:
    work = Work(prompts=1.5, decodes=20, kv_tokens=40_000, tpot_ns=50 * MS)
    assigned = assign(ENGINE, work, pool(2, 6, budget_tokens=0), Memory(), 10 * REST_NS)
    assert {(each.role, each.budget_tokens) for each in assigned.changes} == {(Role.MIXED, 2048)}
    assert len(assigned.changes) == 6 and assigned.code is Code.PROMPTS_PRESS


def test_budgets_fall_after_a_calm_and_an_idle_suite_stays_as_it_was_started() -> None:
    workers = pool(2, 2)
    first = assign(ENGINE, QUIET, workers, Memory(), REST_NS)
    assert not first.changes
    later = assign(ENGINE, QUIET, workers, first.memory, REST_NS + CALM_NS)
    assert {(each.role, each.budget_tokens) for each in later.changes} == {(Role.MIXED, 0)}
    assert later.code is Code.CALM
    assert not assign(ENGINE, QUIET, pool(2, 2, budget_tokens=0), Memory(), REST_NS).changes


def test_a_flood_moves_several_at_once_and_those_rest() -> None:
    flood = Work(prompts=6.0, decodes=60, kv_tokens=60_000, tpot_ns=50 * MS)
    workers = pool(1, 7)
    assigned = assign(ENGINE, flood, workers, Memory(), 10 * REST_NS)
    moved = [each for each in assigned.changes if each.role is Role.PREFILL]
    assert len(moved) >= 3
    assert [each.worker_id for each in moved] == [f"m{index}" for index in range(len(moved))], "the emptiest go"
    assert set(assigned.memory.moved_ns) == {each.worker_id for each in moved}


@pytest.mark.parametrize(
    "workers", [[], pool(1, 0), pool(3, 0), pool(0, 1), [replace(each, movable=False) for each in pool(2, 2)]]
)
def test_where_there_is_nothing_to_split_nothing_changes(workers: list[Standing]) -> None:
    flood = Work(prompts=60.0, decodes=600, kv_tokens=600_000, tpot_ns=50 * MS)
    assert not assign(ENGINE, flood, workers, Memory(), REST_NS).changes


def test_all_splits_are_weighed() -> None:
    assert [(each.prefill, each.mixed) for each in splits(ENGINE, QUIET, 4)] == [(1, 3), (2, 2), (3, 1)]
