from collections import Counter
from typing import Final

from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.demand.plan_wire import plan_of
from libs.policy.capacity.plan import CapacityPlan
from libs.runtime.clock import Clock
from services.planner.inputs.fleet_view import MessageOutcome

# Plans kept; the one received longest ago is dropped.
MAX_MODELS: Final = 64
# An older plan, or one made as far in the future, is ignored; metrics services make one every five minutes.
FRESH_NS: Final = 3_600_000_000_000


class ReceivedPlans:
    """The newest fresh capacity plan of each model. Implements `libs.policy.capacity.plan.CapacityPlans`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._plans: dict[str, tuple[int, CapacityPlan]] = {}
        """Pairs of (made_unix_ns, plan) by model."""
        self.taken = Counter(dict.fromkeys(MessageOutcome, 0))

    def take(self, message: PlanMessage) -> MessageOutcome:
        """Keep a plan unless a later one of the same model is known."""
        taken = self._take(message)
        self.taken[taken] += 1
        return taken

    def _take(self, message: PlanMessage) -> MessageOutcome:
        known = self._plans.get(message.model)
        if not self._fresh(message.made_unix_ns) or (known is not None and known[0] > message.made_unix_ns):
            return MessageOutcome.OLD
        if known is None or known[0] != message.made_unix_ns:  # it is sent again and again
            try:
                known = message.made_unix_ns, plan_of(message)
            except ValueError:
                return MessageOutcome.MALFORMED
        self._plans.pop(message.model, None)
        self._plans[message.model] = known
        if len(self._plans) > MAX_MODELS:
            del self._plans[next(iter(self._plans))]
        return MessageOutcome.COUNTED

    def plan(self, model: str) -> CapacityPlan | None:
        """Return a model's plan with times in Unix seconds, or None without a fresh one."""
        known = self._plans.get(model)
        return known[1] if known is not None and self._fresh(known[0]) else None

    def _fresh(self, made_unix_ns: int) -> bool:
        return abs(self._clock.now_ns() - made_unix_ns) <= FRESH_NS
