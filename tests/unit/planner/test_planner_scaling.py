"""Tests of the planner's requests to an actuator, and that they never delay decisions about roles."""

from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_RECOMMEND,
    ACTION_SCALE,
    ACTION_SET_ROLE,
    MODE_ADVISORY,
    MODE_AUTO,
    Decision,
)
from libs.contracts.roles import role_name
from libs.demand.wire import plan_message
from libs.policy.capacity import PHASES, CapacityPlan, Phase, PoolHour
from libs.testing.memory.actuator import MemoryActuator
from libs.testing.workers.hosts import RecordingBus
from libs.testing.workers.telemetry import at
from services.planner.fleet_view import MessageOutcome, ReceivedPlans
from services.planner.http.answers import decision_answer
from services.planner.http.limits_api import LimitsBody
from services.planner.scaler import Scaler, ScalerSettings
from services.planner.state import Decided
from tests.planner_rig import WINDOW_MS, Cluster, registered

BUSY = dict.fromkeys("pd", 0.98)
START_UP_NS = 2_000_000_000


class RigClock:
    """The clock of a rig."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def now_ns(self) -> int:
        return at(self._cluster.ms)


class Memory:
    """The content of a planner's store."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    async def recall(self, what: str) -> str | None:
        return self.kept.get(what)

    async def remember(self, what: str, written: str) -> bool:
        self.kept[what] = written
        return True


class Town:
    """A cluster whose actuator's workers register as soon as they are started."""

    def __init__(self, mode: Any = MODE_AUTO, most: int = 2, *, memory: Memory | None = None) -> None:
        self.cluster = Cluster(mode, p="prefill", d="decode")
        self.actuator = MemoryActuator(most, on_start=self._come, on_end=self._go)
        self.bus = RecordingBus()
        self.memory = memory or Memory()
        self.plans = ReceivedPlans(RigClock(self.cluster))
        self.scaler = self.make_scaler(self.actuator)

    def make_scaler(self, *actuators: MemoryActuator) -> Scaler:
        store: Any = self.memory
        return Scaler(
            self.cluster.state, self.bus, RigClock(self.cluster), actuators=actuators,
            settings=ScalerSettings(START_UP_NS), store=store, plans=self.plans,
        )  # fmt: skip

    def _come(self, name: str) -> None:
        self.cluster.workers[name] = registered(name, "standby")

    def _go(self, name: str) -> None:
        self.cluster.workers.pop(name, None)

    async def second(self, waits: int = 0, **busy: float) -> Decided:
        self.cluster.queue(waits)
        decided = self.cluster.decide(None, **busy)
        self.cluster.carry_out(decided)
        await self.scaler.look()
        return decided

    @property
    def decisions(self) -> list[Decision]:
        """Return the published decisions that are not about roles."""
        return [each for each in self.bus.published if isinstance(each, Decision)]

    def roles(self) -> dict[str, str]:
        return {name: role_name(each.assignment) for name, each in self.cluster.workers.items()}


async def flooded(town: Town, seconds: int = 8) -> list[Decided]:
    return [await town.second(200_000, **BUSY) for _ in range(seconds)]


async def test_workers_are_started_and_get_roles_if_no_split_has_room() -> None:
    town = Town()
    found = await flooded(town)
    assert len(town.actuator.worker_ids) == 2
    assert {town.roles()[name] for name in town.actuator.worker_ids} <= {"prefill", "mixed", "decode"}
    (scale, *_) = [each for each in town.decisions if each.action == ACTION_SCALE]
    answer = decision_answer(scale)
    assert answer.reason_code == "too_small" and answer.scale is not None
    assert (answer.scale.serving, answer.scale.started_to, answer.scale.actuator) == (2, 2, "memory")
    called = [
        change.worker_id
        for each in found
        for decision in each.decisions
        if decision.action == ACTION_SET_ROLE
        for change in decision.changes
    ]
    assert {"spare-1", "spare-2"} <= set(called)


async def test_the_actuator_shows_what_its_workers_do() -> None:
    town = Town()
    await flooded(town, 3)
    await town.second(0)
    lent = {name: {"mixed": "decode"}.get(role, role) for name, role in town.roles().items()}
    assert town.actuator.shown == lent, "budgets that a planner lends come and go within seconds"


@pytest.mark.parametrize("trouble", ["away", "slow"])
async def test_a_slow_or_absent_actuator_delays_no_decision_and_is_called_again(trouble: str) -> None:
    town = Town()
    if trouble == "away":
        town.actuator.away = True
    else:
        town.actuator.slow = 3
    found = await flooded(town, 3)
    assert all(each.decisions for each in found) and town.actuator.worker_ids == []
    town.actuator.away = False
    await flooded(town, 8)
    assert len(town.actuator.worker_ids) == 2


async def test_limits_bound_the_number_of_started_workers_and_advisory_mode_starts_none() -> None:
    town = Town()
    limits = LimitsBody(every={"workers_max": 3}).limits()
    town.cluster.state.set_limits(limits, "me", "", at(0))
    await flooded(town)
    assert len(town.actuator.worker_ids) == 1
    advisory = Town(MODE_ADVISORY)
    await flooded(advisory)
    assert advisory.actuator.worker_ids == []
    assert {each.action for each in advisory.decisions} == {ACTION_RECOMMEND}


async def test_a_restarted_planner_continues_with_the_existing_workers_and_their_gpu_time() -> None:
    town = Town()
    await flooded(town, 14)
    charged = town.memory.kept["scale"]
    started = list(town.actuator.worker_ids)
    town.scaler = again = town.make_scaler(town.actuator)
    await again._restore()
    assert dict(again._memories["sim"].spent_gpu_s).popitem()[1] > 1 and "sim" in charged
    await flooded(town, 5)
    assert town.actuator.worker_ids == started


async def test_without_an_actuator_more_workers_are_advised_and_their_effect_is_reported() -> None:
    town = Town()
    town.scaler = town.make_scaler()
    await flooded(town, 7)
    (advised,) = [each for each in town.decisions if each.advice.kind == "add_workers"]
    answer = decision_answer(advised).advice
    assert answer is not None and answer.outcome == "open"
    assert answer.low <= answer.high < 0 and answer.command.startswith("fulcrum planner limits")
    town.cluster.workers |= {name: registered(name, "prefill") for name in ("x", "y", "z")}
    for _ in range(14):
        await town.second(0, p=0.3)
    found = decision_answer([each for each in town.decisions if each.advice.kind == "add_workers"][-1]).advice
    assert found is not None and (found.outcome, found.came < 0) == ("applied", True)


async def test_a_move_is_reported_with_the_predicted_course_without_it() -> None:
    cluster = Cluster(a="decode", b="decode", c="decode", p="prefill")
    cluster.decide()
    cluster.state.set_limits(LimitsBody(every={"prefill_min": 2}).limits(), "me", "", at(0))
    cluster.queue(20_000)
    decided = cluster.decide(p=0.9)
    moved = next(each for each in decided.decisions if each.action == ACTION_SET_ROLE)
    cluster.carry_out(decided)
    for _ in range(3):
        cluster.queue(20_000)
        cluster.decide(p=0.9)
    found = decision_answer(moved).counterfactual
    assert found is not None and found.method == "closed_form"
    assert (found.without.prefill, found.with_it.prefill) == (1, 2)
    assert found.without.ttft_ms >= found.with_it.ttft_ms
    assert found.over_ms >= WINDOW_MS


async def test_regret_is_reported_by_cause_and_survives_a_restart() -> None:
    town = Town(MODE_ADVISORY)
    await flooded(town, 12)
    ledger = town.cluster.state.ledger
    lost = ledger.regret(at(town.cluster.ms), 3_600_000_000_000)
    assert lost.gpu_hours == pytest.approx(2 * 11 / 3600, rel=0.01)
    assert lost.by_cause["too_small"] > 0 and lost.by_cause["late"] == 0
    assert lost.lost_gpu_hours <= lost.gpu_hours
    again = type(ledger)()
    again.take(ledger.written())
    assert again.regret(at(town.cluster.ms), 3_600_000_000_000).by_cause == pytest.approx(lost.by_cause, rel=1e-6)
    again.take("nonsense")


def day_ahead(made_s: float, needs: list[tuple[int, int]], *, step_s: float = 900.0) -> PlanMessage:
    """A plan made then, of so many prefill and decode workers in each stretch."""
    pools: dict[Phase, tuple[PoolHour, ...]] = {
        phase: tuple(PoolHour(count, count, count, max(count, 1), 1.0) for count in counts)
        for phase, counts in zip(PHASES, zip(*needs, strict=True), strict=True)
    }
    starts = tuple(made_s + at * step_s for at in range(len(needs)))
    plan = CapacityPlan(starts, step_s, pools, {}, 0.95, 0)
    return plan_message(plan, "sim", "metrics-0", round(made_s * 1e9))


async def test_workers_are_started_before_the_load_that_a_plan_forecasts() -> None:
    town = Town()
    town.plans.take(day_ahead(at(0) / 1e9, [(1, 1), (2, 2), (1, 1)]))
    await town.second()
    assert len(town.actuator.worker_ids) == 2
    (scale,) = [each for each in town.decisions if each.action == ACTION_SCALE]
    assert scale.reason_code == "forecast" and "4 are wished, 2 prefill and 2 decode" in scale.reason
    assert scale.reason.endswith("; 2 started workers in place of 0")
    assert town.scaler.forecast["sim"] == {"prefill": 2, "decode": 2}


async def test_mixed_workers_are_requested_as_one_pool() -> None:
    town = Town(most=8)
    for name in "pd":
        town.cluster.workers[name] = registered(name, "mixed")
    town.plans.take(day_ahead(at(0) / 1e9, [(3, 3)]))
    town.cluster.queue(0)
    town.cluster.decide(Load(free_kv_blocks=800, running=8))
    await town.scaler.look()
    assert town.scaler.forecast["sim"] == {"prefill": 3, "decode": 3}
    assert 1 <= len(town.actuator.worker_ids) < 4, "together with the two that are there, fewer than six"


async def test_limits_apply_to_forecasts_and_advisory_mode_only_reports_them() -> None:
    town = Town()
    town.cluster.state.set_limits(LimitsBody(every={"workers_max": 3}).limits(), "me", "", at(0))
    town.plans.take(day_ahead(at(0) / 1e9, [(4, 4)]))
    await town.second()
    assert len(town.actuator.worker_ids) == 1
    advisory = Town(MODE_ADVISORY)
    advisory.plans.take(day_ahead(at(0) / 1e9, [(2, 2)]))
    await advisory.second()
    assert advisory.actuator.worker_ids == []
    assert [(each.action, each.reason_code) for each in advisory.decisions] == [(ACTION_RECOMMEND, "forecast")]


@pytest.mark.parametrize(
    ("made_s", "needs"),
    [
        pytest.param(-7_200.0, [(4, 4)] * 20, id="an old plan"),
        pytest.param(7_200.0, [(4, 4)] * 20, id="one of a clock far ahead"),
        pytest.param(-1_800.0, [(4, 4)], id="one that says nothing of now"),
        pytest.param(0.0, [(0, 0)], id="one of an hour without work"),
        pytest.param(0.0, [(1, 1)], id="one that the workers there are enough for"),
    ],
)
async def test_a_plan_that_does_not_cover_the_present_starts_no_worker(
    made_s: float, needs: list[tuple[int, int]]
) -> None:
    town = Town()
    town.plans.take(day_ahead(at(0) / 1e9 + made_s, needs))
    await town.second()
    assert town.actuator.worker_ids == [] and town.decisions == []


def test_the_latest_of_two_plans_counts_and_an_invalid_one_is_ignored() -> None:
    town = Town()
    now_s = at(0) / 1e9
    assert town.plans.take(day_ahead(now_s, [(3, 3)])) is MessageOutcome.COUNTED
    assert town.plans.take(day_ahead(now_s - 60, [(5, 5)])) is MessageOutcome.OLD
    wrong = day_ahead(now_s + 1, [(5, 5)])
    for spoil in ("step_s", "length", "workers"):
        bad = PlanMessage.FromString(wrong.SerializeToString())
        if spoil == "step_s":
            bad.step_s = float("nan")
        elif spoil == "length":
            bad.decode.asked.append(1)
        else:
            bad.decode.asked[0] = 2**31
        assert town.plans.take(bad) is MessageOutcome.MALFORMED
    plan = town.plans.plan("sim")
    assert plan is not None and plan.pools["decode"][0].planned == 3
    assert town.plans.plan("another") is None


async def test_each_of_two_models_has_its_own_pool_and_an_absent_one_delays_no_other() -> None:
    town = Town()
    other = MemoryActuator(4, model="other")
    town.scaler = town.make_scaler(town.actuator, other)
    await flooded(town)
    assert len(town.actuator.worker_ids) == 2 and other.counts == [], "the other model has no request"
    other.away = True
    before = list(town.actuator.counts)
    town.actuator.worker_ids.clear()
    await flooded(town, 2)
    assert town.actuator.counts != before, "its own pool is requested again"


async def test_a_model_whose_pool_has_never_answered_is_left_unchanged() -> None:
    town = Town()
    town.actuator.away = True
    other = MemoryActuator(4, model="other")
    town.scaler = town.make_scaler(town.actuator, other)
    await flooded(town, 4)
    assert town.cluster.state.wishes == {} and other.counts == []
    town.actuator.away = False
    await flooded(town, 4)
    assert len(town.actuator.worker_ids) == 2 and other.counts == []


async def test_the_start_of_a_machine_extends_the_time_that_is_looked_ahead() -> None:
    town = Town(most=3)
    town.actuator.slow = 0
    assert town.scaler.start_up_ns("sim") == START_UP_NS
    town.actuator.worker_ids.append("spare-9")
    town.actuator.without_machine.add("spare-9")
    for _ in range(12):
        await town.second()
    assert town.scaler.start_up_ns("sim") >= START_UP_NS + 10 * 10**9
    assert town.scaler.start_up_ns("another model") == START_UP_NS
