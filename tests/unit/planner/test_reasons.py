"""Tests that the planner's sentences claim no more than the pressures beside them."""

from dataclasses import replace

from libs.policy.planner.role_planning import Memory, PlannedWorker, RoleOrder, RolePlan, RoleReason
from libs.policy.planner.turns import Apart
from libs.policy.pressure import Split, WorkerProfile, Workload, figure
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.assessment import Assessment
from services.planner.messages import why_budgets, why_kept
from services.planner.observer import ObservedModel
from services.planner.role_planner import ModelPlan

ENGINE = WorkerProfile(
    StepTimeModel(8e6, 60_000.0, 0.0, 12e6, 25_000.0, 8.0, interference=0.3),
    chunk_tokens=2048,
    max_sequences=256,
    kv_tokens=400_000,
)
WORK = Workload(prompts=6.0, decodes=40, kv_tokens=40_000, tpot_ns=50_000_000)
SPLITS = [Split(2, 2, 2.4, 0.2), Split(3, 1, 1.7, 0.4)]


def judged(prompts: float) -> Assessment:
    work = replace(WORK, prompts=prompts)
    return Assessment("sim", ENGINE, work, Split(2, 2, prompts / 2, 0.2))


def plan(assigned: RolePlan, assessment: Assessment | None) -> ModelPlan:
    standings = [
        PlannedWorker("p0", Role.PREFILL, 0, movable=True, prompt_tokens=0, kv_tokens=0),
        PlannedWorker("m0", Role.MIXED, 2048, movable=True, prompt_tokens=0, kv_tokens=0),
    ]
    return ModelPlan(
        ObservedModel("sim", ENGINE, WORK, standings), assigned, budgets=assigned.budgets, assessment=assessment
    )


def kept(assessment: Assessment | None) -> str:
    assigned = RolePlan((), (), RoleReason.TOO_SMALL, SPLITS[0], SPLITS[0], SPLITS, Memory())
    return why_kept([plan(assigned, assessment)])


def test_a_queue_of_a_second_is_not_called_more_than_there_is_room_for() -> None:
    said = kept(judged(0.6))
    assert "pressure 0.3 on 2 prefill workers" in said
    assert said.endswith("; no split of roles computes all that waits within a second")


def test_work_beyond_every_split_is_described_as_such() -> None:
    for assessment in (judged(60.0), None):
        assert kept(assessment).endswith(", which is more than any split of roles has room for")


def test_budgets_that_end_because_separate_decodes_do_better_are_not_explained_by_low_load() -> None:
    order = RoleOrder("m0", Role.MIXED, 0)
    code, memory = RoleReason.PROMPTS_PRESS, Memory(apart=Apart(on=True))
    apart = RolePlan((), [order], code, SPLITS[0], SPLITS[0], SPLITS, memory)
    said = why_budgets(plan(apart, judged(1.4)), apart)
    assert said.startswith("more work is done with prompts on 2 prefill workers only, at a pressure of 0.7")
    calm = replace(apart, code=RoleReason.CALM, memory=Memory())
    assert "for 10 s" in why_budgets(plan(calm, judged(0.2)), calm)


def test_an_infinite_pressure_is_not_shown_as_a_figure() -> None:
    none = Split(0, 2, 1_000.0, 0.2)
    order = RoleOrder("m0", Role.MIXED, 4096)
    lending = RolePlan((), [order], RoleReason.PROMPTS_PRESS, none, none, [none], Memory())
    said = why_budgets(plan(lending, judged(1.4)), lending)
    assert said.startswith("no worker is for prompts alone")
    assert "1000" not in said
    assert figure(1_000.0) == "more than 1000"
