"""Properties of how many workers a starting queue moves, and how often roles turn back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.planner.due import UsualWork
from libs.policy.planner.limits import EVERY, ModelLimits
from libs.policy.planner.role_planning import (
    BURST_NS,
    DECODES_PRESS,
    FAR_MORE,
    GAIN,
    PROMPTS_PRESS,
    Memory,
    RolePlan,
    assign,
)
from libs.policy.planner.turns import (
    BACK_OFF,
    CALLED_NS,
    MOST_CALLED_NS,
    MOST_HELD_NS,
    MOST_SHARE,
    OTHER_WORK,
    TURN_HELD_NS,
    TURN_NS,
    Apart,
    RoleTurn,
)
from libs.policy.pressure import WorkerProfile, Workload
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel
from tests.property.planner.test_capacity import ENGINE, MODEL, MS, after, pool, works

START_NS = 10**12
PROMPTS = Workload(prompts=6.0, decodes=60, kv_tokens=60_000, tpot_ns=50 * MS)
DECODES = Workload(prompts=0.3, decodes=600, kv_tokens=1_400_000, tpot_ns=50 * MS)
BURST = Workload(prompts=4.4, decodes=100, kv_tokens=500_000, tpot_ns=50 * MS)
MORE_DECODES = replace(PROMPTS, prompts=3.5, decodes=110, kv_tokens=1_100_000)
# Llama-3.1-70B on four H100 at 0.08 of its speed, as `make bench-operator` draws it.
SLOW = WorkerProfile(
    StepTimeModel(98.3e6, 872_406.0, 11.67, 215e6, 307_185.0, 430.0, interference=0.3),
    chunk_tokens=512,
    max_sequences=32,
    kv_tokens=60_000,
)


@given(works, st.integers(1, 4), st.integers(1, 4))
def test_fewer_moves_would_have_left_pressure(work: Workload, prefill: int, mixed: int) -> None:
    plan = assign(ENGINE, work, pool(prefill, mixed), Memory(), START_NS)
    first, last = sorted((plan.now.mixed, plan.then.mixed))
    for each in plan.candidates:  # all splits, of so few workers
        if first < each.mixed < last and each.cost <= plan.now.cost * (1 - GAIN):
            quiet = each.prompt_pressure <= PROMPTS_PRESS * (1 - GAIN)
            assert not (quiet and each.decode_pressure <= DECODES_PRESS * (1 - GAIN))


def test_a_starting_prompt_queue_leaves_decode_the_workers_for_its_answers() -> None:
    work = Workload(3.73, 16, 4_072, 310 * MS, waiting_ns=3.18e9)
    plan = assign(SLOW, work, pool(2, 6, budget_tokens=512), Memory(), START_NS)
    assert [each.role for each in plan.moves] == [Role.PREFILL] * 3


def test_starting_decode_pressure_takes_one_worker_if_one_suffices() -> None:
    work = Workload(0.52, 110, 12_544, 310 * MS)
    plan = assign(SLOW, work, pool(4, 4, budget_tokens=512), Memory(), START_NS)
    assert [each.role for each in plan.moves] == [Role.MIXED]


class _Roles:
    """Workers of a model that take the decided roles."""

    def __init__(self) -> None:
        self.workers = pool(6, 2)
        self.memory = Memory()

    def decide(self, work: Workload, at_ns: int, limits: ModelLimits = EVERY) -> RolePlan:
        plan = assign(ENGINE, work, self.workers, self.memory, at_ns, limits=limits)
        self.workers, self.memory = after(self.workers, plan), plan.memory
        return plan

    def turn_back(self) -> int:
        """Go to mixed and back to prefill, and return the time of that."""
        assert {each.role for each in self.decide(DECODES, START_NS).moves} == {Role.MIXED}
        back_ns = START_NS + TURN_NS // 4
        assert {each.role for each in self.decide_lastingly(PROMPTS, back_ns).moves} == {Role.PREFILL}
        return back_ns

    def decide_lastingly(self, work: Workload, at_ns: int) -> RolePlan:
        """Decide about work that has been there for as long as a reversal takes."""
        assert not self.decide(work, at_ns - TURN_HELD_NS).moves
        return self.decide(work, at_ns)


def test_roles_that_turned_back_turn_again_after_ten_seconds_and_no_sooner() -> None:
    roles = _Roles()
    back_ns = roles.turn_back()
    early = roles.decide(MORE_DECODES, back_ns + TURN_NS - 1)
    assert not early.moves
    assert {each.role for each in roles.decide(MORE_DECODES, back_ns + TURN_NS).moves} == {Role.MIXED}


def test_roles_turn_back_at_once_if_the_work_has_changed() -> None:
    roles = _Roles()
    back_ns = roles.turn_back()
    twice = replace(MORE_DECODES, decodes=2 * PROMPTS.decodes)
    assert {each.role for each in roles.decide_lastingly(twice, back_ns + TURN_NS // 4).moves} == {Role.MIXED}


def test_roles_turn_back_to_no_prefill_if_the_work_exceeds_every_split() -> None:
    roles = _Roles()
    assert {each.role for each in roles.decide(DECODES, START_NS).moves} == {Role.MIXED}
    flood = replace(DECODES, prompts=60.0, decodes=300, kv_tokens=700_000)
    for number in range(1, 10):
        plan = roles.decide(flood, START_NS + number * TURN_HELD_NS)
        assert Role.PREFILL not in {each.role for each in plan.moves}
    plan = roles.decide(flood, START_NS + TURN_NS)
    assert {each.role for each in plan.moves} == {Role.PREFILL}


def test_a_need_shorter_than_a_second_turns_no_roles_back() -> None:
    roles = _Roles()
    assert {each.role for each in roles.decide(DECODES, START_NS).moves} == {Role.MIXED}
    for number in range(1, 8):
        at_ns = START_NS + number * TURN_HELD_NS
        assert not roles.decide(PROMPTS, at_ns).moves
        assert not roles.decide(replace(PROMPTS, prompts=0.1), at_ns + TURN_HELD_NS // 2).moves


@given(works, st.integers(1, 4), st.integers(1, 4))
def test_at_most_half_of_the_workers_of_a_role_leave_it_within_a_second(
    work: Workload, prefill: int, mixed: int
) -> None:
    workers = pool(prefill, mixed)
    plan = assign(ENGINE, work, workers, Memory(), START_NS)
    left = {each.role for each in plan.moves}
    there = mixed if left == {Role.PREFILL} else prefill
    assert len(plan.moves) <= max(there * MOST_SHARE, 1)
    if plan.moves:
        soon = assign(ENGINE, work, after(workers, plan), plan.memory, START_NS + TURN_HELD_NS - 1)
        assert not {each.role for each in soon.moves} & left


def test_limits_are_met_even_if_roles_turned_back_lately() -> None:
    roles = _Roles()
    back_ns = roles.turn_back()
    plan = roles.decide(PROMPTS, back_ns + TURN_NS // 4, ModelLimits(decode_min=4))
    assert {each.role for each in plan.moves} == {Role.MIXED}


def test_lent_budgets_are_not_withdrawn_for_ten_seconds() -> None:
    work = Workload(prompts=40.0, decodes=180, kv_tokens=3_300_000, tpot_ns=50 * MS)
    queue = replace(work, prompts=4.0, kv_tokens=300_000)
    lent = assign(ENGINE, queue, pool(6, 10, budget_tokens=0), Memory(), START_NS)
    assert {each.budget_tokens for each in lent.budgets} == {ENGINE.chunk_tokens}
    early = assign(ENGINE, work, pool(6, 10), lent.memory, START_NS + TURN_NS - TURN_HELD_NS)
    assert not early.memory.apart.on
    assert assign(ENGINE, work, pool(6, 10), early.memory, START_NS + TURN_NS).memory.apart.on


def test_decodes_separated_from_prompts_stay_separate_for_ten_seconds() -> None:
    """A pressure about as great either way would lend and take back budgets several times a second."""
    workers, work = pool(6, 10), Workload(prompts=40.0, decodes=180, kv_tokens=2_500_000, tpot_ns=50 * MS)
    full = replace(work, kv_tokens=3_300_000)
    first = assign(ENGINE, full, workers, Memory(), START_NS)
    assert first.memory.apart.on
    hides = replace(ENGINE, step_time=replace(MODEL, interference=0.05))
    early = assign(hides, work, workers, first.memory, START_NS + TURN_NS - TURN_HELD_NS)
    assert early.memory.apart.on
    assert not assign(hides, work, workers, early.memory, START_NS + TURN_NS).memory.apart.on


@given(works, st.integers(1, 4), st.integers(1, 4))
def test_prompts_create_decode_pressure_at_once_only_if_their_own_is_far_higher(
    work: Workload, prefill: int, mixed: int
) -> None:
    plan = assign(ENGINE, work, pool(prefill, mixed), Memory(), START_NS)
    if plan.then.mixed < mixed and plan.then.decode_pressure > DECODES_PRESS * (1 - GAIN):
        assert plan.now.prompt_pressure >= FAR_MORE * plan.then.decode_pressure


def test_lasting_prompt_pressure_takes_a_decode_worker_even_if_decodes_need_it() -> None:
    roles = _Roles()
    roles.workers = pool(3, 3)
    assert not roles.decide(BURST, START_NS).moves
    assert not roles.decide(BURST, START_NS + BURST_NS - 1).moves
    assert {each.role for each in roles.decide(BURST, START_NS + BURST_NS).moves} == {Role.PREFILL}


def test_ten_seconds_of_prompt_pressure_return_a_worker_that_decodes_have_just_taken() -> None:
    roles = _Roles()
    assert {each.role for each in roles.decide(DECODES, START_NS).moves} == {Role.MIXED}
    began_ns = START_NS + TURN_NS
    assert not roles.decide(BURST, began_ns).moves
    assert not roles.decide(BURST, began_ns + TURN_NS - 1).moves
    assert {each.role for each in roles.decide(BURST, began_ns + TURN_NS).moves} == {Role.PREFILL}


def test_a_minute_after_decodes_took_a_worker_prompts_get_it_at_once() -> None:
    roles = _Roles()
    assert {each.role for each in roles.decide(DECODES, START_NS).moves} == {Role.MIXED}
    assert {each.role for each in roles.decide(BURST, START_NS + CALLED_NS).moves} == {Role.PREFILL}


def test_a_worker_that_moves_takes_the_budget_of_its_new_role_at_once() -> None:
    """Budgets that are settled a moment after a move turn the worker halfway back."""
    work = Workload(6.6, 93, 10_602, 310 * MS, waiting_ns=2.3e9)
    apart = Apart(on=True, since_ns=START_NS - 2 * TURN_NS)
    # With SLOW's own interference budgets gain less than chance gives 93 sequences, and decodes stay apart.
    hides = replace(SLOW, step_time=replace(SLOW.step_time, interference=0.1))
    plan = assign(hides, work, pool(5, 3, budget_tokens=0), Memory(apart=apart), START_NS)
    assert [(each.role, each.budget_tokens) for each in plan.moves] == [(Role.MIXED, SLOW.chunk_tokens)]
    assert {each.budget_tokens for each in plan.budgets} == {SLOW.chunk_tokens}
    assert not plan.memory.apart.on


TO_PREFILL, TO_MIXED = -1, 1


def taken_back(times: int, work: Workload, at_ns: int = START_NS) -> tuple[RoleTurn, int]:
    """Move to prefill and back that often, ten seconds apart; return the state and the time of the last move."""
    turn = RoleTurn()
    for _ in range(times):
        turn = turn.after(TO_PREFILL, work, at_ns).after(TO_MIXED, work, at_ns + TURN_NS)
        at_ns += 2 * TURN_NS
    return turn, at_ns - TURN_NS


@given(works, st.integers(1, 12))
def test_each_reversed_move_to_prefill_lengthens_the_next_wait_up_to_a_bound(work: Workload, times: int) -> None:
    turn, at_ns = taken_back(times, work)
    assert turn.patience_ns(work, at_ns) == min(TURN_NS * BACK_OFF**times, MOST_CALLED_NS)
    assert turn.patience_ns(work, at_ns + MOST_CALLED_NS) == 0


@given(works, st.integers(1, 4))
def test_moves_to_prefill_wait_no_longer_once_prompts_have_doubled_or_decodes_halved(
    work: Workload, times: int
) -> None:
    turn, at_ns = taken_back(times, work)
    more = replace(work, prompts=OTHER_WORK * max(work.prompts, 1.0))
    assert turn.patience_ns(more, at_ns) == 0
    if work.decodes >= OTHER_WORK:
        assert turn.patience_ns(replace(work, decodes=int(work.decodes / OTHER_WORK)), at_ns) == 0


def test_the_end_of_a_flood_does_not_reverse_its_move_to_prefill() -> None:
    flood = replace(PROMPTS, prompts=12.0)
    turn = RoleTurn().after(TO_PREFILL, flood, START_NS).after(TO_MIXED, PROMPTS, START_NS + TURN_NS)
    assert not turn.undone
    later = RoleTurn().after(TO_PREFILL, PROMPTS, START_NS).after(TO_MIXED, PROMPTS, START_NS + CALLED_NS)
    assert not later.undone, "it has paid for a minute"


def test_unchanged_prompt_pressure_waits_for_a_worker_that_decodes_took_back() -> None:
    roles = _Roles()
    roles.workers = pool(3, 3)
    turn, at_ns = taken_back(1, BURST)
    roles.memory = Memory(turn=turn)
    assert not roles.decide(BURST, at_ns + 1).moves
    assert not roles.decide(BURST, at_ns + TURN_NS * BACK_OFF).moves
    assert {each.role for each in roles.decide(BURST, at_ns + 1 + TURN_NS * BACK_OFF).moves} == {Role.PREFILL}


def test_a_flood_moves_workers_at_once_even_if_decodes_took_some_back_before() -> None:
    roles = _Roles()
    roles.workers = pool(3, 3)
    flood = replace(PROMPTS, prompts=5.0)
    turn, at_ns = taken_back(3, replace(flood, prompts=flood.prompts / OTHER_WORK))
    roles.memory = Memory(turn=turn)
    assert not roles.decide(flood, at_ns + TURN_HELD_NS).moves, "roles turn back only if that is needed for a second"
    assert {each.role for each in roles.decide(flood, at_ns + 2 * TURN_HELD_NS).moves} == {Role.PREFILL}


@given(st.integers(1, 12))
def test_oscillating_budgets_wait_longer_each_time_up_to_a_bound(times: int) -> None:
    apart, at_ns = Apart(), START_NS
    for number in range(times):
        held_ns = min(TURN_HELD_NS * BACK_OFF ** max(number - 1, 0), MOST_HELD_NS)
        apart = apart.called(at_ns, better=not apart.on)
        if number:
            assert apart.called(at_ns + held_ns - 1, better=not apart.on) is not apart
            assert apart.called(at_ns + held_ns - 1, better=not apart.on).on is apart.on
            apart = apart.called(at_ns + held_ns, better=not apart.on)
        assert apart.on is (number % 2 == 0)
        at_ns += held_ns + TURN_NS
    assert (
        apart.called(at_ns + MOST_CALLED_NS, better=not apart.on)
        .called(at_ns + MOST_CALLED_NS + MOST_HELD_NS, better=not apart.on)
        .turns
        == 0
    )


def test_prompt_pressure_beside_idle_decodes_moves_a_worker_after_any_number_of_reversals() -> None:
    """Decodes that would have room to spare without it do not call it back."""
    roles = _Roles()
    roles.workers = pool(3, 3)
    prompts = Workload(prompts=4.5, decodes=10, kv_tokens=10_000, tpot_ns=50 * MS)
    turn, at_ns = taken_back(3, replace(prompts, prompts=3.0))
    roles.memory = Memory(turn=turn)
    plans = [roles.decide(prompts, at_ns + each * TURN_HELD_NS) for each in range(1, 4)]
    assert {each.role for plan in plans for each in plan.moves} == {Role.PREFILL}


def test_sequences_slowed_by_prompts_call_no_worker_just_after_the_prompts_have_left() -> None:
    """They are as many because those steps were long, and become fewer within seconds."""
    # Taken from a steady load of `make bench-operator`: apart, 91 sequences would press 0.82.
    work = Workload(prompts=4.7, decodes=91, kv_tokens=32_000, tpot_ns=310 * MS)
    apart = Apart(on=True, since_ns=START_NS)
    soon = assign(SLOW, work, pool(5, 3, 0), Memory(apart=apart), START_NS + TURN_HELD_NS)
    later = assign(SLOW, work, pool(5, 3, 0), Memory(apart=apart), START_NS + 2 * TURN_NS)
    assert not soon.moves
    assert {each.role for each in later.moves} == {Role.MIXED}
    assert soon.now.decode_pressure < later.now.decode_pressure


def test_budgets_change_among_few_sequences_only_beyond_chance() -> None:
    """Decodes apart would press a little less, which is chance among a hundred sequences and none among thousands."""
    few = Workload(prompts=5.2, decodes=100, kv_tokens=35_200, tpot_ns=310 * MS)
    many = replace(few, prompts=20 * few.prompts, decodes=20 * few.decodes, kv_tokens=20 * few.kv_tokens)
    assert not assign(SLOW, few, pool(5, 3, 512), Memory(), START_NS).memory.apart.on
    assert assign(SLOW, many, pool(100, 60, 512), Memory(), START_NS).memory.apart.on


def test_decodes_that_are_briefly_few_keep_their_workers_for_the_length_of_a_burst() -> None:
    work = Workload(prompts=3.03, decodes=56, kv_tokens=19_700, tpot_ns=310 * MS)
    for usual, moves in ((56.0, True), (80.0, False)):
        memory = Memory(apart=Apart(on=True, since_ns=START_NS - 2 * TURN_NS), usual=UsualWork(3.0, START_NS, usual))
        plan = assign(SLOW, work, pool(4, 4, 0), memory, START_NS)
        assert bool(plan.moves) is moves
        assert assign(SLOW, work, pool(4, 4, 0), plan.memory, START_NS + BURST_NS).moves or moves
