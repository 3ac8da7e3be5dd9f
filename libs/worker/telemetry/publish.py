"""Publication of step telemetry: one batch each period, and one in several periods for a worker at rest."""

import asyncio
from typing import Final, NamedTuple

from libs.bus.port import Bus
from libs.contracts import topics
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.counters.sampler import GpuSampler
from libs.engine.reports import EngineEvent, EngineLoad
from libs.perfmodel.wire import step_time_message
from libs.runtime.clock import Clock
from libs.worker.host import WorkerHost
from libs.worker.kv.server import KvServicer
from libs.worker.telemetry.covers import StepBatchBuilder
from libs.worker.telemetry.step_times import StepTimes
from libs.worker.wire import load_message

# Periods that one batch of a worker at rest covers. They must end before windows are read, which end
# `FULCRUM_METRICS_LAG_MS` ago.
REST_PERIODS: Final = 3
# Upper bound on that cover, unless a single period is longer.
MAX_REST_S: Final = 0.3


class _ReportedState(NamedTuple):
    """The state in a batch beyond its events. A worker at rest has nothing else to report."""

    load: Load
    assignment: Assignment
    dropped_batches: int
    kv_pulls: int
    refused_kv_pulls: int


class TelemetryPublisher:
    """Cuts and publishes batches, and sends changed loads to gateways at the same pace."""

    def __init__(
        self,
        builder: StepBatchBuilder,
        host: WorkerHost,
        step_times: StepTimes,
        bus: Bus,
        clock: Clock,
        *,
        kv: KvServicer,
        gpus: GpuSampler,
        period_ms: int,
    ) -> None:
        self._builder = builder
        self._host = host
        self._step_times = step_times
        self._bus = bus
        self._clock = clock
        self._kv = kv
        self._gpus = gpus
        self._period_s = period_ms / 1000
        self._rest_s = max(self._period_s, min(REST_PERIODS * self._period_s, MAX_REST_S))
        self._reported: _ReportedState | None = None
        """The state that the last batch carried."""
        self._reported_s = 0.0

    def on_event(self, event: EngineEvent) -> None:
        """Add an engine event. A step belongs to the epoch it began in, however late it is reported."""
        epoch = self._host.assignment.current.epoch
        if event.step is not None:
            epoch = self._host.last_change.epoch_at(event.step.start_unix_ns, epoch)
        self._builder.add(event, epoch)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._period_s)
            # At rest batches come on a beat of periods too: half of one is what a period may be off.
            if not self._at_rest() or loop.time() - self._reported_s > self._rest_s - self._period_s / 2:
                self.publish()
                self._reported_s = loop.time()
            self._host.refresh_load()

    def publish(self, *, last: bool = False) -> None:
        """Publish the gathered events. `last` says that the worker leaves."""
        load = self._host.engine.load()
        said = self._say(load)
        step_time = step_time_message(self._step_times.fitted)
        step_time.kv_token_ns = self._host.speed.speed.kv_token_ns
        batch = self._builder.cut(
            self._clock.now_ns(),
            load,
            said.assignment,
            dropped_batches=said.dropped_batches,
            step_time=step_time,
            gpu_readings=self._gpus.take(),
            last=last,
        )
        if batch is not None:
            batch.load.kv_pulls, batch.load.refused_kv_pulls = said.kv_pulls, said.refused_kv_pulls
            self._bus.publish(topics.STEPS, batch)
            self._reported = said

    def _at_rest(self) -> bool:
        """Return whether nothing has happened since the last batch, no work is present, and its state still holds."""
        load = self._host.engine.load()
        return (
            not (load.running or load.waiting or load.awaiting_kv)
            and self._builder.empty
            and not self._gpus.fresh
            and self._say(load) == self._reported
        )

    def _say(self, load: EngineLoad) -> _ReportedState:
        kv = self._kv
        return _ReportedState(
            load_message(load), self._host.assignment.message, self._bus.stats().dropped, kv.pulls, kv.refused_pulls
        )
