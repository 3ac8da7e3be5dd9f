"""Tests that status and planner share one assessment and recommend the same change."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Assignment, Capabilities, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_RECOMMEND,
    MODE_ADVISORY,
    MODE_AUTO,
    MODE_OFF,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.contracts.ranges import fault_of
from libs.policy.pressure import Split, WorkerProfile, Workload
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.advice import Action
from libs.policy.verdict.assessment import Assessment
from libs.telemetry.assessments import FRESH_NS, assessment_message, assessments_of
from libs.telemetry.fleet_loads import LoadMessageBuilder
from libs.testing.workers.telemetry import MS, at
from services.metrics.stream import LoadPublisher
from services.planner.http.answers import planner_answer
from services.planner.state import Identity, PlannerState
from tests.unit.metrics.test_status import Cluster as JudgedCluster

ROLES = ("prefill", "prefill", "decode", "decode", "decode", "decode")


class BothServices:
    """A metrics service and a planner over the same six workers."""

    def __init__(self, mode=MODE_ADVISORY):
        self.metrics = JudgedCluster()
        self.planner = PlannerState(
            Identity("planner-0", at(0), mode), lag_ns=50 * MS, window_ns=1_000 * MS, kept_decisions=50
        )
        self.loads = LoadPublisher(
            LoadMessageBuilder("m", 1), self._take_loads, assessments=self.metrics.verdicts.assessments
        )
        self.metrics.on_queues = self.planner.take_queues
        workers = [
            Worker(
                id=f"gpu-{number}", incarnation=1, engine="sim", state=WORKER_STATE_READY, gpus=1,
                assignment=Assignment(model="sim", role="ROLE_PREFILL" if role == "prefill" else "ROLE_MIXED", epoch=1),
                capabilities=Capabilities(
                    block_size_tokens=16, kv_blocks=1_000, max_sequences=64, chunk_tokens=512, max_context_tokens=32_768
                ),
            )
            for number, role in enumerate(ROLES)
        ]  # fmt: skip
        self.planner.take_workers(workers, at(0))

    def _take_loads(self, loads):
        loads = FleetLoads.FromString(loads.SerializeToString())
        assert not fault_of(loads, loads.ByteSize())
        self.planner.take_loads(loads, self.now_ns)

    @property
    def now_ns(self):
        return at(100 * self.metrics.tenth)

    async def run(self, tenths, **load):
        """Run both and decide each tenth of a second; return the last decisions."""
        decided = None
        for _ in range(tenths):
            await self.metrics.run(1, **load)
            self.loads.publish(self.metrics.state.fleet, self.now_ns)
            decided = self.planner.decide(self.now_ns)
        return decided

    def voices(self):
        """The figures of both: pressures of prefill and decode."""
        status, planner = self.metrics.status(), planner_answer(self.planner, self.now_ns)
        of_status, of_planner = status.models[0], planner.models[0].now
        return (
            (of_status.prefill.pressure, of_status.decode.pressure),
            (of_planner.prompt_pressure, of_planner.decode_pressure),
        )


async def test_status_and_planner_name_the_same_pressures_and_the_same_change():
    both = BothServices()
    await both.run(12)
    flood = {"waiting_tokens": 200_000, "come": 4_000}
    for _ in range(30):
        await both.run(1, **flood)
        of_status, of_planner = both.voices()
        assert of_status == of_planner
    action = both.metrics.status().verdict.action
    advised = [each for each in both.planner.decisions if each.action == ACTION_RECOMMEND][-1]
    assert [each.worker_id for each in advised.changes] == action.workers
    assert advised.reason_code == "prefill_bound" and advised.reason.startswith("Prefill-bound: pressure ")
    assert advised.changes[0].assignment.role == 1


async def test_an_acting_planner_recommends_no_role_change_beside_its_own():
    both = BothServices(MODE_AUTO)
    await both.run(12)
    await both.run(30, waiting_tokens=200_000, come=4_000)
    assert both.metrics.status().verdict.code == "prefill_bound"
    assert ACTION_RECOMMEND not in {each.action for each in both.planner.decisions}


async def test_nothing_is_recommended_if_the_verdict_gives_no_advice():
    both = BothServices()
    await both.run(30, waiting_tokens=20_000, come=100)
    assert both.metrics.status().verdict.code == "balanced"
    assert {each.action for each in both.planner.decisions} == {ACTION_KEEP}
    alone = BothServices()
    alone.loads = LoadPublisher(LoadMessageBuilder("m", 1), alone._take_loads)
    await alone.run(30, waiting_tokens=20_000, come=100)
    assert ACTION_RECOMMEND in {each.action for each in alone.planner.decisions}, "by its own count of the queue"


async def test_an_acting_planner_gives_the_pressures_shown_by_the_status_as_its_reason():
    both = BothServices(MODE_AUTO)
    both.planner.set_mode(MODE_OFF, "me", both.now_ns)
    await both.run(40, waiting_tokens=100_000, come=1_000)
    both.planner.set_mode(MODE_AUTO, "me", both.now_ns)
    decided = await both.run(1, waiting_tokens=100_000, come=1_000)
    (of_status, _), _ = both.voices()
    changed = [each for each in decided.decisions if each.changes]
    assert changed and all(f"prefill pressure {of_status:.1f} on" in each.reason for each in changed)


async def test_a_planner_that_acts_before_the_status_shows_pressure_names_a_starting_queue():
    """What came before: "prefill pressure 0.0 on 2 prefill workers; 4 decode workers ... leave 0.0"."""
    both = BothServices(MODE_AUTO)
    await both.run(12)
    decided = await both.run(1, waiting_tokens=20_000, come=100)
    reasons = [each.reason for each in decided.decisions if each.changes]
    assert reasons == [
        "a queue of prompts begins on 2 prefill workers; 4 decode workers take up to 512 prompt tokens a step"
    ]


async def test_orders_that_no_worker_has_carried_out_change_no_shown_figure():
    both = BothServices(MODE_AUTO)
    await both.run(12, waiting_tokens=60_000, come=1_500)
    (plan,) = both.planner.looked(both.now_ns)
    ordered = replace(plan.assigned, now=Split(3, 3, 0.1, 0.2))
    assert plan.shown_now(ordered) == plan.shown_now(plan.assigned) == plan.assessment.standing


async def test_an_old_assessment_is_not_shown_as_current():
    both = BothServices()
    await both.run(12, waiting_tokens=20_000, come=100)
    (plan,) = both.planner.looked(both.now_ns)
    assert plan.assessment is not None
    both.planner.decide(both.now_ns + FRESH_NS + MS)
    assert both.planner.plans[0].assessment is None


PRESSURES = st.floats(0, 1_000)
COUNTS = st.integers(0, 2**31)


@given(
    st.tuples(PRESSURES, COUNTS, COUNTS, st.integers(0, 2**40), st.floats(0, 1e15)),
    st.tuples(PRESSURES, PRESSURES),
    st.sampled_from([("prefill", 0), ("decode", 0), ("mixed", 512), None]),
)
def test_an_assessment_survives_the_wire_unchanged(work, pressures, role):
    engine = WorkerProfile(StepTimeModel(8e6, 6e4, 0.0, 15e6, 3e5, 25.0, interference=1.0), 512, 64, 16_000)
    action = None if role is None else Action(("a", "b"), *role, 0.5, id="m/1", since_ns=at(5))
    because = ("", "") if role is None else ("prefill_bound", "Prefill-bound: pressure 1.7.")
    found = Assessment("m", engine, Workload(*work), Split(2, 3, *pressures), 4, action, *because)
    message = assessment_message(found)
    assert not fault_of(message, message.ByteSize())
    assert assessments_of([message]) == {"m": found}


def test_an_invalid_assessment_is_ignored():
    engine = WorkerProfile(StepTimeModel(8e6, 6e4, 0.0, 15e6, 3e5, 25.0, interference=1.0), 512, 64, 16_000)
    message = assessment_message(Assessment("m", engine, Workload(1.0, 2, 3, 4), Split(1, 1, 0.5, 0.5)))
    message.prefill_pressure = math.nan
    assert assessments_of([message]) == {}
    message.prefill_pressure, message.chunk_tokens = 1.0, 0
    assert assessments_of([message]) == {}
