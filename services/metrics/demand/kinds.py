"""Kinds of workers by model, from their reports: step times, slots, KV blocks and GPUs."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.perfmodel.learner import FittedModel, StepKind, combine
from libs.perfmodel.wire import fitted_model
from libs.policy.capacity.phase_work import WorkerKind
from libs.policy.capacity.plan import PHASES, Phase
from libs.policy.speed import Speed
from libs.policy.worker.saturation import knee_of
from libs.telemetry.fleet import FleetTelemetry
from services.metrics.accounting.queues import pool_places

LOOK_NS: Final = 30_000_000_000
"""The interval at which a worker's reported step times are read."""
MAX_WORKERS: Final = 256
"""The most workers of a model that are remembered, those read last."""
MAX_MODELS: Final = 64
MOST_CHUNK_TOKENS: Final = 8192
KV_BLOCK_TOKENS: Final = 16
"""Tokens of a KV block, whose size telemetry does not report: the default of our engines."""
MAX_SEQUENCES: Final = 256
"""Sequences assumed for a worker that does not report how many it runs."""


@dataclass(slots=True)
class _Worker:
    read_ns: int
    fitted: FittedModel
    gpus: int
    max_sequences: int
    kv_tokens: int


@dataclass(slots=True)
class WorkerKinds:
    """The latest reports of workers, by model."""

    _workers: dict[str, dict[str, _Worker]] = field(default_factory=dict)

    def take(self, record: Record, now_ns: int) -> None:
        """Record a worker's description, at most once every `LOOK_NS`."""
        value = record.value
        if not isinstance(value, StepBatch):
            return
        of_model = self._workers.get(value.assignment.model)
        known = None if of_model is None else of_model.get(value.worker_id)
        if known is not None and now_ns - known.read_ns < LOOK_NS:
            return
        if not value.HasField("step_time") or not value.assignment.model:
            return
        fitted = fitted_model(value.step_time)
        if fitted is None:
            return
        if of_model is None:
            if len(self._workers) >= MAX_MODELS:
                del self._workers[next(iter(self._workers))]
            of_model = self._workers[value.assignment.model] = {}
        of_model.pop(value.worker_id, None)
        of_model[value.worker_id] = _Worker(
            now_ns,
            fitted,
            max(value.gpus, 1),
            value.max_sequences or MAX_SEQUENCES,
            value.kv_blocks * KV_BLOCK_TOKENS,
        )
        if len(of_model) > MAX_WORKERS:
            del of_model[next(iter(of_model))]

    def kind(self, model: str) -> WorkerKind | None:
        """Return the kind of a model's workers; None if none has reported.

        Each part of the step-time model comes from the worker that has seen most such steps.
        """
        workers = list(self._workers.get(model, {}).values())
        if not workers:
            return None
        fits = {each: max((one.fitted for one in workers), key=lambda fit: fit.of(each).steps) for each in StepKind}
        step_time = combine(workers[-1].fitted.model, fits)
        chunk = knee_of(step_time, MOST_CHUNK_TOKENS)[0]
        return WorkerKind(
            Speed(step_time, max(chunk, 1), measured=True),
            max(each.gpus for each in workers),
            min(each.max_sequences for each in workers),
            min(each.kv_tokens for each in workers),
        )


def workers_there(fleet: FleetTelemetry, model: str, now_ns: int) -> dict[Phase, int]:
    """Count the live workers that serve each phase; empty if there are none."""
    loads = fleet.directory.loads(now_ns)
    there: dict[Phase, int] = {}
    for phase in PHASES:
        places = pool_places(loads.listing, model, phase)
        there[phase] = int(np.count_nonzero(loads.heard[places] & ~loads.listing.left[places]))
    return there if any(there.values()) else {}
