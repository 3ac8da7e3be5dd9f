"""How whoever scales workers reads capacity plans. Pure."""

from typing import Protocol

from libs.policy.capacity.plan import CapacityPlan, Phase, wished_workers


class CapacityPlans(Protocol):
    """Plans by model, wherever they come from."""

    def plan(self, model: str) -> CapacityPlan | None:
        """The newest one, its times in Unix seconds; None: there is none, and nothing is wished."""
        ...


def wishes(plans: CapacityPlans, model: str, now_s: float, lead_s: float) -> dict[Phase, int]:
    """Workers that each pool of a model is to have once those ordered now are there; see `wished_workers`.

    lead_s: that a worker takes to start. Empty without a plan, or where it says nothing of that time: keep what is.
    """
    plan = plans.plan(model)
    return {} if plan is None else wished_workers(plan, now_s, lead_s)
