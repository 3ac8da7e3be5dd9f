"""How much of a mixed step is prefill: the one place where telemetry meets the step-time models."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import Step, StepBatch
from libs.perfmodel import StepTimeModel, prior_step_time, split_step_ns
from libs.perfmodel.wire import fitted_model, step_work
from libs.telemetry.steps import FULL_SHARE

MAX_ENGINES: Final = 32
"""Names of engines whose nearest profile is remembered: looking one up costs more than entering a batch."""


def prefill_share(batch: StepBatch) -> Callable[[Step], int]:
    """The prefill part of each of a batch's steps in units of 1/`FULL_SHARE`; pure steps are all or nothing.

    Split by the model that the worker itself has learned and sends. Only the proportion of prefill to decode cost
    matters here, so the nearest profile will do for a worker that sends none.
    """
    # Most batches have no mixed step, and reading the model costs more than entering all of a batch's steps.
    read: list[StepTimeModel] = []

    def model() -> StepTimeModel:
        if not read:
            read.append(_model(batch))
        return read[0]

    def share(step: Step) -> int:
        if not step.prefill_tokens:
            return 0
        if not step.decode_sequences:
            return FULL_SHARE
        return split_step_ns(model(), step_work(step), FULL_SHARE)[0]

    return share


def _model(batch: StepBatch) -> StepTimeModel:
    told = fitted_model(batch.step_time) if batch.HasField("step_time") else None
    return told.model if told else _prior(batch.engine)


@lru_cache(maxsize=MAX_ENGINES)
def _prior(engine: str) -> StepTimeModel:
    return prior_step_time(engine)
