"""Tests of data-parallel groups in the planner: each is one worker, and its ranks change together."""

from libs.cli.suite.role import with_groups
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.policy.capacity import MOST_WORKERS
from libs.policy.planner.groups import UNEQUAL, GroupedWorkers, gather, share, spread
from libs.policy.planner.limits import EVERY
from libs.policy.planner.role_planning import Memory, PlannedWorker, RoleOrder, assign
from libs.policy.pressure import WorkerProfile, Workload
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel
from libs.testing.workers.telemetry import at
from services.planner.fleet_view import WorkerColumns
from tests.planner_rig import Cluster, registered

GROUPS = {f"{group}{rank}": group for group in "abcd" for rank in range(4)}
ENGINE = WorkerProfile(StepTimeModel(5e6, 20_000, 0, 8e6, 50_000, 10, 0.1), 2048, 64, 400_000)


def rank(name: str, role: Role = Role.MIXED, **how: object) -> PlannedWorker:
    return PlannedWorker(name, role, 0, True, 10, 100)._replace(**how)


def ranks(roles: dict[str, Role]) -> list[PlannedWorker]:
    return [rank(name, roles[group]) for name, group in GROUPS.items()]


ROLES = {"a": Role.PREFILL, "b": Role.MIXED, "c": Role.MIXED, "d": Role.MIXED}


def test_a_group_is_one_worker_with_the_sum_of_its_ranks() -> None:
    found = gather(ranks(ROLES), GROUPS)
    assert [each.id for each in found.workers] == ["a0", "b0", "c0", "d0"]
    assert {(each.prompt_tokens, each.kv_tokens) for each in found.workers} == {(40, 400)}
    assert (found.ranks, found.strays, found.incomplete) == (4, [], set())


def test_workers_without_a_group_are_unchanged() -> None:
    alone = [rank("p"), rank("d")]
    assert gather(alone, {}) == GroupedWorkers(alone)


def test_a_decision_about_groups_equals_one_about_single_workers_divided_among_ranks() -> None:
    work = Workload(0.5, 700, 300_000, 50_000_000)
    gathered = gather(ranks({"a": Role.PREFILL, "b": Role.PREFILL, "c": Role.PREFILL, "d": Role.MIXED}), GROUPS)
    plan = assign(
        ENGINE, share(work, gathered.ranks), gathered.workers, Memory(), 10**12, limits=EVERY, most_moves=MOST_WORKERS
    )
    assert plan.now.prefill + plan.now.mixed == 4
    assert plan.moves, "700 sequences press on the 256 places of one group, and three compute hardly anything"
    roster = {f"{group}0": [f"{group}{number}" for number in range(4)] for group in "abcd"}
    orders = spread(plan.moves, roster)
    assert len(orders) == 4 * len(plan.moves)
    for move in plan.moves:
        moved = {each.worker_id for each in orders if each.worker_id[0] == move.worker_id[0]}
        assert moved == set(roster[move.worker_id])
    assert {each.role for each in orders} == {Role.MIXED}


def test_a_rank_left_behind_takes_its_groups_role_before_the_group_moves_again() -> None:
    workers = [each._replace(role=Role.PREFILL) if each.id == "b2" else each for each in ranks(ROLES)]
    found = gather(workers, GROUPS)
    assert found.strays == [RoleOrder("b2", Role.MIXED, 0)]
    assert [each.pinned for each in found.workers] == [False, True, False, False]


def test_a_group_moves_only_if_all_of_its_ranks_can_and_none_is_held() -> None:
    workers = [
        each._replace(movable=each.id != "a3", pinned=each.id == "c1") if each.id in {"a3", "c1"} else each
        for each in ranks(ROLES)
    ]
    found = gather(workers, GROUPS)
    assert [each.movable for each in found.workers] == [False, True, True, True]
    assert [each.pinned for each in found.workers] == [False, False, True, False]


def test_a_group_that_lacks_a_rank_does_not_move() -> None:
    there = [each._replace(role=Role.PREFILL) if each.id == "b2" else each for each in ranks(ROLES) if each.id != "b3"]
    found = gather(there, GROUPS)
    assert {each.id: each.movable for each in found.workers} == {"a0": True, "c0": True, "d0": True, "b0": False}
    assert (found.ranks, found.strays, found.incomplete, found.unknown) == (4, [], {"b0", "b1", "b2"}, "")


def test_nothing_is_decided_if_complete_groups_do_not_represent_the_model() -> None:
    """The planner would take a side that it does not see for one that is not there."""
    everyone = ranks(ROLES)
    without_a3 = [each for each in everyone if each.id != "a3"]  # the only group that prefills
    of_two_sizes = [each for each in everyone if each.id[0] in "ac" or each.id[1] in "01"]
    for there in (without_a3, of_two_sizes, [*everyone, rank("lone")]):
        found = gather(there, GROUPS)
        assert (found.unknown, found.strays) == (UNEQUAL, ())


def test_workers_without_a_group_count_like_groups_of_one() -> None:
    found = gather([rank("a0"), rank("lone")], GROUPS)
    assert (found.ranks, found.incomplete) == (1, set())
    assert all(each.movable for each in found.workers)


def test_shares_of_work_add_up_to_the_whole() -> None:
    work = Workload(3.0, 5, 7, 1, waiting_ns=9.0, held=1, held_kv_tokens=3, held_prompts=1.5)
    one = share(work, 4)
    assert share(work, 1) == work
    assert 4 * one.decodes >= 5 and 4 * one.kv_tokens >= 7 and 4 * one.held >= 1 and 4 * one.held_kv_tokens >= 3
    assert (4 * one.prompts, 4 * one.waiting_ns, 4 * one.held_prompts) == (3.0, 9.0, 1.5)


def test_a_person_who_names_one_rank_moves_its_whole_group() -> None:
    known = [{"id": name, "group": group} for name, group in GROUPS.items()] + [{"id": "lone", "group": ""}]
    assert [each["id"] for each in with_groups([known[1]], known)] == ["a1", "a0", "a2", "a3"]
    assert with_groups([known[-1]], known) == [known[-1]]
    models = [{"id": name, "group": "n:1", "model": name[0]} for name in ("m0", "m1", "o0")]
    assert [each["id"] for each in with_groups([models[0]], models)] == ["m0", "m1"]


def grouped() -> Cluster:
    """Build two prefill ranks and four decode ranks, of two groups."""
    cluster = Cluster(p0="prefill", p1="prefill", d0="decode", d1="decode", e0="decode", e1="decode")
    for name, worker in cluster.workers.items():
        worker.group = f"10.0.0.1:{name[0]}"
    return cluster


def test_the_planner_sends_orders_to_all_ranks_of_a_group_and_counts_it_as_one_worker() -> None:
    cluster = grouped()
    (kept,) = cluster.decide(p0=0.4, p1=0.4).decisions
    assert [(pool.workers, pool.gpus) for pool in kept.inputs.pools] == [(1, 2), (2, 4)]
    assert "on 1 prefill worker, 0.0 on 2 decode workers" in kept.reason
    decided = cluster.decide(p0=0.6, p1=0.6)
    assert sorted(order.worker.id for order in decided.orders) == ["d0", "d1", "e0", "e1"]
    assert "2 decode workers that take up to" in decided.decisions[0].reason
    cluster.carry_out(decided)
    assert cluster.decide(p0=0.6, p1=0.6).orders == ()


def test_groups_of_two_models_are_separate_even_if_their_names_are_equal() -> None:
    workers = [registered(name, "decode") for name in ("m0", "m1", "o0", "o1")]
    for each in workers:
        each.group, each.assignment.model = "10.0.0.1:29550", each.id[0]
    columns = WorkerColumns(workers, "planner-0")
    assert columns.ranks == {"m0": ["m0", "m1"], "o0": ["o0", "o1"]}
    assert columns.counts.tolist() == [True, False, True, False]


def test_a_group_that_lacks_a_rank_does_not_stop_decisions_about_the_others() -> None:
    cluster = grouped()
    cluster.workers |= {name: registered(name, "decode") for name in ("f0", "g0")}
    cluster.workers["f0"].group = "10.0.0.1:f"
    cluster.decide(p0=0.4, p1=0.4)
    decided = cluster.decide(p0=0.6, p1=0.6)
    assert sorted(order.worker.id for order in decided.orders) == ["d0", "d1", "e0", "e1"]
    assert "2 decode workers that take up to" in decided.decisions[0].reason


def test_the_work_of_a_group_that_lacks_a_rank_is_left_out() -> None:
    cluster = grouped()
    cluster.decide(Load(running=5, free_kv_blocks=1_000))
    (alone,) = cluster.state.plans
    cluster.workers["f0"] = registered("f0", "decode")
    cluster.workers["f0"].group = "10.0.0.1:f"
    cluster.decide(Load(running=5, free_kv_blocks=1_000))
    (beside,) = cluster.state.plans
    assert beside.observed.work.decodes == alone.observed.work.decodes > 0


def test_a_rank_whose_call_failed_is_ordered_again_to_follow_its_group() -> None:
    cluster = grouped()
    decided = cluster.decide(p0=0.6, p1=0.6)
    failed = next(order for order in decided.orders if order.worker.id == "e1")
    cluster.carry_out(decided._replace(orders=[order for order in decided.orders if order is not failed]))
    cluster.state.done(failed, None, at(cluster.ms))
    again = cluster.decide(p0=0.6, p1=0.6)
    assert [order.worker.id for order in again.orders] == ["e1"]
    assert again.orders[0].wanted == failed.wanted
    assert again.decisions[0].reason == "1 rank takes the role of the data-parallel group"
