"""The operator's limits on decisions and on their frequency, and the rated splits of roles within those limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Self

import numpy as np

from libs.policy.capacity import MOST_WORKERS
from libs.policy.pressure import (
    N,
    Numbers,
    Split,
    Splits,
    WorkerProfile,
    Workload,
    decode_step_ns,
    least,
    lent_step_ns,
    most,
    pressed,
    prompt_pressure,
    reading_ns,
    rounded,
    sequence_lines,
)
from libs.policy.speed import PROMPTS_PART
from libs.policy.worker.pace import IN_HAND

DAY_MINUTES: Final = 24 * 60
MAX_MOVES_PER_S: Final = 1_000
REST_S: Final = 1.0
"""The time between decisions about an idle cluster. Their outcome does not change."""
KEEP_NS: Final = 900_000_000
"""The time between two reports of an unchanged decision, which show that the planner is alive.

It is shorter than a second by half of the longest period, so that one is reported every second.
"""
NO_BOUND: Final = 1e9
"""The GPU-hours per day that mean no bound: four times those of 100,000 workers with 100 GPUs each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of one model. A mixed worker counts as a decode worker."""

    prefill_min: int = 1
    """The minimum number of prefill workers.

    1 is also satisfied by workers that were started as mixed, and by a single worker.
    """
    prefill_max: int = MOST_WORKERS
    decode_min: int = 1
    decode_max: int = MOST_WORKERS
    workers_min: int = 0
    """The minimum number of workers in any role; workers started by people are never ended."""
    workers_max: int = MOST_WORKERS
    """The number up to which workers are started, including standby workers and those still starting."""
    gpu_hours_day: float = NO_BOUND
    """The GPU-hours that workers started by actuators may use per day (UTC)."""
    tpot_ms: float | None = None
    """The TPOT target used for role decisions; None means the planner's own."""

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
    """The maximum number of role changes per second, over all models."""
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

    Every round decides, but an idle cluster gets one decision every `REST_S`.
    """
    # Rounds are periods apart, and one may be early by up to half a period.
    return not at_rest or since_s >= REST_S - period_s / 2


def is_news(*, same_reasons: bool, since_ns: int) -> bool:
    """Return whether to report a decision to keep the roles, `since_ns` after the last report."""
    return not same_reasons or since_ns >= KEEP_NS


EVERY: Final = ModelLimits()
MOST_BUSY: Final = 0.9
"""The bound on the share of a decode worker's time that grows with its sequences; above it, the pace does not
settle.
"""
MOST_CHANGE: Final = 3.0
"""The bound on the factor by which decodes may be assumed to change."""

Press = Callable[[Numbers, Numbers], tuple[Numbers, Numbers]]
"""A function from (prefill workers, mixed workers) to (prompt pressure, decode pressure), all arrays of shape [splits].
"""


@dataclass(frozen=True, slots=True)
class SplitBounds:
    """The highest pressures and cost of a split that is good enough."""

    prompts: float
    decodes: float
    cost: float


class RatedSplits:
    """The rated splits of one number of workers, from the fewest prefill workers to the most."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._costs = splits.costs()
        self._order = np.argsort(self._costs, kind="stable")

    def __len__(self) -> int:
        return len(self._costs)

    @property
    def best(self) -> Split | None:
        """The split with the least pressure; None if there are no splits."""
        return self._splits.at(int(self._order[0])) if len(self) else None

    def first(self, count: int) -> Sequence[Split]:
        """Return the `count` splits with the least pressure, in that order."""
        return [self._splits.at(place) for place in self._order[:count].tolist()]

    def of(self, prefill: int) -> Split | None:
        """Return the split with this number of prefill workers, or None."""
        place = prefill - int(self._splits.prefill[0]) if len(self) else -1
        return self._splits.at(place) if 0 <= place < len(self) else None

    def nearest(self, mixed: int, most_cost: float, enough: SplitBounds | None = None) -> Split | None:
        """Return the split with the number of mixed workers nearest to `mixed` that is no costlier than `most_cost`.

        Splits within the bounds of `enough` qualify too. Of two equally near ones, the better is returned.
        """
        chosen = self._costs <= most_cost
        if enough is not None:
            calm = (self._splits.prompt_pressure <= enough.prompts) & (self._splits.decode_pressure <= enough.decodes)
            chosen |= calm & (self._costs <= enough.cost)
        good = self._order[chosen[self._order]]
        return self._splits.at(int(good[np.abs(self._splits.mixed[good] - mixed).argmin()])) if len(good) else None

    def least_pressure(self) -> float:
        """Return the lowest pressure of the worse phase over all splits; infinite if there are none."""
        worse = np.maximum(self._splits.prompt_pressure, self._splits.decode_pressure)
        return float(worse.min(initial=np.inf))


def weigh(
    press: Press, workers: int, limits: ModelLimits = EVERY, *, least_prefill: int = 1, least_mixed: int = 1
) -> RatedSplits:
    """Rate all splits that the limits allow, with at least these numbers of workers by role."""
    first = max(least_prefill, limits.prefill_min, workers - limits.decode_max, 0)
    last = min(workers - max(least_mixed, limits.decode_min), limits.prefill_max)
    prefill = np.arange(first, max(last + 1, first), dtype=np.float64)
    mixed = workers - prefill
    return RatedSplits(Splits(prefill, mixed, *press(prefill, mixed)))


def splits(
    engine: WorkerProfile,
    work: Workload,
    workers: int,
    limits: ModelLimits = EVERY,
    *,
    least_prefill: int = 1,
    least_mixed: int = 1,
) -> RatedSplits:
    """Rate all splits for work that is the same in each of them."""

    def press(prefill: Numbers, mixed: Numbers) -> tuple[Numbers, Numbers]:
        same = 0.0 * mixed
        decodes, kv_tokens = work.decodes + same, work.kv_tokens + same
        return pressed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed)

    return weigh(press, workers, limits, least_prefill=least_prefill, least_mixed=least_mixed)


def best_split(engine: WorkerProfile, work: Workload, workers: int, limits: ModelLimits = EVERY) -> Split | None:
    """Return the best split of `workers` workers, or None if the limits allow none.

    If there are two workers or more, each role has at least one.
    """
    return splits(engine, work, workers, limits, least_prefill=min(workers - 1, 1)).best


@dataclass(frozen=True, slots=True)
class DecodePace:
    """The decode rate in the present split, and the sequences that would decode in another one.

    On a worker that also computes prompts, each step takes as long as TPOT allows. Sequences then stay longer, so more
    of them, with their KV, are present at once. Judged by the present decodes, a split with separate decodes would look
    crowded although it is not. Roles would then drift towards ever more and ever fuller mixed workers. Only the rate of
    generated tokens is the same in every split.
    """

    engine: WorkerProfile
    work: Workload
    tokens_per_ns: float
    """The tokens generated per nanosecond; 0 if nothing decodes."""
    beside: tuple[float, float] = (0.0, 0.0)
    """The decodes and their KV tokens beside which prompts are computed.

    These are the present ones. If no prompts are computed now, they are those of steps with all the prompts that TPOT
    allows.
    """

    @classmethod
    def of(cls, engine: WorkerProfile, work: Workload, prefill: int, mixed: int, *, rides: bool) -> "DecodePace":
        """Derive the pace from the present split. `rides` is true if mixed workers compute prompts now."""
        if not work.decodes or not mixed or not work.tpot_ns:
            return cls(engine, work, 0.0)
        decodes, kv_tokens = float(work.decodes), float(work.kv_tokens)
        alone_ns = decode_step_ns(engine, decodes, kv_tokens, float(mixed))
        pressure = prompt_pressure(engine, work, decodes, kv_tokens, prefill=float(prefill), mixed=float(mixed))
        step_ns = lent_step_ns(alone_ns, work.tpot_ns, pressure) if rides else alone_ns
        if not step_ns:
            return cls(engine, work, 0.0)
        found = cls(engine, work, work.decodes / step_ns, (decodes, kv_tokens))
        if rides:
            return found
        return replace(found, beside=_decodes(work, found.tokens_per_ns, found._step_ns(float(mixed), 1.0)))

    def decodes_in(self, prefill: N, mixed: N, *, rides: bool) -> tuple[N, N]:
        """Return the decodes and their KV tokens in one or many splits with at least one mixed worker each."""
        if not self.tokens_per_ns:
            return self.work.decodes + 0.0 * mixed, self.work.kv_tokens + 0.0 * mixed
        pressure = 0.0 * mixed
        if rides:
            decodes, kv_tokens = self.beside
            beside = decodes + 0.0 * mixed, kv_tokens + 0.0 * mixed
            pressure = prompt_pressure(self.engine, self.work, *beside, prefill=prefill, mixed=mixed)
        return _decodes(self.work, self.tokens_per_ns, self._step_ns(mixed, pressure))

    def _step_ns(self, mixed: N, pressure: N) -> N:
        """Return the time of a step on `mixed` workers, lengthened by prompts in proportion to their pressure.

        A longer step has more sequences in it, which lengthen it in turn. The result is the fixed point.
        """
        batch = self.work.decodes / mixed
        # The batch may settle on the other side of the batch size that saturates the GPU.
        first, *others = (self._on_line(line, mixed, pressure) for line in sequence_lines(self.engine.step_time, batch))
        for each_ns in others:
            first = most(first, each_ns)
        return first

    def _on_line(self, line: tuple[N | float, float], mixed: N, pressure: N) -> N:
        """Return the fixed point for sequences whose cost is `line`: a fixed time, and one per sequence."""
        work, model = self.work, self.engine.step_time
        fixed_ns, sequence_ns = line
        each_ns = sequence_ns + model.decode_kv_token_ns * work.kv_tokens / work.decodes
        busy = least(self.tokens_per_ns / mixed * each_ns, MOST_BUSY)
        read_ns = most(reading_ns(model, work.decodes / mixed) + fixed_ns, 0.0)
        part = PROMPTS_PART * least(pressure, 1.0)
        lent_ns = ((1 - part) * read_ns + part * (work.tpot_ns * (1 - IN_HAND))) / (1 - (1 - part) * busy)
        return most(read_ns / (1 - busy), lent_ns)


def _decodes(work: Workload, tokens_per_ns: float, step_ns: N) -> tuple[N, N]:
    """Return the sequences and their KV tokens that generate `tokens_per_ns` in steps of `step_ns`."""
    decodes = least(most(tokens_per_ns * step_ns, work.decodes / MOST_CHANGE), work.decodes * MOST_CHANGE)
    return most(rounded(decodes), 1.0), rounded(work.kv_tokens * (decodes / work.decodes))
