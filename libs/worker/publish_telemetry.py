"""Sends step telemetry to the bus, one batch a period."""

import asyncio

from libs.bus.port import Bus
from libs.contracts import topics
from libs.counters.sampler import GpuSampler
from libs.engine.port import EngineEvent
from libs.perfmodel.wire import step_time_message
from libs.runtime.clock import Clock
from libs.worker.host import WorkerHost
from libs.worker.kv_server import KvServicer
from libs.worker.step_times import StepTimes
from libs.worker.telemetry import StepBatchBuilder


class TelemetryPublisher:
    """Cuts and publishes batches; gateways hear of a changed load at the same pace."""

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

    def on_event(self, event: EngineEvent) -> None:
        """Take an engine event in; a step is of the epoch it began in, however late it is told."""
        epoch = self._host.assignment.current.epoch
        if event.step is not None:
            epoch = self._host.last_change.epoch_at(event.step.start_unix_ns, epoch)
        self._builder.add(event, epoch)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            self.publish()
            self._host.refresh_load()

    def publish(self, *, last: bool = False) -> None:
        """Publish what has gathered; `last` says that the worker leaves."""
        batch = self._builder.cut(
            self._clock.now_ns(),
            self._host.engine.load(),
            self._host.assignment.current,
            dropped_batches=self._bus.stats().dropped,
            step_time=step_time_message(self._step_times.fitted),
            gpu_readings=self._gpus.take(),
            last=last,
        )
        if batch is not None:
            batch.load.kv_pulls, batch.load.refused_kv_pulls = self._kv.pulls, self._kv.refused_pulls
            self._bus.publish(topics.STEPS, batch)
