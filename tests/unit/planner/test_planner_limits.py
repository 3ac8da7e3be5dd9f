"""Tests of the planner's limits: set by people, applied to decisions, and reported afterwards."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from libs.cli.planner.decisions import set_limit
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load, ModelTarget, RoleChange
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_RECOMMEND, ACTION_SET_BUDGET, ACTION_SET_ROLE
from libs.policy.planner.limits import DAY_MINUTES, ModelLimits, PlannerLimits, QuietHours
from libs.policy.planner.role_planning import LACKING_NS, STARTING_NS, RoleReason
from libs.testing.workers.telemetry import at
from services.planner.fleet_view import HAND_NS
from services.planner.http.answers import decision_answer
from services.planner.http.limits_api import LimitsBody
from services.planner.kept import Lead
from services.planner.role_planner import FAILED_NS
from services.planner.state import MEASURED_NS
from tests.planner_rig import CHUNK, MS, WINDOW_MS, Cluster, actions, registered


def limits(**own: Any) -> PlannerLimits:
    return LimitsBody(**own).limits()


def test_a_models_own_limits_are_set_and_removed_in_the_cli() -> None:
    wanted = LimitsBody().model_dump()
    before = LimitsBody().model_dump()
    set_limit(wanted, "prefill_min=2", "m")
    assert wanted["models"]["m"]["prefill_min"] == 2
    set_limit(wanted, "none", "m")
    assert wanted == before


def judged_by(cluster: Cluster) -> list[tuple[str, int]]:
    cluster.state.decide(at(cluster.ms))
    return [(each.observed.model, each.observed.work.tpot_ns // MS) for each in cluster.state.plans]


def test_roles_are_decided_for_the_target_of_limits_then_of_requests_then_of_the_catalogue() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (kept,) = cluster.decide(p=0.4).decisions
    assert judged_by(cluster) == [("sim", 100)] == [(each.model, each.tpot_ns // MS) for each in kept.targets]
    cluster.state.take_model_targets({"sim": 70.0})
    assert judged_by(cluster) == [("sim", 70)]
    requested = cluster.telling.loads([], at(cluster.ms))
    requested.targets.append(ModelTarget(model="sim", tpot_ns=40 * MS))
    cluster.state.take_loads(requested, at(cluster.ms))
    assert judged_by(cluster) == [("sim", 40)]
    cluster.state.set_limits(limits(every={"tpot_ms": 30}), "me", "", at(0))
    assert judged_by(cluster) == [("sim", 30)]


def test_prompts_must_start_within_half_of_the_requests_target_or_within_a_second() -> None:
    cluster = Cluster(p="prefill", d="decode")

    def due_ms(ttft_ms: int) -> int:
        requested = cluster.telling.loads([], at(cluster.ms))
        requested.targets.append(ModelTarget(model="sim", ttft_ns=ttft_ms * MS))
        cluster.state.take_loads(requested, at(cluster.ms))
        cluster.state.decide(at(cluster.ms))
        return round(cluster.state.plans[0].observed.work.due_ns / MS)

    cluster.decide(p=0.4)
    assert [due_ms(ttft_ms) for ttft_ms in (0, 500, 2_000, 4_000, 60_000)] == [1_000, 1_000, 1_000, 2_000, 5_000]


def test_a_pinned_worker_keeps_its_role_and_budget() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    cluster.state.set_limits(limits(pinned=["d"]), "me", "", at(0))
    assert actions(cluster.decide(p=0.9)) == [(ACTION_SET_BUDGET, "e", "mixed")]


def test_a_worker_moved_by_a_person_is_left_unchanged_for_a_minute() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.workers["d"].role_change.CopyFrom(RoleChange(actor="fulcrum role", unix_ns=at(0)))
    assert cluster.decide(p=0.9).orders == ()
    cluster.ms += HAND_NS // MS
    assert len(cluster.decide(p=0.9).orders) == 1


def test_a_worker_moved_by_another_planner_may_move_at_once() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.workers["d"].role_change.CopyFrom(RoleChange(actor="planner-of-before", unix_ns=at(0)))
    assert len(cluster.decide(p=0.9).orders) == 1


def test_a_worker_started_mixed_keeps_its_budget_under_low_load() -> None:
    cluster = Cluster(m="mixed", n="mixed")
    for _ in range(10):
        assert cluster.decide().orders == ()


def test_limits_move_workers_without_pressure() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    cluster.decide()
    cluster.state.set_limits(limits(models={"sim": {"prefill_min": 2}}), "me", "", at(0))
    decided = cluster.decide()
    assert [(action, role) for action, _, role in actions(decided)] == [(ACTION_SET_ROLE, "prefill")]
    (decision,) = decided.decisions
    assert decision.reason_code == "limits"
    assert decision.reason.startswith(
        "limits ask for other numbers than 1 prefill worker and 2 decode; moving 1 decode worker to prefill leaves"
    )


def test_roles_do_not_change_in_quiet_hours_but_budgets_do() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    cluster.state.set_limits(limits(quiet_hours=["00:00-24:00"], every={"prefill_min": 2}), "me", "", at(0))
    assert [each[0] for each in actions(cluster.decide(p=0.9))] == [ACTION_SET_BUDGET] * 2


def test_moves_per_second_are_limited() -> None:
    cluster = Cluster(**{f"d{n}": "decode" for n in range(6)}, p="prefill")
    cluster.decide()
    cluster.state.set_limits(limits(moves_per_s=2, every={"prefill_min": 6}), "me", "", at(0))
    assert len(cluster.decide().orders) == 2
    cluster.ms -= 500
    assert cluster.state.decide(at(cluster.ms)).orders == ()


def test_the_outcome_of_a_decision_is_reported_beside_the_state_before_it() -> None:
    cluster = Cluster(p="prefill", d="decode")
    decided = cluster.decide(p=0.9)
    (first,) = decided.decisions
    cluster.carry_out(decided)
    again: list[Any] = []
    while not again:
        again = [each for each in cluster.decide(p=0.2).decisions if each.sequence == first.sequence]
    answer = decision_answer(again[0])
    assert answer.measured is not None and answer.measured.after_ms >= MEASURED_NS // MS
    assert answer.measured.before.prompt_pressure > answer.measured.after.prompt_pressure > 0
    assert answer.predicted is not None and (answer.predicted.prefill, answer.predicted.decode) == (1, 1)
    assert (answer.workers, answer.changes[0].budget_tokens) == (["d"], CHUNK)


def test_a_planner_that_does_not_know_whether_it_leads_sends_no_orders() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.state.lead = Lead.UNKNOWN
    decided = cluster.decide(p=0.9)
    assert (decided.orders, [each.action for each in decided.decisions]) == ((), [ACTION_RECOMMEND])
    assert "which planner leads" in (cluster.state.not_live(at(cluster.ms)) or "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"moves_per_s": -1},
        {"every": {"prefill_min": 3, "prefill_max": 2}},
        {"every": {"decode_min": 0}},
        {"every": {"prefill_min": 2, "workers_max": 2}},
        {"every": {"prefill_max": 0, "prefill_min": 2}},
        {"models": {"": {}}},
        {"quiet_hours": ["25:00-26:00"]},
        {"quiet_hours": ["22:00-22:00"]},
        {"quiet_hours": ["24:30-06:00"]},
        {"quiet": []},
    ],
)
def test_invalid_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LimitsBody(**wrong)


@given(st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1))
def test_quiet_hours_past_midnight_are_the_complement_of_the_reversed_ones(start: int, end: int, minute: int) -> None:
    if start != end:
        assert QuietHours(start, end).hold(minute) is not QuietHours(end, start).hold(minute)


@given(st.integers(0, 5), st.integers(0, 5))
def test_limits_allow_the_values_between_them(prefill: int, decode: int) -> None:
    held = ModelLimits(prefill_min=1, prefill_max=3, decode_min=2)
    assert held.allow(prefill, decode) is (1 <= prefill <= 3 and decode >= 2)


def test_limits_are_described_in_words() -> None:
    before = LimitsBody()
    assert LimitsBody(moves_per_s=2, revision=7).changed_from(before) == "moves_per_s from 64 to 2"


def test_limits_that_no_reachable_split_meets_are_named_and_move_no_worker() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.state.set_limits(limits(every={"prefill_min": 2}), "me", "", at(0))
    (kept,) = cluster.decide().decisions
    assert (kept.reason_code, "limits do not allow" in kept.reason) == ("limits_unmet", True)


def test_all_workers_become_decode_workers_if_no_prefill_worker_is_allowed() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.decide()
    cluster.state.set_limits(limits(every={"prefill_max": 0}), "me", "", at(0))
    assert (ACTION_SET_ROLE, "p", "mixed") in actions(cluster.decide())


def test_one_of_two_workers_computes_prompts_unless_limits_forbid_it() -> None:
    """Before, after the last prefill worker had been moved by hand no worker served prompts until some arrived."""
    assert LimitsBody().every.prefill_min == LimitsBody().every.decode_min == 1
    cluster = Cluster(d="decode", e="decode")
    changed: list[Any] = []
    while not changed:
        changed = [each for each in actions(cluster.decide()) if each[0] == ACTION_SET_ROLE]
    assert cluster.ms * MS >= STARTING_NS
    assert [role for _, _, role in changed] == ["prefill"]
    none = Cluster(d="decode", e="decode")
    none.state.set_limits(limits(every={"prefill_min": 0}), "me", "", at(0))
    assert not [each for each in actions(none.decide()) if each[0] == ACTION_SET_ROLE]


def test_decode_workers_found_before_the_prefill_worker_keep_their_roles() -> None:
    cluster = Cluster(d="decode", e="decode")
    (decision,) = cluster.decide().decisions
    assert (decision.reason_code, "missing workers have 30 s" in decision.reason) == ("limits_wait", True)
    cluster.workers["p"] = registered("p", "prefill")
    found = [cluster.decide() for _ in range(2 * STARTING_NS // MS // WINDOW_MS)]
    assert not [each for each in found if actions(each)]


@pytest.mark.parametrize("roles", [{"d": "decode"}, {"m": "mixed"}, {"m": "mixed", "n": "mixed"}])
def test_a_single_worker_and_workers_started_mixed_need_no_prefill_worker(roles: Any) -> None:
    cluster = Cluster(**roles)
    assert not [each for each in actions(cluster.decide()) if each[0] == ACTION_SET_ROLE]
    codes = {plan.assigned.code for plan in cluster.state.plans if plan.assigned}
    assert codes <= {RoleReason.BALANCED, RoleReason.BEST}


def test_workers_started_mixed_do_not_become_prefill_workers_under_light_load() -> None:
    cluster = Cluster(m="mixed", n="mixed")
    load = Load(running=60, free_kv_blocks=100)
    for share in (0.05, 0.3, 0.5):
        assert not [each for each in actions(cluster.decide(load=load, m=share)) if each[0] == ACTION_SET_ROLE]


def test_a_decode_worker_whose_prefill_workers_are_gone_computes_prompts_itself() -> None:
    cluster = Cluster(d="decode")
    cluster.queue(1_000)
    assert actions(cluster.decide()) == [(ACTION_SET_BUDGET, "d", "mixed")]


def test_prefill_workers_left_alone_with_work_also_decode_unless_a_restarting_one_returns() -> None:
    cluster = Cluster(p="prefill", q="prefill")
    cluster.queue(1_000)
    assert actions(cluster.decide()) == []
    found: list[Any] = []
    while not found:
        cluster.queue(1_000)
        found = actions(cluster.decide())
    assert cluster.ms * MS >= LACKING_NS
    assert {each[2] for each in found} == {"mixed"}


def test_an_unreachable_worker_is_skipped_while_others_relieve_the_load() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    for order in cluster.decide(p=0.9).orders:
        cluster.state.done(order, None, at(cluster.ms), failed=order.worker.id == "d")
    assert [each.worker.id for each in cluster.decide(p=0.9).orders] == ["e"]
    cluster.ms += FAILED_NS // MS
    assert "d" in [each.worker.id for each in cluster.decide(p=0.9).orders]


def test_without_a_token_the_planner_only_recommends() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.state.may_ask = False
    assert [each.action for each in cluster.decide(p=0.9).decisions] == [ACTION_RECOMMEND]
