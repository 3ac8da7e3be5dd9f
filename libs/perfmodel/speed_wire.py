"""A worker's speed in protobuf and back. Pure."""

import math

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.learner import FittedModel
from libs.perfmodel.wire import fitted_model, step_time_message
from libs.policy.speed import Speed


def speed_message(speed: Speed) -> pb.Speed:
    """The speed as gateways receive it."""
    step_time = step_time_message(FittedModel(speed.step_time))
    return pb.Speed(
        step_time=step_time,
        kv_token_ns=speed.kv_token_ns,
        measured=speed.measured,
        chunk_tokens=speed.chunk_tokens,
    )


def speed_of(message: pb.Speed, chunk_tokens: int) -> Speed | None:
    """The speed that a worker sent, with `chunk_tokens` where it sent none; None for values that are not a speed."""
    fitted = fitted_model(message.step_time)
    if fitted is None or not 0 <= message.kv_token_ns < math.inf:
        return None
    return Speed(fitted.model, max(message.chunk_tokens or chunk_tokens, 1), message.kv_token_ns, message.measured)
