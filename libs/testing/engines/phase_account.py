"""An engine's time by phase as the metrics service would tell it, without worker, bus or service around it."""

import asyncio
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.engine.port import Engine
from libs.engine.reports import EngineEvent
from libs.perfmodel.learner import FittedModel, StepTimeLearner
from libs.perfmodel.profiles import prior_step_time
from libs.perfmodel.wire import step_time_message
from libs.policy.step_time import StepTimeModel
from libs.runtime.clock import Clock
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.steps import PhaseTime, prefill_shares
from libs.worker.telemetry import StepBatchBuilder, TelemetrySource, work_of

CUT_S: Final = 0.1
REFIT_CUTS: Final = 20
WORKER: Final = "one"


class PhaseAccount:
    """Step telemetry of one engine, cut and entered as a worker and the metrics service do it."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        worker_id: str = WORKER,
        gpus: int = 1,
        fleet: FleetTelemetry | None = None,
    ) -> None:
        """Into a fleet of its own, or into one that others enter into too."""
        self._worker_id = worker_id
        self._engine = engine
        self._clock = clock
        self._builder = StepBatchBuilder(TelemetrySource(worker_id, 1, "node", gpus, engine.name), clock.now_ns())
        self._learner = StepTimeLearner(prior_step_time(engine.name, engine.device))
        self._fleet = fleet or FleetTelemetry(prefill_shares)

    @property
    def model(self) -> StepTimeModel:
        """What was learned of the engine's steps, by which mixed ones are split."""
        return self._learner.model

    @property
    def fitted(self) -> FittedModel:
        """The fitted model with the errors of its predictions."""
        return self._learner.fitted()

    def on_event(self, event: EngineEvent) -> None:
        """Take an engine event in."""
        self._builder.add(event, 1)
        if event.step is not None and event.step.end_unix_ns:
            self._learner.add(work_of(event.step), event.step.end_unix_ns - event.step.start_unix_ns)

    async def run(self) -> None:
        """Cut batches until cancelled."""
        cuts = 0
        while True:
            await asyncio.sleep(CUT_S)
            cuts += 1
            if cuts % REFIT_CUTS == 0:
                self._learner.refit()
            self.cut()

    def cut(self) -> None:
        """Enter what has gathered."""
        now_ns = self._clock.now_ns()
        step_time = step_time_message(self._learner.fitted())
        batch = self._builder.cut(now_ns, self._engine.load(), Assignment(epoch=1), step_time=step_time)
        if batch is not None:
            self._fleet.add(batch, now_ns)

    def phases(self, low_ns: int, high_ns: int) -> PhaseTime:
        """How the engine spent [low, high)."""
        return self._fleet.phases(self._worker_id, low_ns, high_ns)
