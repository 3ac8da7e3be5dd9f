"""How much of a mixed step is prefill: the one place where telemetry meets the step-time models."""

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import Step
from libs.perfmodel import StepWork, profile, split_step_ns
from libs.telemetry.steps import FULL_SHARE

DATACENTER_PROFILE = "llama-8b-h100"
LAPTOP_PROFILE = "smollm2-135m-cpu"


def prefill_share(engine: str, step: Step) -> int:
    """The prefill part of `step` in units of 1/`FULL_SHARE`; pure steps are all or nothing.

    Only the proportion of prefill to decode cost matters here, so one profile stands for all devices of an engine.
    """
    if not step.decode_sequences:
        return FULL_SHARE if step.prefill_tokens else 0
    work = StepWork(
        prefill_tokens=step.prefill_tokens,
        prefill_sequences=step.prefill_sequences,
        prefill_context_tokens=step.prefill_context_tokens,
        decode_sequences=step.decode_sequences,
        decode_kv_tokens=step.decode_kv_tokens,
    )
    model = profile(LAPTOP_PROFILE if engine == "torch" else DATACENTER_PROFILE).step_time
    return split_step_ns(model, work, FULL_SHARE)[0]
