"""Tests of the planner's decisions about workers, from telemetry to decisions and orders."""

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load, RoleChange
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_RECOMMEND,
    ACTION_SET_BUDGET,
    ACTION_SET_ROLE,
    MODE_ADVISORY,
    MODE_OFF,
)
from libs.policy.planner.role_planning import CALM_NS, RoleOrder
from libs.policy.roles import Role
from libs.testing.wait import ManualClock
from libs.testing.workers.telemetry import MS, at, step_batch
from services.planner.http.api import PlannerCollector
from services.planner.state import Decided
from tests.planner_rig import CHUNK, STEP_TIME, WINDOW_MS, Cluster, actions


def test_decode_workers_take_prompts_when_prefill_workers_are_under_pressure() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    (kept,) = cluster.decide(p=0.4).decisions
    assert (kept.action, kept.reason_code) == (ACTION_KEEP, "balanced")
    assert kept.reason == "sim keeps its roles: pressure 0.1 on 1 prefill worker, 0.0 on 2 decode workers"
    decided = cluster.decide(p=0.6)
    assert actions(decided) == [(ACTION_SET_BUDGET, "d", "mixed"), (ACTION_SET_BUDGET, "e", "mixed")]
    (decision,) = decided.decisions
    assert decision.reason == (
        "prefill pressure 0.6 on 1 prefill worker; 2 decode workers that take up to 512 prompt tokens a step leave 0.2"
    )
    assert (decision.reason_code, decision.model) == ("prompts_press", "sim")
    first = decision.changes[0]
    assert (first.worker_incarnation, first.assignment.epoch, first.assignment.budget_tokens) == (1, 4, CHUNK)
    assert [(each.prefill, each.decode) for each in decision.candidates] == [(1, 2), (2, 1)]
    assert [each.name for each in decision.alternatives] == ["1 prefill, 2 decode", "2 prefill, 1 decode"]
    assert [pool.workers for pool in decision.inputs.pools] == [1, 2]
    assert [(each.worker.id, each.wanted, each.reason) for each in decided.orders] == [
        (each.worker_id, each.assignment, decision.reason) for each in decision.changes
    ]


def test_an_order_is_not_repeated_until_its_call_has_failed() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (order,) = cluster.decide(p=0.9).orders
    assert cluster.decide(p=0.9).orders == ()
    cluster.state.done(order, None, at(cluster.ms))
    (again,) = cluster.decide(p=0.9).orders
    assert again.wanted == order.wanted
    cluster.state.done(again, again.wanted, at(cluster.ms))
    assert cluster.decide(p=0.9).orders == ()  # registry and telemetry do not show it yet
    cluster.workers["d"].assignment.CopyFrom(again.wanted)
    assert cluster.decide(p=0.9).orders == ()


def test_a_change_by_another_actor_stands_and_the_next_call_builds_on_it() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (order,) = cluster.decide(p=0.9).orders
    cluster.workers["d"].assignment.epoch = 7
    cluster.state.done(order, None, at(cluster.ms))
    (again,) = cluster.decide(p=0.9).orders
    assert again.wanted.epoch == 8


def test_decode_workers_give_up_prompts_once_pressure_has_been_low_for_a_while() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.carry_out(cluster.decide(p=0.9))
    for _ in range(CALM_NS // MS // WINDOW_MS):
        assert cluster.decide().orders == ()
    decided = cluster.decide()
    assert actions(decided) == [(ACTION_SET_BUDGET, "d", "decode")]
    assert "prefill pressure on 1 prefill worker was below 0.2 for 10 s" in decided.decisions[0].reason


def test_a_prefill_worker_becomes_a_decode_worker_if_sequences_fill_the_existing_ones() -> None:
    cluster = Cluster(p="prefill", d="prefill", e="mixed")
    load = Load(running=64, free_kv_blocks=0)
    cluster.decide()
    batch = step_batch(10_000, (cluster.ms, cluster.ms + 1), worker="e", load=load)
    batch.assignment.CopyFrom(cluster.workers["e"].assignment)
    batch.step_time.CopyFrom(STEP_TIME)
    cluster.hear(batch, cluster.ms + 1)
    decided = cluster.state.decide(at(cluster.ms + 1))
    assert actions(decided) == [(ACTION_SET_ROLE, "p", "mixed")]
    assert decided.decisions[0].reason.startswith(
        "decode pressure 1.1 on 1 decode worker; moving 1 prefill worker to decode leaves a pressure of 0."
    )
    (order,) = decided.orders
    cluster.state.done(order, None, at(cluster.ms))
    again = cluster.state.decide(at(cluster.ms + 2))
    assert actions(again) == actions(decided), "a call that failed leaves the worker to the next decision"


def test_advisory_mode_publishes_the_same_decision_and_sends_no_orders() -> None:
    cluster = Cluster(MODE_ADVISORY, p="prefill", d="decode")
    for _ in range(2):
        decided = cluster.decide(p=0.9)
        assert decided.orders == ()
        (decision,) = decided.decisions
        assert decision.action == ACTION_RECOMMEND
        assert (
            "In mode auto it would act: prefill pressure 0.9 on 1 prefill worker; 1 decode worker that takes"
            in decision.reason
        )
        assert [(each.worker_id, each.assignment.budget_tokens) for each in decision.changes] == [("d", CHUNK)]


def test_requests_queued_at_gateways_raise_budgets_before_any_prompt_is_computed() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.queue(100_000)
    decided = cluster.decide()
    assert [each[0] for each in actions(decided)] == [ACTION_SET_BUDGET]
    assert "TTFT would reach" in decided.decisions[0].reason


@pytest.mark.parametrize(("tokens", "rests"), [(0, True), (9, False)])
def test_a_request_queued_at_a_gateway_ends_the_idle_state_of_a_cluster(tokens: int, rests: bool) -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.decide()
    assert cluster.state.at_rest
    cluster.queue(tokens)
    assert cluster.state.at_rest is rests


def test_a_model_with_too_little_data_is_left_unchanged_with_the_reason() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (kept,) = cluster.state.decide(at(WINDOW_MS)).decisions
    assert kept.reason == "sim keeps its roles: 0 of 2 workers report"


def test_pressure_is_a_gauge_by_model_and_phase() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.decide(p=0.4)
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in PlannerCollector(cluster.state, ManualClock(at(cluster.ms))).collect()
        for sample in family.samples
    }
    assert 0 < samples["fulcrum_planner_pressure", "prefill", "sim"] < 0.4
    assert samples["fulcrum_planner_pressure", "decode", "sim"] == 0
    assert samples["fulcrum_planner_leads",] == 1


def test_a_worker_started_mixed_and_moved_to_prefill_and_back_gets_its_own_budget_again() -> None:
    cluster = Cluster(m="mixed", n="mixed", p="prefill")
    cluster.workers["m"].assignment.budget_tokens = cluster.workers["n"].assignment.budget_tokens = 64
    cluster.decide()
    for name in "mn":  # as this planner would, by two calls
        cluster.workers[name].role_change.CopyFrom(RoleChange(actor="planner-0", unix_ns=at(cluster.ms)))
        cluster.workers[name].assignment.budget_tokens = CHUNK
        cluster.workers[name].assignment.epoch += 2
    decided = [cluster.decide() for _ in range(CALM_NS // MS // WINDOW_MS + 2)]
    changes = [change for each in decided for reported in each.decisions for change in reported.changes]
    assert {(each.worker_id, each.assignment.budget_tokens) for each in changes} == {("m", 64), ("n", 64)}


def test_a_restarted_planner_restores_the_budget_that_a_worker_was_started_with() -> None:
    cluster = Cluster(m="mixed", p="prefill")
    cluster.workers["m"].assignment.budget_tokens = 64
    cluster.decide()
    change = RoleOrder("m", Role.MIXED, CHUNK)
    order = cluster.state._role_planner.order(change, cluster.state.view, "prompts press", at(cluster.ms))
    assert order.own_budget_tokens == 64
    cluster.carry_out(Decided((), (order,)))
    heir = Cluster(m="mixed", p="prefill")
    heir.workers = cluster.workers
    decided = [heir.decide() for _ in range(CALM_NS // MS // WINDOW_MS + 2)]
    changes = [change for each in decided for reported in each.decisions for change in reported.changes]
    assert [(each.worker_id, each.assignment.budget_tokens) for each in changes] == [("m", 64)]


def test_while_the_mode_is_off_pressures_are_those_of_now() -> None:
    cluster = Cluster(MODE_OFF, p="prefill", d="decode")
    cluster.decide(p=0.9)
    cluster.state.plans = ()  # as where nothing was decided since the start
    (found,) = cluster.state.looked(at(cluster.ms))
    assert found.assigned is not None and found.assigned.now.prompt_pressure > 0.4
