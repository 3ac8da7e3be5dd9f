"""Step telemetry: contiguous covers of a worker's time with all that happened in them. Pure."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, StepTime
from libs.contracts.pb.fulcrum.telemetry.v1 import telemetry_pb2 as pb
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import DummySteps, Interval, KvTransfer, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.counters.port import GpuReading
from libs.engine.reports import EngineEvent, EngineLoad, KvTransferReport, StepReport
from libs.perfmodel.utilisation import Compute
from libs.perfmodel.wire import compute_message
from libs.worker.wire import load_message

# Dummy steps that await their batch; beyond it the oldest are counted without their time.
MAX_DUMMIES: Final = 4_096


@dataclass(frozen=True, slots=True)
class TelemetrySource:
    worker_id: str
    incarnation: int
    node: str
    gpus: int
    engine: str
    compute: Compute | None = None
    """The figures that utilisation is computed from; None if unknown."""
    kv_blocks: int = 0
    """KV blocks of the engine's pool; 0 if unknown."""
    max_sequences: int = 0
    """Most sequences that run at once; 0 if unknown."""
    block_size_tokens: int = 0
    chunk_tokens: int = 0
    """Most prompt tokens in one step; 0 if unknown."""
    group: str = ""
    """Data-parallel group of which the worker is a rank; empty for none."""


class StepBatchBuilder:
    """Gathers engine events and cuts them into batches. Covers touch, and no interval is in two batches."""

    def __init__(self, source: TelemetrySource, start_unix_ns: int) -> None:
        self._source = source
        self._covered_to_ns = start_unix_ns
        self._sequence = 0
        self._steps: list[StepRow] = []
        self._waits: list[tuple[int, int]] = []
        self._starved: list[tuple[int, int]] = []
        self._dummies: list[tuple[int, int]] = []
        self._dummy_steps = 0
        self._transfers: list[KvTransfer] = []

    @property
    def empty(self) -> bool:
        return not (self._steps or self._waits or self._starved or self._dummies or self._transfers)

    def add(self, event: EngineEvent, epoch: int) -> None:
        """Add an event whose step ran under `epoch`."""
        if event.step is not None:
            self._add_step(_step(event.step, epoch))
        self._waits.extend(event.kv_waits)
        self._starved.extend(event.starved)
        self._take_dummies(event.dummy_steps)
        self._transfers.extend(map(_transfer, event.kv_transfers))

    def cut(
        self,
        now_ns: int,
        load: EngineLoad,
        assignment: Assignment,
        *,
        dropped_batches: int = 0,
        step_time: StepTime | None = None,
        gpu_readings: Iterable[GpuReading] = (),
        last: bool = False,
    ) -> StepBatch | None:
        """Return the batch from the end of the last one to now, or to where the engine's reports are complete.

        Return None if that is no time at all; gathered events then stay for the next batch. `last` marks the final
        one.
        """
        covered_from = self._covered_to_ns
        covered_to = min(now_ns, load.reported_to_unix_ns or now_ns)
        if covered_to <= covered_from:
            return None
        self._covered_to_ns = covered_to
        self._sequence += 1
        source = self._source
        batch = StepBatch(
            worker_id=source.worker_id,
            incarnation=source.incarnation,
            sequence=self._sequence,
            node=source.node,
            gpus=source.gpus,
            engine=source.engine,
            compute=compute_message(source.compute) if source.compute else None,
            assignment=assignment,
            covered_from_unix_ns=covered_from,
            covered_to_unix_ns=covered_to,
            steps=step_columns(step for step in self._steps if step.start_unix_ns < covered_to),
            kv_waits=_between(self._waits, covered_from, covered_to, load.kv_wait_since_unix_ns),
            starved=_between(self._starved, covered_from, covered_to, load.starved_since_unix_ns),
            kv_transfers=self._transfers,
            load=load_message(load),
            dropped_batches=dropped_batches,
            step_time=step_time,
            gpu_readings=map(_gpu_reading, gpu_readings),
            kv_blocks=source.kv_blocks,
            max_sequences=source.max_sequences,
            block_size_tokens=source.block_size_tokens,
            chunk_tokens=source.chunk_tokens,
            group=source.group,
            dummy_steps=self._cut_dummies(covered_to),
            last=last,
        )
        self._steps = [step for step in self._steps if step.start_unix_ns >= covered_to]
        self._waits = [wait for wait in self._waits if wait[1] > covered_to]
        self._starved = [span for span in self._starved if span[1] > covered_to]
        self._transfers = []
        return batch

    def _take_dummies(self, steps: Iterable[tuple[int, int]]) -> None:
        # An empty interval means that the time of a step is unknown: it is only counted.
        for start, end in steps:
            self._dummy_steps += 1
            if start < end:
                self._dummies.append((start, end))
        del self._dummies[:-MAX_DUMMIES]

    def _cut_dummies(self, covered_to: int) -> DummySteps | None:
        """Return each dummy step whole and once, in the batch that covers its end, or a later one if it is reported
        late.
        """
        if not self._dummy_steps:
            return None
        ended = [Interval(start_unix_ns=start, end_unix_ns=end) for start, end in self._dummies if end <= covered_to]
        self._dummies = [step for step in self._dummies if step[1] > covered_to]
        return DummySteps(steps=self._dummy_steps, spans=ended)

    def _add_step(self, step: StepRow) -> None:
        # The end of an announced step replaces its announcement if that has not been sent.
        last = self._steps[-1] if self._steps else None
        if last is not None and not last.end_unix_ns and last.start_unix_ns == step.start_unix_ns:
            self._steps.pop()
        self._steps.append(step)


def _between(ended: list[tuple[int, int]], covered_from: int, covered_to: int, ongoing_since: int) -> list[Interval]:
    """Cut spans at the edges of the cover. The rest of a span belongs to the neighbouring batch."""
    spans = [*ended, (ongoing_since, covered_to)] if ongoing_since else ended
    cut = ((max(start, covered_from), min(end, covered_to)) for start, end in spans)
    return [Interval(start_unix_ns=start, end_unix_ns=end) for start, end in cut if start < end]


def _step(report: StepReport, epoch: int) -> StepRow:
    return StepRow(
        start_unix_ns=report.start_unix_ns,
        end_unix_ns=report.end_unix_ns,
        prefill_tokens=report.prefill_tokens,
        prefill_sequences=report.prefill_sequences,
        prefill_context_tokens=report.prefill_context_tokens,
        decode_sequences=report.decode_sequences,
        decode_kv_tokens=report.decode_kv_tokens,
        epoch=epoch,
        waiting=report.waiting,
        waiting_prefill_tokens=report.waiting_prefill_tokens,
        prefill_squared_tokens=report.prefill_squared_tokens,
    )


def _gpu_reading(reading: GpuReading) -> pb.GpuReading:
    return pb.GpuReading(**asdict(reading))


def _transfer(report: KvTransferReport) -> KvTransfer:
    return KvTransfer(
        request_id=report.request_id,
        from_worker_id=report.from_worker_id,
        blocks=report.blocks,
        bytes=report.data_bytes,
        start_unix_ns=report.start_unix_ns,
        end_unix_ns=report.end_unix_ns,
        prompt_tokens=report.prompt_tokens,
        prompt_tokens_computed=report.prompt_tokens_computed,
        shared_memory=report.shared,
    )
