"""The regret ledger: the GPU time lost relative to the best split in hindsight, by hour.

Pure; callers pass the time.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from libs.policy.planner.hindsight import METHOD, NS_PER_HOUR, LossCause, loss
from libs.policy.planner.role_planning import RoleReason
from services.planner.role_planner import ModelPlan

MAX_HOURS: Final = 48
MAX_MODELS: Final = 64
# The maximum time between two decisions that is charged. After a longer gap, the planner was not deciding.
MAX_GAP_NS: Final = 2_000_000_000
_CAUSES: Final[Mapping[RoleReason, LossCause]] = {
    RoleReason.PROMPTS_PRESS: LossCause.LATE,
    RoleReason.DECODES_PRESS: LossCause.LATE,
    RoleReason.LIMITS: LossCause.LIMITS,
    RoleReason.UNMET: LossCause.LIMITS,
    RoleReason.UNMET_YET: LossCause.LIMITS,
    RoleReason.HELD: LossCause.HELD,
}


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of a window that ends now.

    GPU-hours include only workers with a role, and only while there is sufficient telemetry.
    """

    method: str
    window_s: float
    gpu_hours: float
    lost_gpu_hours: float
    """The GPU-hours of work that the best split of the same workers would have served in time.

    Cause too_small is excluded.
    """
    by_cause: dict[str, float]
    by_model: dict[str, dict[str, float]]


class RegretLedger:
    """Sums of GPU-nanoseconds by hour, model and cause. `WHOLE` stands for all GPU time."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str, str], float] = {}
        self._last_ns = 0

    def enter(self, plans: Sequence[ModelPlan], now_ns: int, *, acts: bool) -> None:
        """Charge each model's loss since the last call. The present state is assumed to have lasted that long."""
        lasted_ns, self._last_ns = now_ns - self._last_ns, now_ns
        if not 0 < lasted_ns <= MAX_GAP_NS:
            return
        hour = now_ns // NS_PER_HOUR
        for plan in plans[:MAX_MODELS]:
            assigned = plan.assigned
            if plan.observed.engine is None or assigned is None:
                continue
            self._add(hour, plan.observed.model, WHOLE, plan.observed.gpus * lasted_ns)
            cause = _CAUSES.get(assigned.code, LossCause.BEST) if acts else LossCause.ADVISORY
            best = assigned.candidates[0] if assigned.candidates else None
            for each in loss(assigned.now, best, cause, gpus=plan.observed.gpus, lasted_ns=lasted_ns):
                self._add(hour, plan.observed.model, each.cause.value, each.lost_gpu_ns)

    def regret(self, now_ns: int, window_ns: int) -> Regret:
        """Return the regret over the hours in a window."""
        first = (now_ns - window_ns) // NS_PER_HOUR
        by_model: dict[str, dict[str, float]] = {}
        for (hour, model, cause), gpu_ns in self._sums.items():
            if hour > first or hour == first == now_ns // NS_PER_HOUR:
                of = by_model.setdefault(model, {})
                of[cause] = of.get(cause, 0.0) + gpu_ns / NS_PER_HOUR
        by_cause = {each.value: sum(of.get(each.value, 0.0) for of in by_model.values()) for each in LossCause}
        lost = sum(hours for cause, hours in by_cause.items() if cause != LossCause.TOO_SMALL.value)
        whole = sum(of.pop(WHOLE, 0.0) for of in by_model.values())
        return Regret(METHOD, window_ns / 1e9, whole, lost, by_cause, by_model)

    def written(self) -> str:
        """Return the ledger as JSON, for storage."""
        return json.dumps([[*key, round(gpu_ns)] for key, gpu_ns in self._sums.items()])

    def take(self, written: str | None) -> None:
        """Add the sums of a stored ledger. Invalid text is ignored."""
        try:
            found = json.loads(written) if written else []
            self._sums |= dict(_entries(found))
        except (ValueError, TypeError):
            return

    def _add(self, hour: int, model: str, cause: str, gpu_ns: float) -> None:
        key = hour, model, cause
        if key not in self._sums:  # an hour, or a model in it, is new: drop old entries
            self._sums = {each: sum_ for each, sum_ in self._sums.items() if each[0] > hour - MAX_HOURS}
        self._sums[key] = self._sums.get(key, 0.0) + gpu_ns


WHOLE: Final = "whole"
"""The key of the sum of all GPU time, besides the causes of loss."""


def _entries(found: Iterable[Sequence[object]]) -> Iterable[tuple[tuple[int, str, str], float]]:
    for hour, model, cause, gpu_ns in found:
        if isinstance(hour, int) and isinstance(gpu_ns, int | float):
            yield (hour, str(model), str(cause)), float(gpu_ns)
