"""Properties of the split of roles with the least pressure, and of when workers move."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy import pressure as step_times
from libs.policy.planner.limits import MOST_BUSY, DecodePace, ModelLimits, splits
from libs.policy.planner.role_planning import (
    CALM_NS,
    DECODES_PRESS,
    PROMPTS_PRESS,
    Memory,
    PlannedWorker,
    RolePlan,
    RoleReason,
    assign,
)
from libs.policy.pressure import LINK_FULL, WorkerProfile, Workload, most_decodes, most_prefill_by_link, ride, split
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import IN_HAND, largest_batch

MS = 1_000_000
TURN_NS = 1_000 * MS
MODEL = StepTimeModel(8e6, 6e4, 0.4, 15e6, 3e4, 25.0, interference=1.0)
ENGINE = WorkerProfile(MODEL, chunk_tokens=2048, max_sequences=256, kv_tokens=400_000)
QUIET = Workload(0.0, 0, 0, 50 * MS)

works = st.builds(
    lambda prompts, decodes, context: Workload(prompts, decodes, decodes * context, 50 * MS),
    st.floats(0, 30),
    st.integers(0, 2000),
    st.integers(1, 8000),
)
shares = st.integers(0, 100).map(lambda each: each / 100)
engines = st.builds(lambda each: replace(ENGINE, step_time=replace(MODEL, interference=each)), shares)


def pool(prefill: int, mixed: int, budget_tokens: int = 2048) -> list[PlannedWorker]:
    return [PlannedWorker(f"p{index}", Role.PREFILL, 0, True, index, 0) for index in range(prefill)] + [
        PlannedWorker(f"m{index}", Role.MIXED, budget_tokens, True, 0, index) for index in range(mixed)
    ]


def after(workers: list[PlannedWorker], assigned: RolePlan) -> list[PlannedWorker]:
    reported = {each.worker_id: each for each in assigned.changes}
    return [
        each._replace(role=reported[each.id].role, budget_tokens=reported[each.id].budget_tokens)
        if each.id in reported
        else each
        for each in workers
    ]


def counts(workers: list[PlannedWorker], assigned: RolePlan) -> tuple[int, int]:
    roles = {each.id: each.role for each in workers} | {each.worker_id: each.role for each in assigned.changes}
    found = list(roles.values())
    return found.count(Role.PREFILL), found.count(Role.MIXED)


@given(engines, works, st.integers(1, 16))
def test_a_mixed_worker_computes_prompts_at_most_as_fast_as_one_that_does_nothing_else(
    engine: WorkerProfile, work: Workload, mixed: int
) -> None:
    assert 0 <= ride(engine, work, mixed) <= 1
    assert ride(engine, replace(work, decodes=0, kv_tokens=0), mixed) == 1


@given(works, st.integers(1, 16))
def test_more_decodes_leave_no_more_time_for_prompts(work: Workload, mixed: int) -> None:
    more = replace(work, decodes=work.decodes * 2 + 1, kv_tokens=work.kv_tokens * 2 + 100)
    assert ride(ENGINE, more, mixed) <= ride(ENGINE, work, mixed) + 1e-9


@given(engines, works, st.integers(1, 8), st.integers(1, 8))
def test_one_worker_more_never_raises_the_pressure(
    engine: WorkerProfile, work: Workload, prefill: int, mixed: int
) -> None:
    here = split(engine, work, prefill, mixed)
    assert split(engine, work, prefill + 1, mixed).pressure <= here.pressure + 1e-9
    assert split(engine, work, prefill, mixed + 1).decode_pressure <= here.decode_pressure + 1e-9


@given(engines, works, st.integers(1, 6), st.integers(1, 6))
def test_a_decision_gives_every_worker_a_role_and_lowers_the_pressure(
    engine: WorkerProfile, work: Workload, prefill: int, mixed: int
) -> None:
    workers = pool(prefill, mixed)
    assigned = assign(engine, work, workers, Memory(), 10 * TURN_NS)
    found = counts(workers, assigned)
    assert sum(found) == prefill + mixed and min(found) >= 1
    assert found == (assigned.then.prefill, assigned.then.mixed)
    if found != (prefill, mixed):
        now = assigned.now
        assert now.prompt_pressure >= PROMPTS_PRESS or now.decode_pressure >= DECODES_PRESS
        assert assigned.then.cost < now.cost
        assert assigned.code in (RoleReason.PROMPTS_PRESS, RoleReason.DECODES_PRESS)


def rides(workers: list[PlannedWorker]) -> bool:
    return any(each.budget_tokens for each in workers if each.role is Role.MIXED)


def at_rest(
    engine: WorkerProfile, work: Workload, workers: list[PlannedWorker]
) -> tuple[Workload, list[PlannedWorker], Memory]:
    """Decide about the same load repeatedly, with decodes at the decided pace, until no worker moves. Budgets may
    still change once prompts have been calm, so rest means a longer time without a change.
    """
    memory, changed = Memory(), 10
    for turn in range(10, 100, 2):
        assigned = assign(engine, work, workers, memory, turn * TURN_NS)
        now, then, memory = (
            counts(workers, replace(assigned, moves=(), budgets=())),
            counts(workers, assigned),
            assigned.memory,
        )
        pace = DecodePace.of(engine, work, *now, rides=rides(workers))
        workers = after(workers, assigned)
        decodes, kv_tokens = pace.decodes_in(*map(float, then), rides=rides(workers))
        work = replace(work, decodes=round(decodes), kv_tokens=round(kv_tokens))
        changed = turn if assigned.changes else changed
        if (turn - changed) * TURN_NS > CALM_NS:
            return work, workers, memory
    raise AssertionError("roles never come to rest")


@given(engines, works, st.integers(1, 6), st.integers(1, 6))
def test_under_a_nearly_constant_load_decisions_settle(
    engine: WorkerProfile, work: Workload, prefill: int, mixed: int
) -> None:
    settled, workers, memory = at_rest(engine, work, pool(prefill, mixed))
    assert not assign(engine, settled, workers, memory, 110 * TURN_NS).moves


@given(works, st.floats(-0.05, 0.05))
def test_an_oscillating_load_moves_no_worker_back_and_forth(work: Workload, by: float) -> None:
    """Workers may follow those that moved, as decodes make room for them; none moves back."""
    settled, workers, memory = at_rest(ENGINE, work, pool(4, 4))
    other = replace(
        settled,
        prompts=settled.prompts * (1 + by),
        decodes=round(settled.decodes * (1 - by)),
        kv_tokens=round(settled.kv_tokens * (1 - by)),
    )
    moved = Counter[str]()
    for turn in range(110, 126, 2):
        assigned = assign(ENGINE, other if turn % 4 else settled, workers, memory, turn * TURN_NS)
        workers, memory = after(workers, assigned), assigned.memory
        moved.update(change.worker_id for change in assigned.moves)
    assert not moved or max(moved.values()) == 1, moved


def test_prompt_pressure_raises_budgets_before_any_role_changes() -> None:
    work = Workload(prompts=1.5, decodes=20, kv_tokens=40_000, tpot_ns=50 * MS)
    assigned = assign(ENGINE, work, pool(2, 6, budget_tokens=0), Memory(), 10 * TURN_NS)
    assert {(each.role, each.budget_tokens) for each in assigned.changes} == {(Role.MIXED, 2048)}
    assert len(assigned.changes) == 6 and assigned.code is RoleReason.PROMPTS_PRESS


def test_decodes_with_room_move_no_worker_and_those_about_to_lack_it_do() -> None:
    full = round(most_decodes(ENGINE, 50 * MS, 200)) * 2
    for share, moves in ((0.75, False), (0.95, True)):
        decodes = round(full * share)
        work = Workload(0.3, decodes, decodes * 200, 50 * MS)
        assert bool(assign(ENGINE, work, pool(6, 2), Memory(), 10 * TURN_NS).moves) is moves


def test_budgets_fall_after_a_calm_period_and_an_idle_suite_stays_as_started() -> None:
    workers = pool(2, 2)
    first = assign(ENGINE, QUIET, workers, Memory(), TURN_NS)
    assert not first.changes
    later = assign(ENGINE, QUIET, workers, first.memory, TURN_NS + CALM_NS)
    assert {(each.role, each.budget_tokens) for each in later.changes} == {(Role.MIXED, 0)}
    assert later.code is RoleReason.CALM
    assert not assign(ENGINE, QUIET, pool(2, 2, budget_tokens=0), Memory(), TURN_NS).changes


def test_a_flood_moves_several_workers_at_once_and_those_then_rest() -> None:
    flood = Workload(prompts=6.0, decodes=60, kv_tokens=60_000, tpot_ns=50 * MS)
    workers = pool(1, 7)
    assigned = assign(ENGINE, flood, workers, Memory(), 10 * TURN_NS)
    moved = [each for each in assigned.changes if each.role is Role.PREFILL]
    assert len(moved) >= 3
    assert [each.worker_id for each in moved] == [f"m{index}" for index in range(len(moved))], "the emptiest go"
    assert set(assigned.memory.paid_ns) == {each.worker_id for each in moved}


@pytest.mark.parametrize(
    "workers", [[], pool(1, 0), pool(3, 0), pool(0, 1), [each._replace(movable=False) for each in pool(2, 2)]]
)
def test_workers_that_cannot_be_split_do_not_change(workers: list[PlannedWorker]) -> None:
    flood = Workload(prompts=60.0, decodes=600, kv_tokens=600_000, tpot_ns=50 * MS)
    assert not assign(ENGINE, flood, workers, Memory(), TURN_NS).changes


@given(engines, works, st.integers(2, 300), st.integers(0, 40), st.integers(1, 40))
def test_allowed_splits_are_ordered_by_least_pressure(
    engine: WorkerProfile, work: Workload, workers: int, prefill_min: int, decode_min: int
) -> None:
    limits = ModelLimits(prefill_min=prefill_min, decode_min=decode_min)
    every = [
        split(engine, work, prefill, workers - prefill)
        for prefill in range(max(prefill_min, 1), workers - decode_min + 1)
    ]
    weighed = splits(engine, work, workers, limits)
    assert weighed.first(workers) == sorted(every, key=lambda each: each.cost)
    assert weighed.best == min(every, key=lambda each: each.cost, default=None)
    assert [weighed.of(each.prefill) for each in every] == every
    assert weighed.least_pressure() == min((each.pressure for each in every), default=inf)


@given(engines, works, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_decodes_of_many_splits_equal_those_of_each(
    engine: WorkerProfile, work: Workload, prefill: int, mixed: int, rides: bool
) -> None:
    pace = DecodePace.of(engine, work, prefill, mixed, rides=rides)
    here, there = np.arange(12.0), 13.0 - np.arange(12.0)
    decodes, kv_tokens = pace.decodes_in(here, there, rides=rides)
    each = [pace.decodes_in(float(here[at]), float(there[at]), rides=rides) for at in range(12)]
    assert list(zip(decodes.tolist(), kv_tokens.tolist(), strict=True)) == each


terms = st.one_of(st.just(0.0), st.floats(1e-3, 2e6))
sizes = st.sampled_from([0, 1, 64, 150, 512])
models = st.builds(
    StepTimeModel, terms, terms, terms, terms, terms, terms, shares, terms, terms, sizes, terms, sizes, terms
)  # fmt: skip


@given(models, st.integers(0, 30_000), st.integers(0, 3000), st.floats(0, 1e8))
def test_step_times_of_many_equal_those_of_each(
    model: StepTimeModel, tokens: int, sequences: int, step_ns: float
) -> None:
    reads, decodes = model.hiding_ns(sequences), model.decode_ns(StepWork(0, 0, 0, sequences, 9 * sequences))
    chunk = model.beside_ns(tokens, tokens * tokens)
    forms: tuple[Callable[[float], Any], ...] = (float, lambda number: np.array([number]))
    for one in forms:
        read, alone, computed = one(reads), one(decodes), one(chunk)
        assert step_times.reading_ns(model, one(sequences)) == model.reading_ns(sequences)
        assert step_times.sequences_ns(model, one(sequences)) == model.sequences_ns(sequences)
        assert step_times.hiding_ns(model, one(sequences)) == reads
        assert step_times.chunk_ns(model, one(tokens)) == chunk
        assert step_times.mixed_ns(model, computed, alone, read) == model.mixed_ns(chunk, decodes, reads)
        assert step_times.most_prefill_ns(model, step_ns, alone, read) == model.most_prefill_ns(step_ns, decodes, reads)


@given(models, st.integers(0, 10**8), st.integers(1, 30_000), st.integers(1, 300))
def test_the_most_decodes_are_the_largest_batch(model: StepTimeModel, tpot_ns: int, context: int, most: int) -> None:
    engine = WorkerProfile(model, 2048, most, 0)
    expected = max(largest_batch(model, tpot_ns * (1 - IN_HAND), context, most), 1) if tpot_ns else most
    assert most_decodes(engine, tpot_ns, context) == expected
    assert most_decodes(engine, tpot_ns, np.array([float(context)])) == [expected]


def test_if_prompts_and_decodes_add_up_long_prompts_stay_off_decode_workers() -> None:
    """Prompts beside decodes make each step as long as TPOT allows. Three times the decodes then run at once, with
    their KV, and take workers from the prompts."""
    work = Workload(prompts=40.0, decodes=180, kv_tokens=3_300_000, tpot_ns=50 * MS)
    assigned = assign(ENGINE, work, pool(6, 10), Memory(), 10 * TURN_NS)
    assert assigned.memory.apart.on
    assert {each.budget_tokens for each in assigned.changes} == {0}


def test_if_prompts_hide_behind_decodes_they_run_beside_them() -> None:
    hides = replace(ENGINE, step_time=replace(MODEL, interference=0.05))
    work = Workload(prompts=40.0, decodes=180, kv_tokens=2_500_000, tpot_ns=50 * MS)
    assert not assign(hides, work, pool(6, 10), Memory(), 10 * TURN_NS).memory.apart.on


@given(engines, works, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_at_the_pace_of_the_present_split_its_decodes_stay_about_equal(
    engine: WorkerProfile, work: Workload, prefill: int, mixed: int, rides: bool
) -> None:
    pace = DecodePace.of(engine, work, prefill, mixed, rides=rides)
    decodes, _ = pace.decodes_in(float(prefill), float(mixed), rides=rides)
    busy = work.decodes / mixed * (MODEL.decode_sequence_ns + MODEL.decode_kv_token_ns * 8000)
    if busy < MODEL.decode_fixed_ns:  # well below where a pace sets in that is none
        assert decodes == pytest.approx(work.decodes, rel=0.05, abs=1)


WIDE = replace(ENGINE, step_time=replace(MODEL, saturating_sequences=144, decode_wide_ns=3e4), max_sequences=1024)


@given(st.integers(50, 1500), st.integers(1, 8), st.integers(1, 8))
def test_the_batch_of_another_split_settles_on_its_own_side_of_the_one_that_saturates(
    decodes: int, now: int, then: int
) -> None:
    work = Workload(0.0, decodes, decodes * 600, 500 * MS)
    pace, model = DecodePace.of(WIDE, work, 0, now, rides=False), WIDE.step_time
    each_ns = model.decode_sequence_ns + model.decode_wide_ns + 600 * model.decode_kv_token_ns
    if pace.tokens_per_ns / then * each_ns > MOST_BUSY - 0.05:
        return  # more than a pace counts on

    def step_ns(count: float) -> float:
        return step_times.decode_step_ns(WIDE, count, 600 * count, float(then))

    settled = float(decodes)
    for _ in range(2_000):
        settled = pace.tokens_per_ns * step_ns(settled)
        if not decodes / 3 < settled < 3 * decodes:
            return  # beyond what a pace says of another split
    found, _ = pace.decodes_in(0.0, float(then), rides=False)
    assert found == pytest.approx(settled, rel=0.01, abs=1)


def with_links(share: float) -> WorkerProfile:
    """Return a profile of which one busy prefill worker fills a decode worker's link by this share."""
    return replace(ENGINE, kv_token_ns=share / ENGINE.chunk_speed)


@given(st.floats(0, 30), st.integers(2, 16), st.floats(0.01, 3))
def test_the_maximum_of_prefill_workers_is_that_whose_kv_the_other_links_can_receive(
    prompts: float, workers: int, share: float
) -> None:
    most = most_prefill_by_link(with_links(share), prompts, workers)
    for prefill in range(1, workers):
        used = min(prefill, prompts) * share / (workers - prefill)
        if abs(prefill - most) > 1e-6:
            assert (used <= LINK_FULL) is (prefill < most)


def test_links_of_unknown_speed_bound_nothing() -> None:
    assert most_prefill_by_link(ENGINE, 1_000.0, 8) == 8


def settled_roles(engine: WorkerProfile, work: Workload, prefill: int, mixed: int) -> tuple[int, int]:
    workers, memory = pool(prefill, mixed, 0), Memory()
    for turn in range(10, 30):
        assigned = assign(engine, work, workers, memory, turn * TURN_NS)
        workers, memory = after(workers, assigned), assigned.memory
    roles = [each.role for each in workers]
    return roles.count(Role.PREFILL), roles.count(Role.MIXED)


def test_a_flood_of_prompts_leaves_enough_decode_workers_to_receive_their_kv() -> None:
    flood = Workload(40.0, 4, 28_000, 50 * MS)
    assert settled_roles(ENGINE, flood, 1, 4) == (4, 1)
    assert settled_roles(with_links(0.3), flood, 1, 4) == (3, 2)
    assert settled_roles(with_links(0.5), flood, 1, 4) == (2, 3)


def test_roles_whose_links_are_too_full_stay_while_nothing_else_is_under_pressure() -> None:
    assert settled_roles(with_links(0.5), Workload(2.0, 4, 28_000, 50 * MS), 4, 1) == (4, 1)
