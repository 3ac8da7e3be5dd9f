"""What a person allows decisions to do: workers a role, moves a second, hours in which roles stand still. Also
how often the planner decides and reports. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Self

DAY_MINUTES: Final = 24 * 60
MAX_WORKERS: Final = 100_000
MAX_MOVES_PER_S: Final = 1_000
REST_S: Final = 1.0
"""From one decision about a cluster at rest to the next, which says the same."""
KEEP_NS: Final = 900_000_000
"""Between two reports of a decision to keep for the same reasons, by which readers know that the planner
lives. Less than a second by half of the longest period, so that one a second is reported."""
NO_BOUND: Final = 1e9
"""GPU-hours: of a hundred thousand workers with a hundred GPUs each, a day, forty times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Of one model's workers. A mixed worker is a decode worker."""

    prefill_min: int = 1
    """1 asks for somebody who computes prompts: mixed workers that were started so do, and so does one worker alone."""
    prefill_max: int = MAX_WORKERS
    decode_min: int = 1
    decode_max: int = MAX_WORKERS
    workers_min: int = 0
    """In any role; those that people started are never ended."""
    workers_max: int = MAX_WORKERS
    """Up to which workers are started, those on standby and such as still start included."""
    gpu_hours_day: float = NO_BOUND
    """Of workers that actuators started, a day (UTC)."""
    tpot_ms: float | None = None
    """That roles are decided for; None: the planner's own."""

    def without_prefill(self) -> Self:
        """Return the limits of workers that need no prefill worker beside them; a `prefill_min` above 1 stays."""
        return replace(self, prefill_min=0) if self.prefill_min == 1 else self

    def allow(self, prefill: int, decode: int) -> bool:
        """Whether limits allow these numbers of workers by role."""
        return self.prefill_min <= prefill <= self.prefill_max and self.decode_min <= decode <= self.decode_max


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Minutes of the day, UTC; past midnight where the end is not after the start."""

    from_minute: int
    to_minute: int

    def hold(self, minute: int) -> bool:
        """Whether roles stand still in this minute of the day."""
        if self.from_minute < self.to_minute:
            return self.from_minute <= minute < self.to_minute
        return minute >= self.from_minute or minute < self.to_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLimits:
    """Of all models."""

    moves_per_s: int = 64
    """Changes of role at most, over all models."""
    pinned: frozenset[str] = frozenset()
    """Workers that keep what they have."""
    quiet_hours: tuple[QuietHours, ...] = ()
    every: ModelLimits = field(default_factory=ModelLimits)
    """Of models that have none of their own."""
    models: Mapping[str, ModelLimits] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, model: str) -> ModelLimits:
        """Those that hold for a model."""
        return self.models.get(model, self.every)

    def quiet(self, now_ns: int) -> bool:
        """Whether roles stand still; `now_ns` is Unix time."""
        minute = now_ns // 60_000_000_000 % DAY_MINUTES
        return any(each.hold(minute) for each in self.quiet_hours)


def is_due(*, at_rest: bool, since_s: float, period_s: float) -> bool:
    """Whether to decide in this round, `since_s` after the last decision: in each of them, and every `REST_S` about a
    cluster at rest. Rounds come on a beat of periods: half of one is what they may be off."""
    return not at_rest or since_s >= REST_S - period_s / 2


def is_news(*, same_reasons: bool, since_ns: int) -> bool:
    """Whether to report a decision to keep, `since_ns` after the last one."""
    return not same_reasons or since_ns >= KEEP_NS
