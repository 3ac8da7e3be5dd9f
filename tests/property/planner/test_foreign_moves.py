"""Properties of moves in an observed fleet: one at a time, never of a fixed worker or below a minimum."""

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.foreign_moves import UNMEASURED_FOREIGN, ForeignMove, plan_move, withheld
from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.role_planning import Memory
from libs.policy.pressure import Workload
from libs.policy.roles import Role
from libs.policy.verdict.state import ModelState, WorkerState, pressures, role_counts
from tests.property.planner.test_capacity import ENGINE, works

START_NS = 10**12
counts = st.integers(0, 4)


def state_of(work: Workload, prefill: int, decode: int, both: int) -> ModelState:
    roles = [Role.PREFILL] * prefill + [Role.MIXED] * (decode + both)
    workers = [
        WorkerState(
            id=f"w{place}", role=role, budget_tokens=512 if place >= prefill + decode else 0, sequences=0, kv_tokens=0,
            prompt_tokens=0, slowness=None, kv_wait=0.0, kv_awaited=0.0, held_by_link=0.0,
        )
        for place, role in enumerate(roles)
    ]  # fmt: skip
    standing = role_counts(workers)
    found = pressures(ENGINE, work, standing)
    return ModelState(
        model="m", engine=ENGINE, work=work, standing=standing, workers=workers, pressures=found, healthy=found,
        horizon_ns=1e9, waiting_tokens=0, running=0, held=0, queued=0, at_rest=False, ttft_ns=10**9,
    )  # fmt: skip


@given(works, st.tuples(counts, counts, counts), st.sets(st.integers(0, 11)), st.integers(1, 3), st.integers(1, 3))
def test_a_move_takes_one_free_worker_and_leaves_the_minimum(
    work: Workload, sizes: tuple[int, int, int], fixed: set[int], least_prefill: int, least_decode: int
) -> None:
    state = state_of(work, *sizes)
    limits = ModelLimits(prefill_min=least_prefill, decode_min=least_decode)
    names = {f"w{place}" for place in fixed}
    memory, now_ns, last_ns, takes = Memory(), START_NS, 0, {each.id: each.takes for each in state.workers}
    for _ in range(8):
        plan, move = plan_move(state, names, memory, now_ns, limits=limits, may_move=True)
        assert not plan.budgets
        memory = plan.memory
        if move is not None:
            assert move.worker not in names and takes[move.worker] == move.before != "mixed"
            assert now_ns - last_ns >= UNMEASURED_FOREIGN.pay_back_ns(1.0)
            if withheld(move, takes, limits) == "":
                after = list((takes | {move.worker: move.role}).values())
                were = list(takes.values())
                allowed = limits.allow(were.count("prefill"), len(were) - were.count("prefill"))
                kept = limits.allow(after.count("prefill"), len(after) - after.count("prefill"))
                assert kept or not allowed
                assert 0 < after.count("prefill") < len(after)
            last_ns = now_ns
        now_ns += 3 * 10**9


@given(works, counts, counts)
def test_no_worker_moves_while_moves_are_forbidden(work: Workload, prefill: int, decode: int) -> None:
    state = state_of(work, prefill, decode, 0)
    memory = Memory()
    for second in range(12):
        plan, move = plan_move(state, (), memory, START_NS + second * 10**9, limits=ModelLimits(), may_move=False)
        memory = plan.memory
        assert move is None


@given(works, st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(("prefill", "decode", "mixed")), min_size=1))
def test_a_move_is_withheld_if_its_worker_has_changed_its_role(work: Workload, roles: dict[str, str]) -> None:
    plan, _ = plan_move(state_of(work, 1, 1, 0), (), Memory(), START_NS, limits=ModelLimits(), may_move=False)
    for worker, role in roles.items():
        other = "decode" if role == "prefill" else "prefill"
        assert withheld(ForeignMove("m", worker, other, role, plan), roles, ModelLimits(prefill_min=0, decode_min=0))
