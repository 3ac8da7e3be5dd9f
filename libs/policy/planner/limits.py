"""The operator's limits on decisions: workers per role, moves per second, quiet hours.

It also holds how often the planner decides and reports.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Self

from libs.policy.capacity.table import MOST_WORKERS

DAY_MINUTES: Final = 24 * 60
MAX_MOVES_PER_S: Final = 1_000
REST_S: Final = 1.0
"""The time between decisions about an idle cluster, whose outcome does not change."""
KEEP_NS: Final = 900_000_000
"""The time between two reports of an unchanged decision, by which readers see that the planner is alive.

It is shorter than a second by half of the longest period, so that one is reported every second.
"""
NO_BOUND: Final = 1e9
"""The GPU-hours a day that stand for no bound: four times those of 100,000 workers with 100 GPUs each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of one model. A mixed worker counts as a decode worker."""

    prefill_min: int = 1
    """The least number of prefill workers.

    1 is also satisfied by workers that were started as mixed, and by a single worker.
    """
    prefill_max: int = MOST_WORKERS
    decode_min: int = 1
    decode_max: int = MOST_WORKERS
    workers_min: int = 0
    """The least number of workers in any role; workers started by people are never ended."""
    workers_max: int = MOST_WORKERS
    """The number up to which workers are started, including standby workers and those still starting."""
    gpu_hours_day: float = NO_BOUND
    """The GPU-hours that workers started by actuators may use per day (UTC)."""
    tpot_ms: float | None = None
    """The TPOT target that roles are decided for; None means the planner's own."""

    def without_prefill(self) -> Self:
        """Return the limits for workers that need no prefill worker beside them; a `prefill_min` above 1 stays."""
        return replace(self, prefill_min=0) if self.prefill_min == 1 else self

    def allow(self, prefill: int, decode: int) -> bool:
        """Return whether the limits allow these numbers of workers."""
        return self.prefill_min <= prefill <= self.prefill_max and self.decode_min <= decode <= self.decode_max


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A range of minutes of the day (UTC), which spans midnight if its end is not after its start."""

    from_minute: int
    to_minute: int

    def hold(self, minute: int) -> bool:
        """Return whether roles must not change in this minute of the day."""
        if self.from_minute < self.to_minute:
            return self.from_minute <= minute < self.to_minute
        return minute >= self.from_minute or minute < self.to_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLimits:
    """The limits that span all models, and those of each model."""

    moves_per_s: int = 64
    """The most role changes per second, over all models."""
    pinned: frozenset[str] = frozenset()
    """The ids of workers whose role and budget must not change."""
    quiet_hours: tuple[QuietHours, ...] = ()
    every: ModelLimits = field(default_factory=ModelLimits)
    """The limits of models that have none of their own."""
    models: Mapping[str, ModelLimits] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, model: str) -> ModelLimits:
        return self.models.get(model, self.every)

    def quiet(self, now_ns: int) -> bool:
        """Return whether it is quiet hours at `now_ns`, a Unix time."""
        minute = now_ns // 60_000_000_000 % DAY_MINUTES
        return any(each.hold(minute) for each in self.quiet_hours)


def is_due(*, at_rest: bool, since_s: float, period_s: float) -> bool:
    """Return whether to decide in this round, `since_s` after the last decision.

    Every round decides, except that an idle cluster is decided about once every `REST_S`.
    """
    # Rounds are periods apart, and one may be early by up to half a period.
    return not at_rest or since_s >= REST_S - period_s / 2


def is_news(*, same_reasons: bool, since_ns: int) -> bool:
    """Return whether to report a decision to keep the roles, `since_ns` after the last report."""
    return not same_reasons or since_ns >= KEEP_NS
