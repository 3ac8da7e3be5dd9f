"""FLOPs and bytes of a worker's finished steps in any window. Pure."""

import numpy as np

from libs.perfmodel.utilisation import Compute, Effort, step_efforts
from libs.telemetry.steps import FinishedSteps


def effort_within(compute: Compute, steps: FinishedSteps, low_ns: int, high_ns: int) -> Effort:
    """What was done in [low, high): a step's effort is spread evenly over its time."""
    efforts = step_efforts(compute, steps.counts, steps.prefill_shares)
    inside = np.clip(np.minimum(steps.ends_ns, high_ns) - np.maximum(steps.starts_ns, low_ns), 0, None)
    return Effort(*map(float, (inside / (steps.ends_ns - steps.starts_ns)) @ efforts))
