"""Properties of how long a moved worker rests: until its move has paid and newer telemetry has arrived."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.planner.role_planning import LEAST_PAY_BACK_NS, MOST_NS, Memory, MoveEvidence, assign
from libs.policy.planner.turns import NO_TURN
from libs.policy.pressure import Workload
from libs.policy.roles import Role
from tests.property.planner.test_capacity import ENGINE, MS, after, pool

PROMPTS = Workload(prompts=6.0, decodes=60, kv_tokens=60_000, tpot_ns=50 * MS)
DECODES = Workload(prompts=0.2, decodes=500, kv_tokens=1_200_000, tpot_ns=50 * MS)
START_NS = 10**12


def evidence(age_ms: int, effect_ms: int) -> MoveEvidence:
    return MoveEvidence(effect_ns=effect_ms * MS).aged(age_ms * MS)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 20_000), st.integers(0, 20_000))
def test_a_move_that_relieves_more_or_takes_less_time_pays_sooner(
    relieved: float, other: float, effect_ms: int, other_ms: int
) -> None:
    less, more = sorted((relieved, other))
    quick, slow = sorted((effect_ms, other_ms))
    assert evidence(0, quick).pay_back_ns(more) <= evidence(0, slow).pay_back_ns(less)
    assert LEAST_PAY_BACK_NS <= evidence(0, quick).pay_back_ns(more) <= MOST_NS


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=40))
def test_the_estimated_effect_lies_between_the_measured_ones(effects_ms: list[int]) -> None:
    found = MoveEvidence(effect_ns=effects_ms[0] * MS)
    for each in effects_ms:
        found = found.measured(each * MS)
    assert min(effects_ms) * MS - 1 <= found.effect_ns <= max(effects_ms) * MS + 1


@given(st.integers(0, 2_000), st.integers(20, 1_000))
def test_a_moved_worker_may_return_once_telemetry_is_newer_than_its_pay_back(age_ms: int, effect_ms: int) -> None:
    known = evidence(age_ms, effect_ms)
    workers = pool(2, 6)
    first = assign(ENGINE, PROMPTS, workers, Memory(), START_NS, evidence=known)
    moved = {each.worker_id for each in first.moves if each.role is Role.PREFILL}
    assert moved and moved == set(first.memory.paid_ns)
    then = after(workers, first)
    # If all movable workers rest, they stay; the others are pinned.
    then = [each._replace(pinned=each.id not in moved) for each in then]
    paid_ns = max(first.memory.paid_ns.values())
    memory = replace(first.memory, turn=NO_TURN)  # which would hold them for a second
    early = assign(ENGINE, DECODES, then, memory, paid_ns + age_ms * MS - 1, evidence=known)
    assert not early.moves
    late = assign(ENGINE, DECODES, then, memory, paid_ns + age_ms * MS, evidence=known)
    assert {each.worker_id for each in late.moves} <= moved and late.moves


def test_older_telemetry_holds_a_worker_for_longer() -> None:
    workers, fresh = pool(2, 6), evidence(50, 100)
    first = assign(ENGINE, PROMPTS, workers, Memory(), START_NS, evidence=fresh)
    then = [each._replace(pinned=each.id not in first.memory.paid_ns) for each in after(workers, first)]
    at_ns = max(first.memory.paid_ns.values()) + fresh.age_ns
    memory = replace(first.memory, turn=NO_TURN)  # which would hold them for a second
    assert assign(ENGINE, DECODES, then, memory, at_ns, evidence=fresh).moves
    old = replace(fresh, age_ns=500 * MS)
    assert not assign(ENGINE, DECODES, then, memory, at_ns, evidence=old).moves
