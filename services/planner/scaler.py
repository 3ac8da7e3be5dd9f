"""The loop that decides the number of workers and calls actuators, on a time scale of seconds to minutes.

Decisions about roles never wait for it. It leaves its wishes in the planner's state.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.actuators.port import Actuator, ActuatorDown, Started
from libs.bus.port import Bus
from libs.contracts import metric_names as names
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_RECOMMEND,
    ACTION_SCALE,
    MODE_AUTO,
    MODE_OFF,
    Decision,
    Scale,
)
from libs.contracts.roles import role_name
from libs.contracts.topics import DECISIONS
from libs.policy.capacity import CapacityPlan, CapacityPlans, Phase, wishes
from libs.policy.planner.scaling import (
    CALM_NS,
    DAY_NS,
    LINGER_NS,
    ModelWorkers,
    RoleWish,
    Scaled,
    ScaleMemory,
    ScaleReason,
    StartUp,
    mixed_instead,
    scale,
)
from libs.policy.pressure import figure
from libs.policy.roles import Role
from libs.policy.verdict.causes import workers
from libs.runtime.clock import Clock
from services.planner.advisor import Advisor
from services.planner.fleet_view import ReceivedPlans, by_planner
from services.planner.kept import Lead, PlannerStore
from services.planner.role_planner import ModelPlan
from services.planner.state import PlannerState


def why_scaled(
    plan: ModelPlan,
    pool: ModelWorkers,
    found: Scaled,
    *,
    start_up_ns: int,
    calm_ns: int,
    acts: bool,
    forecast: Mapping[Phase, int],
) -> str:
    """Return the reason for which the wanted number of workers differs from the present one."""
    observed, there = plan.observed, f"{pool.serving} worker{'' if pool.serving == 1 else 's'} of {plan.observed.model}"
    wished = f"{found.wished} {'is' if found.wished == 1 else 'are'} wished"
    if found.code is ScaleReason.PRESSES and plan.assigned is not None:
        least = min((each.pressure for each in plan.assigned.candidates), default=plan.assigned.now.pressure)
        text = (
            f"a pressure of {figure(least)} in the best split of {there}, with the growth of the next"
            f" {start_up_ns / 1e9:.0f} s: {wished}"
        )
    elif found.code is ScaleReason.CALM:
        text = f"{there} have had room for one fewer for {calm_ns / 1e9:g} s: {wished}"
    elif found.code is ScaleReason.FORECAST:
        of_each = " and ".join(f"{count} {phase}" for phase, count in forecast.items())
        text = (
            f"{there} are too few for what is forecast by the time that one more would have started"
            f" ({start_up_ns / 1e9:.0f} s): {wished}, {of_each}"
        )
    elif found.code is ScaleReason.GPU_HOURS:
        text = f"the day's GPU-hours of started workers are spent: {workers(found.started, 'started')} may stay"
    elif found.code is ScaleReason.LIMITS:
        text = f"limits ask for another number than {there}: {wished}"
    else:
        text = f"{observed.model}: {wished}"
    started = f"; {workers(found.started, 'started')} in place of {pool.started}"
    return text + (started if acts and found.started != pool.started else "")


log = structlog.get_logger()

PERIOD_S: Final = 1.0
# The time limit of a call. A slower actuator is called again in the next period.
CALL_S: Final = 3.0
REGRET: Final = "regret"
# The interval between writes of data that must survive a restart.
KEEP_EVERY_NS: Final = 10_000_000_000
MAX_MODELS: Final = 64
# The name under which the GPU time of started workers is stored.
SCALE: Final = "scale"


class ActuatorCall(StrEnum):
    DONE = "done"
    FAILED = "failed"


class NoPlans:
    """The capacity plans of a cluster without forecasts."""

    def plan(self, model: str) -> CapacityPlan | None:
        del model
        return None


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    start_up_ns: int
    """The expected time from the start of a worker on an existing machine until it serves.

    Used until a start was measured.
    """
    machine_ns: int = 0
    """The expected wait for a machine. Used until a wait was measured."""
    calm_ns: int = CALM_NS
    linger_ns: int = LINGER_NS


class ActuatorPools:
    """An actuator and the last known state of its workers."""

    def __init__(self, actuator: Actuator, settings: ScalerSettings) -> None:
        self.actuator = actuator
        self.started: Started | None = None
        """The actuator's workers; None if the actuator did not answer the last call."""
        self.model = ""
        """The model that the actuator's workers serve; empty until the actuator has answered once."""
        self.start_up = StartUp(settings.start_up_ns, settings.machine_ns)

    def take(self, started: Started | None) -> None:
        self.started = started
        if started is not None:
            self.model = started.model


class Scaler:
    """A loop that decides the number of workers of each model.

    There may be at most one of `actuators` per model. Without any, the scaler only recommends.
    """

    def __init__(
        self,
        state: PlannerState,
        bus: Bus,
        clock: Clock,
        *,
        actuators: Sequence[Actuator],
        settings: ScalerSettings,
        store: PlannerStore | None = None,
        plans: CapacityPlans | None = None,
    ) -> None:
        self._state = state
        self._bus = bus
        self._clock = clock
        self._pools = [ActuatorPools(each, settings) for each in actuators[:MAX_MODELS]]
        self._store = store
        self._plans = plans or NoPlans()
        self._settings = settings
        self._advisor = Advisor()
        self._memories: dict[str, ScaleMemory] = {}
        self._last_reported: dict[str, tuple[int, int]] = {}
        self._kept_ns = 0
        self.calls = dict.fromkeys(ActuatorCall, 0)
        self.forecast: dict[str, Mapping[Phase, int]] = {}
        """The number of workers in each pool that capacity plans ask for, by model."""

    async def run(self) -> None:
        await self._restore()
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Run one round: observe, decide and call the actuators."""
        state, now_ns = self._state, self._clock.now_ns()
        if state.lead is not Lead.OURS or state.identity.mode == MODE_OFF:
            return
        for pools, started in zip(self._pools, await asyncio.gather(*map(self._look, self._pools)), strict=True):
            pools.take(started)
            self._learn(pools, now_ns)
        for plan in list(state.plans)[:MAX_MODELS]:
            for decision, new in self._advisor.look(plan, state.limits.of(plan.observed.model), now_ns):
                self._bus.publish(DECISIONS, state.record(decision, now_ns) if new else decision)
        wishes: dict[str, RoleWish] = {}
        for plan in list(state.plans)[:MAX_MODELS]:
            model = plan.observed.model
            if self._is_hidden(model):  # its workers are unknown, so the last wish stays
                if model in state.wishes:
                    wishes[model] = state.wishes[model]
            elif plan.assigned is not None:
                wishes[model] = await self._scale(plan, now_ns)
        await asyncio.gather(*map(self._show, self._pools))
        self.forecast = {model: each for model, each in self.forecast.items() if model in wishes}
        state.wishes = MappingProxyType(wishes) if state.identity.mode == MODE_AUTO else MappingProxyType({})
        if now_ns - self._kept_ns >= KEEP_EVERY_NS:
            self._kept_ns = now_ns
            await self._keep()

    def start_up_ns(self, model: str) -> int:
        """Return the expected time until a worker of this model serves if it is requested now."""
        pools = self._of(model)
        return pools.start_up.ahead_ns if pools is not None else self._settings.start_up_ns

    def _of(self, model: str) -> ActuatorPools | None:
        return next((each for each in self._pools if each.model == model), None)

    def _is_hidden(self, model: str) -> bool:
        """Return whether the model may have workers of an actuator that does not answer."""
        pools = self._of(model)
        if pools is not None:
            return pools.started is None
        return any(not each.model for each in self._pools)

    async def _scale(self, plan: ModelPlan, now_ns: int) -> RoleWish:
        observed, state, pools = plan.observed, self._state, self._of(plan.observed.model)
        assert observed.engine is not None
        ours = pools.started if pools is not None else None
        pool = pool_of(plan, ours)
        start_up_ns = self.start_up_ns(observed.model)
        forecast = wishes(self._plans, observed.model, now_ns / 1e9, start_up_ns / 1e9)
        self.forecast[observed.model] = forecast
        found = scale(
            observed.engine,
            observed.work,
            pool,
            state.limits.of(observed.model),
            memory=self._memories.get(observed.model, ScaleMemory()),
            now_ns=now_ns,
            start_up_ns=start_up_ns,
            forecast=forecast_workers(plan, forecast),
            calm_ns=self._settings.calm_ns,
            linger_ns=self._settings.linger_ns,
        )
        self._memories[observed.model] = found.memory
        acts = ours is not None and state.identity.mode == MODE_AUTO
        self._publish(plan, pool, found, acts=acts, now_ns=now_ns)
        if pools is not None and ours is not None and acts:
            # A worker with a role must go to standby before it is ended. A busy worker is never ended.
            count = max(found.started, pool.started_serving)
            if count != pool.started:
                await self._ask(pools.actuator, count, _first_to_end(plan, ours))
        serving = min(found.wished, pool.others + found.started) if ours is not None else pool.serving
        return RoleWish(serving, frozenset(ours.worker_ids) if ours is not None else frozenset())

    def _publish(self, plan: ModelPlan, pool: ModelWorkers, found: Scaled, *, acts: bool, now_ns: int) -> None:
        model = plan.observed.model
        now = found.wished, found.started
        before = self._last_reported.get(model, (pool.serving, pool.started))
        self._last_reported[model] = now
        news = now != before and not (found.code is ScaleReason.ENOUGH and found.started == before[1])
        if not news or not self._pools:  # without an actuator the wish becomes advice (see advisor.py)
            return
        pools = self._of(model)
        kind = pools.actuator.kind if acts and pools is not None else ""
        decision = Decision(
            action=ACTION_SCALE if acts else ACTION_RECOMMEND,
            model=model,
            reason_code=found.code.value,
            reason=why_scaled(
                plan,
                pool,
                found,
                start_up_ns=self.start_up_ns(model),
                calm_ns=self._settings.calm_ns,
                acts=acts,
                forecast=self.forecast.get(model, {}),
            ),
            scale=Scale(
                serving=pool.serving, standby=pool.standby, wished=found.wished, started_from=pool.started,
                started_to=found.started, actuator=kind,
            ),
        )  # fmt: skip
        self._bus.publish(DECISIONS, self._state.record(decision, now_ns))

    async def _look(self, pools: ActuatorPools) -> Started | None:
        try:
            async with asyncio.timeout(CALL_S):
                return await pools.actuator.look()
        except (ActuatorDown, TimeoutError) as error:
            self._failed(error)
            return None

    async def _show(self, pools: ActuatorPools) -> None:
        """Publish the present roles of workers to an actuator that displays them."""
        if pools.started is None:
            return
        planner_id = self._state.identity.planner_id
        roles = {
            each.id: shown_role(each, planner_id)
            for each in self._state.view.roster.workers
            if each.assignment.model == pools.model
        }
        try:
            async with asyncio.timeout(CALL_S):
                await pools.actuator.show(roles)
        except (ActuatorDown, TimeoutError) as error:
            log.warning(
                "workers' roles could not be passed to the actuator: retrying", error=str(error) or "it took too long"
            )

    async def _ask(self, actuator: Actuator, count: int, first_to_end: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await actuator.have(count, first_to_end=first_to_end)
            self.calls[ActuatorCall.DONE] += 1
        except (ActuatorDown, TimeoutError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.calls[ActuatorCall.FAILED] += 1
        log.warning("the actuator failed: retrying", error=str(error) or "it took too long")

    def _learn(self, pools: ActuatorPools, now_ns: int) -> None:
        """Measure the time from the start of workers until they are registered."""
        if pools.started is not None:
            pools.start_up.note(
                pools.started.worker_ids,
                without_machine=pools.started.without_machine,
                there=self._state.view.roster.index_of,
                now_ns=now_ns,
            )

    async def _restore(self) -> None:
        """Restore the GPU time that was charged before a restart."""
        if self._store is None:
            return
        self._state.ledger.take(await self._store.recall(REGRET))
        written = await self._store.recall(SCALE)
        for model, spent in read_scale(written).items():
            self._memories[model] = replace(ScaleMemory(), spent_gpu_s=MappingProxyType(spent))

    async def _keep(self) -> None:
        today = self._clock.now_ns() // DAY_NS
        spent = {name: memory.spent_gpu_s.get(today, 0.0) for name, memory in self._memories.items()}
        if self._store is not None:
            await self._store.remember(REGRET, self._state.ledger.written())
        if self._store is not None and any(spent.values()):
            await self._store.remember(SCALE, json.dumps({"day": today, "gpu_s": spent}))


def read_scale(written: str | None) -> Mapping[str, Mapping[int, float]]:
    """Parse the stored GPU time by model and day. Return an empty mapping if it is invalid."""
    try:
        found = json.loads(written) if written else {}
        day = int(found["day"])
        return {str(model): {day: float(spent)} for model, spent in list(found["gpu_s"].items())[:MAX_MODELS]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def forecast_workers(plan: ModelPlan, forecast: Mapping[Phase, int]) -> int:
    """Return the number of workers that a capacity plan asks for.

    It is the sum over both pools, or fewer if all serving workers of the model are mixed.
    """
    whole = sum(forecast.values())
    serving = [each for each in plan.observed.standings if each.role is not Role.STANDBY]
    if not whole or plan.observed.engine is None or any(each.role is Role.PREFILL for each in serving):
        return whole
    if not any(each.budget_tokens for each in serving):
        return whole
    return mixed_instead(
        plan.observed.engine, plan.observed.work, forecast.get("prefill", 0), forecast.get("decode", 0)
    )


def shown_role(worker: Worker, planner_id: str) -> str:
    # A decode worker with a prompt budget from the planner is shown as decode, because budgets come and go within
    # seconds.
    role = role_name(worker.assignment)
    return "decode" if role == "mixed" and by_planner(worker, planner_id) else role


def pool_of(plan: ModelPlan, started: Started | None) -> ModelWorkers:
    """Count a model's workers by role, and by whether the actuator started them."""
    ours = frozenset(started.worker_ids) if started is not None else frozenset()
    standings = plan.observed.standings
    serving = [each for each in standings if each.role is not Role.STANDBY]
    return ModelWorkers(
        others=sum(each.id not in ours for each in serving),
        started_serving=sum(each.id in ours for each in serving),
        standby=sum(each.id in ours and each.role is Role.STANDBY for each in standings),
        started=len(ours),
        most_started=started.most if started is not None else 0,
        gpus_a_worker=max(plan.observed.gpus // max(len(standings), 1), 1),
    )


def _first_to_end(plan: ModelPlan, started: Started) -> list[str]:
    """Return the started workers to end first: unregistered ones, then those on standby.

    Workers with a role are excluded.
    """
    roles = {each.id: each.role for each in plan.observed.standings}
    starting = [name for name in reversed(started.worker_ids) if name not in roles]
    return starting + [name for name in started.worker_ids if roles.get(name) is Role.STANDBY]


class ScalerCollector(Collector):
    """The metrics of the scaler, read at each scrape."""

    def __init__(self, scaler: Scaler, state: PlannerState, plans: ReceivedPlans) -> None:
        self._scaler = scaler
        self._state = state
        self._plans = plans

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(names.PLANNER_ACTUATOR_CALLS_TOTAL, "Calls to an actuator.", labels=("outcome",))
        for outcome, count in self._scaler.calls.items():
            calls.add_metric((outcome.value,), count)
        yield calls
        wished = GaugeMetricFamily(names.PLANNER_WISHED_WORKERS, "Workers that should have a role.", labels=("model",))
        for model, wish in self._state.wishes.items():
            wished.add_metric((model,), wish.serving)
        yield wished
        forecast = GaugeMetricFamily(
            names.PLANNER_FORECAST_WORKERS,
            "Workers that a capacity plan needs by the time at which new ones could serve.",
            labels=("model", "phase"),
        )
        for model, pools in self._scaler.forecast.items():
            for phase, count in pools.items():
                forecast.add_metric((model, phase), count)
        yield forecast
        received = CounterMetricFamily(
            names.PLANNER_CAPACITY_PLANS_TOTAL, "Capacity plans received from the bus.", labels=("outcome",)
        )
        for taken, count in self._plans.taken.items():
            received.add_metric((taken.value,), count)
        yield received
