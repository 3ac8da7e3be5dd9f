"""Tests of the inputs of role decisions: a model's engine, work and workers, from telemetry and gateways."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    Assignment,
    Capabilities,
    Load,
    StepTime,
    Worker,
)
from libs.contracts.protocol import FRESH_NS
from libs.contracts.roles import role_from_name
from libs.perfmodel.learner import FittedModel, KindFit
from libs.perfmodel.profiles import PROFILES
from libs.perfmodel.wire import step_time_message
from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.role_planning import Memory, assign
from libs.policy.pressure import Workload
from libs.telemetry.gateways import ModelBacklog
from libs.testing.workers.telemetry import MS, Telling, at, step, step_batch
from services.planner.advisor import STOOD_NS, Advisor
from services.planner.fleet_view import FleetView, MessageOutcome, WorkerColumns
from services.planner.observer import Look, ObservedModel, Observer
from tests.planner_rig import Cluster

WINDOW_MS = 1_000
NOW_NS = at(WINDOW_MS)
TPOT_NS = 50_000_000
MODEL = PROFILES["llama-8b-h100"].step_time
STEP_TIME = step_time_message(FittedModel(MODEL))
CAN = Capabilities(block_size_tokens=16, kv_blocks=1_000, max_sequences=64, chunk_tokens=512)


class Said:
    """The last report of a worker: it is registered, has spent that share of the window on prompts, and reported
    that long ago in that many incarnations. None: it has not reported its step times."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        load: Load | None = None,
        prefill: float = 0.0,
        state: Any = WORKER_STATE_READY,
        can: Capabilities = CAN,
        model: str = "sim",
        ago_ns: int = 0,
        incarnation: int = 1,
        step_time: StepTime | None = STEP_TIME,
    ) -> None:
        wire_role, budget_tokens = role_from_name(role, 64 if role == "mixed" else 0)
        assignment = Assignment(model=model, role=wire_role, budget_tokens=budget_tokens, epoch=1)
        self.worker = Worker(id=name, incarnation=1, state=state, assignment=assignment, capabilities=can)
        self.ago_ns = ago_ns
        batch = step_batch(
            1, (0, WINDOW_MS), [step(0, prefill * WINDOW_MS, prefill=1)] if prefill else [], worker=name,
            load=load or Load(free_kv_blocks=can.kv_blocks), incarnation=incarnation,
        )  # fmt: skip
        batch.assignment.CopyFrom(assignment)
        batch.ClearField("step_time")
        if step_time is not None:
            batch.step_time.CopyFrom(step_time)
        self.batch = batch


def worker(name: str, role: str, **said: Any) -> Said:
    return Said(name, role, **said)


def observed(*workers: Said, waiting: dict[str, ModelBacklog] | None) -> list[ObservedModel]:
    view = FleetView(WINDOW_MS * MS, 0)
    view.take_roster(WorkerColumns([each.worker for each in workers], "planner"))
    for each in workers:
        assert (
            view.take(Telling(each.worker.id).loads([each.batch], NOW_NS), NOW_NS - each.ago_ns)
            is MessageOutcome.COUNTED
        )
    pinned = view.roster.pinned((), NOW_NS)
    look = Look({}, waiting, lambda _model: TPOT_NS, pinned, NOW_NS, NOW_NS)
    return list(Observer(view).look(look).models)


def look(*workers: Said, waiting: ModelBacklog | None = None, gateways: bool = True) -> ObservedModel:
    (found,) = observed(*workers, waiting=({"sim": waiting} if waiting else {}) if gateways else None)
    return found


def test_prefill_demand_is_computed_prompts_and_those_waiting_at_workers_and_gateways() -> None:
    rest = look(worker("p", "prefill", prefill=0.5), worker("d", "mixed", prefill=0.25))
    assert rest.work.prompts == pytest.approx(0.75)
    assert rest.engine is not None
    a_second = round(rest.engine.chunk_speed * 1e9)
    load = Load(waiting_prefill_tokens=a_second)
    busy = look(
        worker("p", "prefill", prefill=1.0, load=load),
        worker("d", "decode"),
        waiting=ModelBacklog(
            prefill_requests=3,
            prefill_tokens=a_second,
            decode_requests=1,
            decode_prompt_tokens=a_second,
            hopeful_tokens=2 * a_second,
        ),
    )
    of_such_length = rest.engine.speed_at(2 * a_second / 4)
    assert busy.work.prompts == pytest.approx(1.0 + 3 * a_second / (of_such_length * 1e9), rel=1e-3)
    assert of_such_length < rest.engine.chunk_speed


def test_late_prompts_add_pressure_only_if_nothing_is_served() -> None:
    late = ModelBacklog(prefill_requests=3, prefill_tokens=50_000, hopeful_tokens=0)
    served = look(worker("p", "prefill", prefill=0.5), worker("d", "decode"), waiting=late)
    assert served.work.prompts == pytest.approx(0.5)
    stuck = look(worker("d", "decode"), worker("e", "decode"), waiting=late)
    assert stuck.work.prompts > 0


def test_decode_demand_is_all_running_or_imminent_sequences_without_waiting_prompts() -> None:
    found = look(
        worker("p", "prefill", load=Load(running=1, waiting=2, waiting_prefill_tokens=300, free_kv_blocks=900)),
        worker("d", "decode", load=Load(running=4, waiting=1, awaiting_kv=2, free_kv_blocks=990)),
    )
    assert (found.work.decodes, found.work.kv_tokens, found.work.tpot_ns) == (8, 100 + 160, TPOT_NS)


def test_sequences_that_wait_for_decode_at_gateways_count_with_the_average_size() -> None:
    decode = worker("d", "decode", load=Load(running=2, free_kv_blocks=980))
    found = look(worker("p", "prefill"), decode, waiting=ModelBacklog(decode_requests=3))
    assert (found.work.decodes, found.work.kv_tokens) == (2, 320)
    assert (found.work.held, found.work.held_kv_tokens) == (3, 3 * 160)


def test_each_part_of_the_step_times_comes_from_the_worker_with_most_samples_of_its_kind() -> None:
    slow = FittedModel(MODEL.scaled(2.0), prefill=KindFit(steps=500), decode=KindFit(steps=1))
    quick = FittedModel(MODEL.scaled(0.5), prefill=KindFit(steps=3), decode=KindFit(steps=900))
    engine = look(
        worker("p", "prefill", step_time=step_time_message(slow)),
        worker("d", "decode", step_time=step_time_message(quick)),
    ).engine
    assert engine is not None
    assert engine.step_time.prefill_token_ns == pytest.approx(2 * MODEL.prefill_token_ns)
    assert engine.step_time.decode_fixed_ns == pytest.approx(MODEL.decode_fixed_ns / 2)


def test_an_engine_has_the_capabilities_of_the_weakest_worker() -> None:
    small = Capabilities(block_size_tokens=16, kv_blocks=10, max_sequences=8, chunk_tokens=256)
    engine = look(worker("p", "prefill"), worker("d", "decode", can=small)).engine
    assert engine is not None
    assert (engine.chunk_tokens, engine.max_sequences, engine.kv_tokens) == (256, 8, 160)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step_time": None}, "how long its steps take"),
        ({"step_time": StepTime()}, "how long its steps take"),
        ({"ago_ns": FRESH_NS}, "0 of 2 workers report"),
        ({"incarnation": 2}, "0 of 2 workers report"),
    ],
    ids=["no model", "a model of zeros", "silent", "another life"],
)
def test_nothing_is_decided_on_unknown_figures(change: dict[str, Any], says: str) -> None:
    found = look(worker("p", "prefill", **change), worker("d", "decode", **change))
    assert found.engine is None
    assert says in found.unknown


def test_nothing_is_decided_while_every_gateway_is_silent() -> None:
    found = look(worker("p", "prefill"), worker("d", "decode"), gateways=False)
    assert found.engine is None
    assert "no gateway reports" in found.unknown


def test_without_capabilities_nothing_is_decided() -> None:
    nothing = Capabilities()
    found = look(worker("p", "prefill", can=nothing), worker("d", "decode", can=nothing))
    assert (found.engine, found.unknown) == (
        None, "no worker has said how many tokens and sequences a step takes",
    )  # fmt: skip


def test_a_worker_that_is_silent_draining_or_without_work_is_not_moved() -> None:
    other = Capabilities(block_size_tokens=16, kv_blocks=1_000, max_sequences=64, chunk_tokens=512, kv_layout="other")
    found = look(
        worker("a", "decode"),
        worker("b", "decode", ago_ns=FRESH_NS),
        worker("c", "decode", state=WORKER_STATE_DRAINING),
        worker("d", "decode", can=other),
        worker("p", "prefill"),
    )
    assert [each.id for each in found.standings if each.movable] == ["a", "p"]
    assert found.engine is not None


def test_models_are_assessed_one_by_one() -> None:
    workers = [worker("a", "prefill", model="one"), worker("b", "prefill", model="two", prefill=1.0)]
    assert [(each.model, each.work.prompts) for each in observed(*workers, waiting={})] == [("one", 0.0), ("two", 1.0)]


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
loads = st.builds(
    Load, running=u32, waiting=u32, awaiting_kv=u32, waiting_prefill_tokens=u64, free_kv_blocks=u32
)  # fmt: skip
capabilities = st.builds(Capabilities, block_size_tokens=u32, kv_blocks=u32, max_sequences=u32, chunk_tokens=u32)
times = st.floats(0, 1e14)
step_times = st.builds(
    StepTime, prefill_floor_ns=times, prefill_fixed_ns=times, prefill_token_ns=times, prefill_token_squared_ns=times,
    decode_fixed_ns=times, decode_sequence_ns=times, decode_kv_token_ns=times, interference=st.floats(-1, 2),
    decode_matrix_ns=times,
)  # fmt: skip


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "mixed", "standby"]), loads, capabilities, step_times),
        min_size=1,
        max_size=5,
    )
)
def test_each_figure_of_workers_is_either_used_or_unknown(
    said: list[tuple[str, Load, Capabilities, StepTime]],
) -> None:
    workers = [
        worker(str(i), role, load=load, can=can, step_time=step_time)
        for i, (role, load, can, step_time) in enumerate(said)
    ]
    found = look(*workers)
    if found.engine is None:
        assert found.unknown
        return
    assigned = assign(found.engine, found.work, found.standings, Memory(), NOW_NS)
    assert not math.isnan(assigned.now.pressure)
    assert {each.worker_id for each in assigned.changes} <= {each.id for each in found.standings if each.movable}


def test_kv_speed_of_workers_is_known_and_a_slow_link_becomes_advice() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    for worker in cluster.workers.values():
        worker.capabilities.kv_block_bytes = worker.capabilities.block_size_tokens * 100_000
    cluster.decide(p=0.4)
    for worker, token_ns in (("d", 10_000.0), ("e", 200_000.0), ("p", float("nan"))):
        batch = step_batch(cluster.ms + 1, (cluster.ms, cluster.ms + 1), [], worker=worker, role="decode")
        batch.assignment.CopyFrom(cluster.workers[worker].assignment)
        batch.step_time.CopyFrom(STEP_TIME)
        batch.step_time.kv_token_ns = token_ns
        cluster.hear(batch, cluster.ms + 1)
    cluster.state.decide(at(cluster.ms + 1))
    (plan,) = cluster.state.plans
    assert [(each.worker_id, each.gb_per_s) for each in plan.observed.links] == [("d", 10.0), ("e", 0.5)]
    assert plan.observed.engine.kv_token_ns == 10_000.0, "the usual link bounds roles, a slow one is to be mended"
    advisor = Advisor()
    given = [
        decision
        for second in range(STOOD_NS // 1_000_000_000 + 1)
        for decision, new in advisor.look(plan, ModelLimits(), at(cluster.ms + 1_000 * second))
        if new
    ]
    (link,) = [each for each in given if each.reason_code == "link"]
    assert link.advice.command == "fulcrum doctor"
    assert "KV comes to e at 0.5 GB/s, to others at 10.0" in link.reason
    now_ms = cluster.ms + STOOD_NS // MS
    healed = replace(plan, observed=replace(plan.observed, links=(), work=Workload(0.0, 0, 0, TPOT_NS)))
    ended = [
        (second, decision.advice.outcome)
        for second in range(1, 20)
        for decision, _ in advisor.look(healed, ModelLimits(), at(now_ms + 1_000 * second))
        if decision.reason_code == "link"
    ]
    assert ended == [(6, "expired")], "without work no model needs it"
