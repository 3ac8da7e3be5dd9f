"""FLOPs and bytes of a worker's finished steps in any window. Pure."""

import numpy as np

from libs.perfmodel.utilisation import Compute, Effort, effort_of
from libs.policy.step_time import StepWork
from libs.telemetry.steps import FinishedSteps


def effort_within(compute: Compute, steps: FinishedSteps, low_ns: int, high_ns: int) -> Effort:
    """What was done in [low, high): a step's effort is spread evenly over its time."""
    inside = np.clip(np.minimum(steps.ends_ns, high_ns) - np.maximum(steps.starts_ns, low_ns), 0, None)
    parts = inside / (steps.ends_ns - steps.starts_ns)
    tokens, prompts, context, _, _, told_squared = steps.counts
    alike = np.maximum(tokens * (2 * context - tokens) / np.maximum(prompts, 1), 0)  # as `StepWork.squared`
    squared = np.where(told_squared > 0, told_squared, alike) * (tokens > 0)
    # All that a step costs is linear in these, so that steps are added up before anything is reckoned.
    sums = [*map(float, steps.counts[:-1] @ parts), float(squared @ parts)]
    work = StepWork(*sums)  # type: ignore[arg-type] # parts of steps are no whole numbers
    prefill_steps = float(steps.prefill_shares @ parts)
    return effort_of(compute, work, prefill_steps=prefill_steps, decode_steps=float(parts.sum()) - prefill_steps)
