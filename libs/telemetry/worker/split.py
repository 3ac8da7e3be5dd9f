"""The prefill part of mixed steps, computed from the step-time models."""

from array import array
from functools import lru_cache
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import StepRow, step_count, step_rows
from libs.perfmodel.profiles import prior_step_time
from libs.perfmodel.wire import fitted_model, step_work
from libs.policy.step_time import StepTimeModel, split_step_ns
from libs.telemetry.worker.steps import FULL_SHARE

MAX_ENGINES: Final = 32
"""The most engine names whose nearest profile is cached. A lookup costs more than entering a batch."""


def prefill_shares(batch: StepBatch) -> list[int]:
    """Return the prefill part of each of a batch's steps in units of 1/`FULL_SHARE`; pure steps are all or nothing.

    Mixed steps are split by the model that the worker has learned and reports. Only the ratio of prefill to decode
    cost matters here, so the nearest profile serves for a worker that reports none. Raise ValueError if the steps'
    columns differ in length.
    """
    steps = batch.steps
    if not steps.prefill_tokens:
        return [0] * step_count(steps)
    if not steps.decode_sequences:
        return [FULL_SHARE if tokens else 0 for tokens in array("Q", steps.prefill_tokens)]
    rows = step_rows(steps)
    # Most batches have no mixed step, and reading the model costs more than entering all of a batch's steps.
    mixed = any(row.prefill_tokens and row.decode_sequences for row in rows)
    model = _model(batch) if mixed else None
    return [_share(model, row) for row in rows]


def _share(model: StepTimeModel | None, row: StepRow) -> int:
    if model is None or not (row.prefill_tokens and row.decode_sequences):
        return FULL_SHARE if row.prefill_tokens else 0
    return min(max(split_step_ns(model, step_work(row), FULL_SHARE)[0], 0), FULL_SHARE)


def _model(batch: StepBatch) -> StepTimeModel:
    fitted = fitted_model(batch.step_time) if batch.HasField("step_time") else None
    return fitted.model if fitted else _prior(batch.engine)


@lru_cache(maxsize=MAX_ENGINES)
def _prior(engine: str) -> StepTimeModel:
    return prior_step_time(engine)
