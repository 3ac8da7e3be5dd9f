"""The conversion of workers' step-time models and speeds to protobuf and back. Pure."""

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.step_row import StepRow
from libs.perfmodel.fit import COEFFICIENTS
from libs.perfmodel.learner import FittedModel, KindFit
from libs.perfmodel.utilisation import Compute
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.saturation import MOST_TOKENS, Point, PrefillCurve, Saturation

# The upper bound of a model's coefficient, at which a single token would take hours. Sums over a prompt stay far within
# the range of a float.
MAX_COEFFICIENT_NS: Final = 1e13
# The upper bound of points in a curve. A measurement has about fifteen.
MAX_POINTS: Final = 256


def step_time_message(fitted: FittedModel) -> common.StepTime:
    message = common.StepTime(
        prefill=_kind_message(fitted.prefill),
        decode=_kind_message(fitted.decode),
        mixed=_kind_message(fitted.mixed),
        interference=fitted.model.interference,
    )
    for name in COEFFICIENTS:
        setattr(message, name, getattr(fitted.model, name))
    message.saturating_sequences = fitted.model.saturating_sequences
    message.graph_sequences = fitted.model.graph_sequences
    return message


def fitted_model(message: common.StepTime) -> FittedModel | None:
    """Return the model in a message; None if its values are invalid."""
    times = {name: getattr(message, name) for name in COEFFICIENTS}
    if not all(0 <= value <= MAX_COEFFICIENT_NS for value in times.values()) or not 0 <= message.interference <= 1:
        return None
    kinds = (message.prefill, message.decode, message.mixed)
    if not _are_amounts(error for kind in kinds for error in (kind.error_p50, kind.error_p90)):
        return None
    model = StepTimeModel(
        interference=message.interference,
        saturating_sequences=message.saturating_sequences,
        graph_sequences=message.graph_sequences,
        **times,
    )
    return FittedModel(model, _kind(message.prefill), _kind(message.decode), _kind(message.mixed))


def curve_message(curve: PrefillCurve) -> pb.PrefillCurve:
    """Return the message in which a prefill measurement is stored."""
    found = curve.saturation
    return pb.PrefillCurve(
        chunk_tokens=found.chunk_tokens,
        plateau_tokens_per_s=found.plateau_tokens_per_s,
        curve=map(point_message, found.curve),
        step_time=step_time_message(FittedModel(found.model)),
        unix_ns=curve.unix_ns,
        scatter=found.scatter,
    )


def prefill_curve(message: pb.PrefillCurve) -> PrefillCurve | None:
    """Return the prefill measurement in a message; None if its values are invalid."""
    fitted = fitted_model(message.step_time)
    points = tuple(Point(p.tokens, p.measured_tokens_per_s, p.fitted_tokens_per_s) for p in message.curve[:MAX_POINTS])
    if fitted is None or not 1 <= message.chunk_tokens <= MOST_TOKENS or not 1 <= len(message.curve) <= MAX_POINTS:
        return None
    sizes = [point.tokens for point in points]
    if not 1 <= min(sizes) <= max(sizes) <= MOST_TOKENS or sizes != sorted(set(sizes)):
        return None
    rates = (rate for point in points for rate in (point.measured_tokens_per_s, point.fitted_tokens_per_s))
    if not _are_amounts((message.plateau_tokens_per_s, message.scatter, *rates)):
        return None
    saturation = Saturation(message.chunk_tokens, message.plateau_tokens_per_s, points, fitted.model, message.scatter)
    return PrefillCurve(saturation, message.unix_ns)


def point_message(point: Point) -> pb.TunePoint:
    return pb.TunePoint(
        tokens=point.tokens,
        measured_tokens_per_s=point.measured_tokens_per_s,
        fitted_tokens_per_s=point.fitted_tokens_per_s,
    )


def compute_message(compute: Compute) -> common.Compute:
    """Return the message in which a worker reports its model and device."""
    message = common.Compute()
    for field in fields(Compute):
        setattr(message, field.name, getattr(compute, field.name))
    return message


def compute_of(message: common.Compute) -> Compute | None:
    """Return the figures in a message; None if any is negative or not finite."""
    values = {field.name: getattr(message, field.name) for field in fields(Compute)}
    return Compute(**values) if _are_amounts(values.values()) else None


def link_token_ns(message: common.StepTime) -> float:
    """Return the time in which a worker's link receives the KV of one token; 0 if unknown or invalid."""
    return message.kv_token_ns if 0.0 < message.kv_token_ns < MAX_COEFFICIENT_NS else 0.0


def step_work(step: StepRow) -> StepWork:
    return StepWork(
        prefill_tokens=step.prefill_tokens,
        prefill_sequences=step.prefill_sequences,
        prefill_context_tokens=step.prefill_context_tokens,
        decode_sequences=step.decode_sequences,
        decode_kv_tokens=step.decode_kv_tokens,
        prefill_squared_tokens=step.prefill_squared_tokens,
    )


def _are_amounts(values: Iterable[float]) -> bool:
    return all(0 <= value < math.inf for value in values)


def _kind_message(fit: KindFit) -> common.StepKindFit:
    return common.StepKindFit(steps=fit.steps, error_p50=fit.error_p50, error_p90=fit.error_p90)


def _kind(message: common.StepKindFit) -> KindFit:
    return KindFit(message.steps, message.error_p50, message.error_p90)


def speed_message(speed: Speed) -> pb.Speed:
    step_time = step_time_message(FittedModel(speed.step_time))
    return pb.Speed(
        step_time=step_time,
        kv_token_ns=speed.kv_token_ns,
        measured=speed.measured,
        chunk_tokens=speed.chunk_tokens,
    )


def speed_of(message: pb.Speed, chunk_tokens: int) -> Speed | None:
    """Return the speed that a worker sent; None if its values are invalid.

    `chunk_tokens` replaces a missing chunk size.
    """
    fitted = fitted_model(message.step_time)
    if fitted is None or not 0 <= message.kv_token_ns < math.inf:
        return None
    return Speed(fitted.model, max(message.chunk_tokens or chunk_tokens, 1), message.kv_token_ns, message.measured)
