"""Decisions about the number of workers in one plain sentence. Pure."""

from libs.policy.planner.scaling import CALM_NS, Code, Pool, Scaled
from services.planner.reasons import figure, workers
from services.planner.role_planner import ModelPlan


def why_scaled(plan: ModelPlan, pool: Pool, found: Scaled, *, start_up_ns: int, acts: bool) -> str:
    """Why another number of workers is wished than there are."""
    observed, there = plan.observed, f"{pool.serving} worker{'' if pool.serving == 1 else 's'} of {plan.observed.model}"
    wished = f"{found.wished} {'is' if found.wished == 1 else 'are'} wished"
    if found.code is Code.PRESSES and plan.assigned is not None:
        least = min((each.pressure for each in plan.assigned.candidates), default=plan.assigned.now.pressure)
        text = (
            f"work presses {figure(least)} in the best split of {there}, with what it grows by in"
            f" {start_up_ns / 1e9:.0f} s: {wished}"
        )
    elif found.code is Code.CALM:
        text = f"{there} have had room for one fewer for {CALM_NS / 1e9:.0f} s: {wished}"
    elif found.code is Code.FORECAST:
        text = f"{wished} by the forecast, in place of {there}"
    elif found.code is Code.GPU_HOURS:
        text = f"the day's GPU-hours of started workers are spent: {workers(found.started, 'started')} may stay"
    elif found.code is Code.LIMITS:
        text = f"limits ask for another number than {there}: {wished}"
    else:
        text = f"{observed.model}: {wished}"
    started = f"; {workers(found.started, 'started')} in place of {pool.started}"
    return text + (started if acts and found.started != pool.started else "")
