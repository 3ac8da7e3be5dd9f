"""What is believed of a worker's step times before it has run a step. Pure."""

from typing import Final

from libs.contracts.errors import StartupError
from libs.perfmodel.profiles import PROFILES, profile
from libs.perfmodel.step_time import StepTimeModel

DATACENTER_PROFILE: Final = "llama-8b-h100"
LAPTOP_PROFILE: Final = "smollm2-135m-cpu"


def prior_step_time(engine: str, device: str = "") -> StepTimeModel:
    """The nearest profile's model to an engine on a device, as it names itself.

    Devices are "cpu", "cuda:NVIDIA H200", "sim:llama-8b-h100", "sim:llama-8b-h100/x50" (50 times as fast), or unknown.
    """
    if engine == "sim":
        return _simulated(device.removeprefix("sim:"))
    on_gpu = device.startswith("cuda") or (not device and engine != "torch")
    return PROFILES[DATACENTER_PROFILE if on_gpu else LAPTOP_PROFILE].step_time


def _simulated(device: str) -> StepTimeModel:
    name, _, speedup = device.partition("/x")
    try:
        known = profile(name).step_time
    except StartupError:
        known = PROFILES[DATACENTER_PROFILE].step_time
    try:
        factor = float(speedup or 1)
    except ValueError:
        return known
    return known.scaled(1 / factor) if factor > 0 else known
