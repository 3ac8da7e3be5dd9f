"""The number of workers that a model should have, on a horizon of seconds to minutes.

Roles move work between phases. When no split of roles has room, workers have to be added, which takes their start-up
time. So the number is decided for the demand at the end of that time, extrapolated from its growth, and warm standby
workers bridge it. The number falls only after work has been low for long, one worker at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from libs.policy.planner.limits import ModelLimits, best_split
from libs.policy.planner.role_planning import PlannedWorker, RoleOrder
from libs.policy.pressure import KV_FILL, WorkerProfile, Workload, most_decodes, split
from libs.policy.roles import Role

SECOND_NS: Final = 1_000_000_000
HOUR_S: Final = 3_600.0
DAY_NS: Final = 86_400 * SECOND_NS
FULL: Final = 0.85
"""The pressure up to which the best split has room; above it more workers are requested."""
SPARE: Final = 0.55
"""The pressure that the best split of one worker fewer must not exceed for that worker to go."""
PRESSED_NS: Final = 2 * SECOND_NS
"""The time for which work must be excessive; a burst ends before a worker has started."""
CALM_NS: Final = 60 * SECOND_NS
"""The time for which work must be low before a worker goes."""
LINGER_NS: Final = 120 * SECOND_NS
"""The time a surplus worker stays on standby, warm, before it is ended."""
TREND_NS: Final = 60 * SECOND_NS
"""The span over which growth is measured, and the furthest it is extrapolated."""
SAMPLE_NS: Final = SECOND_NS
MAX_SAMPLES: Final = TREND_NS // SAMPLE_NS
MOST_GROWTH: Final = 2.0
"""The bound on extrapolated work, as a multiple of the present work."""
MOST_MORE: Final = 256
"""The maximum number of workers requested beyond those that serve; larger numbers take several decisions."""
GUARD_S: Final = 60.0
"""The time that a started worker may still run once asked to end, which is reserved from the day's GPU-hours."""
AT_ONCE_NS: Final = 5 * SECOND_NS
"""The longest wait for a machine that still counts as no wait."""


class ScaleReason(Enum):
    ENOUGH = "enough"
    # No split of the present workers has room for the work, or will have when others could have started.
    PRESSES = "too_small"
    CALM = "calm"
    # The forecast demand needs more workers than there are.
    FORECAST = "forecast"
    # The limits allow another number than the work requires.
    LIMITS = "limits"
    # The day's GPU-hours of started workers are used up.
    GPU_HOURS = "gpu_hours"


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """The numbers of a model's workers by state and origin."""

    others: int
    """The workers in a role that people started and that only people end."""
    started_serving: int = 0
    """The workers in a role that the actuator started."""
    standby: int = 0
    """The started workers that are registered and warm, but without work."""
    started: int = 0
    """All workers that the actuator started: serving, on standby or still starting."""
    most_started: int = 0
    """The maximum number of workers the actuator can have; 0 without an actuator."""
    gpus_a_worker: int = 1

    @property
    def serving(self) -> int:
        return self.others + self.started_serving


@dataclass(frozen=True, slots=True)
class WorkTrend:
    """A sample of the work. One is taken each second."""

    at_ns: int
    prompts: float
    decodes: int


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """The state that one decision about the number of workers passes to the next."""

    pressed_since_ns: int = 0
    calm_since_ns: int = 0
    idle_since_ns: int = 0
    """The time since which more workers are started than wanted; 0 if none are."""
    trend: tuple[WorkTrend, ...] = ()
    wished: int = 0
    spent_gpu_s: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """The GPU seconds used by started workers today, by day since 1970 (UTC)."""
    charged_ns: int = 0
    """The time up to which GPU seconds are counted."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The decision about a model's number of workers."""

    wished: int
    """The workers that should have a role."""
    started: int
    """The workers that the actuator should have."""
    code: ScaleReason
    work: Workload
    """The work expected at the end of the start-up time."""
    memory: ScaleMemory


def scale(
    engine: WorkerProfile,
    work: Workload,
    pool: ModelWorkers,
    limits: ModelLimits,
    *,
    memory: ScaleMemory,
    now_ns: int,
    start_up_ns: int,
    forecast: int = 0,
    calm_ns: int = CALM_NS,
    linger_ns: int = LINGER_NS,
) -> Scaled:
    """Decide how many workers should serve and how many the actuator should have.

    `forecast` is the minimum number of workers from the hourly plan; limits apply to it too.
    """
    memory = charged(memory, pool, now_ns)
    memory = replace(memory, trend=_noted(memory.trend, work, now_ns))
    ahead = _ahead(work, memory.trend, start_up_ns)
    needed = workers_needed(engine, ahead, pool.serving, limits)
    pressed = needed > pool.serving
    going = memory.wished if 0 < memory.wished < pool.serving else pool.serving
    fewer = max(going - 1, pool.others, 1)
    calm = fewer < going and not pressed and _cost(engine, work, fewer, limits) < SPARE
    pressed_since_ns = (memory.pressed_since_ns or now_ns) if pressed else 0
    calm_since_ns = (memory.calm_since_ns or now_ns) if calm else 0
    wished, code = (pool.serving if pressed else going), ScaleReason.ENOUGH
    if pressed and now_ns - pressed_since_ns >= PRESSED_NS:
        wished, code = needed, ScaleReason.PRESSES
    elif calm and now_ns - calm_since_ns >= calm_ns:
        wished, code, calm_since_ns = fewer, ScaleReason.CALM, now_ns
    if forecast > wished:
        wished, code = forecast, ScaleReason.FORECAST
    allowed = min(max(wished, limits.workers_min), limits.workers_max)
    if allowed != wished:
        wished, code = allowed, ScaleReason.LIMITS
    started, code = _started(pool, wished, limits, code, memory=memory, now_ns=now_ns)
    idle_since_ns = (memory.idle_since_ns or now_ns) if started < pool.started else 0
    if idle_since_ns and now_ns - idle_since_ns < linger_ns and code is not ScaleReason.GPU_HOURS:
        # The surplus workers stay on standby, warm.
        started = min(pool.started, _most_started(pool, limits), _affordable(pool, limits, memory, now_ns))
    memory = replace(
        memory,
        pressed_since_ns=pressed_since_ns,
        calm_since_ns=calm_since_ns,
        idle_since_ns=idle_since_ns,
        wished=wished,
    )
    return Scaled(wished, started, code, ahead, memory)


def workers_needed(engine: WorkerProfile, work: Workload, serving: int, limits: ModelLimits) -> int:
    """Return the fewest workers, not below `serving`, whose best split has a pressure of at most `FULL`."""
    low, high = max(serving, 1), serving + MOST_MORE
    if _cost(engine, work, low, limits) <= FULL:
        return low
    while low < high:
        middle = (low + high) // 2
        if _cost(engine, work, middle, limits) <= FULL:
            high = middle
        else:
            low = middle + 1
    return low


def mixed_instead(engine: WorkerProfile, work: Workload, prefill: int, decode: int) -> int:
    """Return how many mixed workers replace the `prefill` and `decode` workers of a plan.

    They compute prompts that fill the former up to `FULL`, beside the sequences that fill the latter, at present
    lengths. If nothing decodes now, lengths are unknown and the result is the sum of both.
    """
    whole = prefill + decode
    if not (prefill and decode and work.decodes):
        return whole
    context = max(work.kv_tokens // work.decodes, 1)
    most = most_decodes(engine, work.tpot_ns, context)
    if engine.kv_tokens:
        most = min(most, max(int(engine.kv_tokens * KV_FILL) // context, 1))
    decodes = round(decode * most * FULL)
    planned = Workload(prefill * FULL, decodes, decodes * context, work.tpot_ns)
    for count in range(max(prefill, decode), whole):
        if split(engine, planned, 0, count).cost <= FULL:
            return count
    return whole


def charged(memory: ScaleMemory, pool: ModelWorkers, now_ns: int) -> ScaleMemory:
    """Add the GPU time that started workers have used since the last decision, split by day."""
    if not memory.charged_ns or now_ns <= memory.charged_ns:
        return replace(memory, charged_ns=max(now_ns, memory.charged_ns))
    today, gpus = now_ns // DAY_NS, pool.started * pool.gpus_a_worker
    since_ns = max(memory.charged_ns, today * DAY_NS)
    spent_s = memory.spent_gpu_s.get(today, 0.0) + gpus * (now_ns - since_ns) / SECOND_NS
    return replace(memory, spent_gpu_s=MappingProxyType({today: spent_s}), charged_ns=now_ns)


def _started(
    pool: ModelWorkers, wished: int, limits: ModelLimits, code: ScaleReason, *, memory: ScaleMemory, now_ns: int
) -> tuple[int, ScaleReason]:
    """Return the number of workers that the actuator should have, beyond those that people started."""
    wanted = min(max(wished - pool.others, 0), _most_started(pool, limits))
    affordable = _affordable(pool, limits, memory, now_ns)
    return (affordable, ScaleReason.GPU_HOURS) if affordable < wanted else (wanted, code)


def _affordable(pool: ModelWorkers, limits: ModelLimits, memory: ScaleMemory, now_ns: int) -> int:
    """Return the number of started workers that the day's remaining GPU-hours pay for until they have ended."""
    left_s = HOUR_S * limits.gpu_hours_day - memory.spent_gpu_s.get(now_ns // DAY_NS, 0.0)
    return max(int(left_s / (GUARD_S * pool.gpus_a_worker)), 0)


def _most_started(pool: ModelWorkers, limits: ModelLimits) -> int:
    return max(min(pool.most_started, limits.workers_max - pool.others), 0)


def _cost(engine: WorkerProfile, work: Workload, workers: int, limits: ModelLimits) -> float:
    found = best_split(engine, work, workers, limits)
    return found.cost if found is not None else float("inf")


def _noted(trend: tuple[WorkTrend, ...], work: Workload, now_ns: int) -> tuple[WorkTrend, ...]:
    if trend and now_ns - trend[-1].at_ns < SAMPLE_NS:
        return trend
    kept = tuple(each for each in trend if now_ns - each.at_ns < TREND_NS)
    return (*kept, WorkTrend(now_ns, work.prompts, work.decodes))[-MAX_SAMPLES:]


def _ahead(work: Workload, trend: tuple[WorkTrend, ...], ahead_ns: int) -> Workload:
    """Extrapolate work that has grown over at least three samples; return other work as it is."""
    ahead_ns = min(ahead_ns, TREND_NS)
    if len(trend) < 3 or not ahead_ns:
        return work
    span_ns = trend[-1].at_ns - trend[0].at_ns
    if span_ns < 3 * SAMPLE_NS:
        return work
    prompts = _growth([(each.at_ns, each.prompts) for each in trend]) * ahead_ns
    decodes = _growth([(each.at_ns, float(each.decodes)) for each in trend]) * ahead_ns
    more_prompts = min(max(prompts, 0.0), (MOST_GROWTH - 1) * work.prompts)
    more_decodes = min(max(round(decodes), 0), round((MOST_GROWTH - 1) * work.decodes))
    kv_tokens = work.kv_tokens + (work.kv_tokens * more_decodes // work.decodes if work.decodes else 0)
    return replace(work, prompts=work.prompts + more_prompts, decodes=work.decodes + more_decodes, kv_tokens=kv_tokens)


def _growth(points: list[tuple[int, float]]) -> float:
    """Return the growth per nanosecond, the median slope between neighbours, which resists single bursts."""
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points) if b[0] > a[0])
    return slopes[len(slopes) // 2] if slopes else 0.0


@dataclass(slots=True)
class StartUp:
    """The measured time from the request of a worker until it serves, for one actuator.

    A worker waits for a machine with room, then starts on it. An autoscaling cluster has room at once for some workers,
    and takes minutes for the next one. So the wait is learned separately, and counts while the last worker to arrive
    had to wait for its machine.
    """

    start_ns: int
    """The time from machine to registration: the slowest of the last starts, initially as configured."""
    machine_ns: int = 0
    """The wait for a machine while machines are scarce: the longest of the last waits, initially as configured."""
    scarce: bool = False
    """True if the last worker had to wait for its machine, so that the next one will too."""
    # By unregistered worker, the time at which the actuator first named it.
    _requested_ns: dict[str, int] = field(default_factory=dict)
    # By unregistered worker, the time at which it had a machine.
    _placed_ns: dict[str, int] = field(default_factory=dict)

    @property
    def ahead_ns(self) -> int:
        """The expected start-up time of a worker if it is requested now."""
        return self.start_ns + (self.machine_ns if self.scarce else 0)

    def note(
        self, names: Sequence[str], *, without_machine: Collection[str], there: Collection[str], now_ns: int
    ) -> None:
        """Record the progress of workers: `names` are those of the actuator, `there` those that are registered."""
        for name in names:
            if name in there:
                self._note_registered(name, now_ns)
                continue
            requested_ns = self._requested_ns.setdefault(name, now_ns)
            waited_ns = now_ns - requested_ns
            if name in without_machine:
                if waited_ns > AT_ONCE_NS:
                    self.scarce = True
                    self.machine_ns = max(self.machine_ns, waited_ns)
            elif name not in self._placed_ns:
                self._placed_ns[name] = now_ns
                self._note_placed(waited_ns)
        self._requested_ns = {name: at_ns for name, at_ns in self._requested_ns.items() if name in names}
        self._placed_ns = {name: at_ns for name, at_ns in self._placed_ns.items() if name in names}

    def _note_placed(self, waited_ns: int) -> None:
        self.scarce = waited_ns > AT_ONCE_NS
        if self.scarce:
            self.machine_ns = max(waited_ns, (self.machine_ns + waited_ns) // 2)

    def _note_registered(self, name: str, now_ns: int) -> None:
        requested_ns = self._requested_ns.pop(name, None)
        placed_ns = self._placed_ns.pop(name, requested_ns)
        if placed_ns is not None:
            took_ns = now_ns - placed_ns
            self.start_ns = max(took_ns, (self.start_ns + took_ns) // 2)


@dataclass(frozen=True, slots=True)
class RoleWish:
    """The desired number of a model's workers in a role."""

    serving: int
    spares: frozenset[str]
    """The workers started by an actuator; only these change roles to reach the number."""


def call_up(
    engine: WorkerProfile,
    work: Workload,
    workers: Sequence[PlannedWorker],
    wish: RoleWish,
    limits: ModelLimits,
    *,
    most: int,
) -> list[RoleOrder]:
    """Return the first `most` role changes towards the desired number.

    The spare workers with the least KV leave first. No role falls below its limit or becomes empty.
    """
    serving = [each for each in workers if each.role is not Role.STANDBY]
    ready = [each for each in workers if each.role is Role.STANDBY and each.movable and _is_free(each, wish.spares)]
    if len(serving) < wish.serving:
        return _up(engine, work, serving, ready[: min(wish.serving - len(serving), most)], limits)
    leaving = [each for each in serving if each.movable and _is_free(each, wish.spares)]
    return _down(engine, work, serving, leaving, limits, count=min(len(serving) - wish.serving, most))


def _is_free(worker: PlannedWorker, spares: Collection[str]) -> bool:
    return worker.id in spares and not worker.pinned


def _up(
    engine: WorkerProfile,
    work: Workload,
    serving: Sequence[PlannedWorker],
    coming: Sequence[PlannedWorker],
    limits: ModelLimits,
) -> list[RoleOrder]:
    prefill = sum(each.role is Role.PREFILL for each in serving)
    best = best_split(engine, work, len(serving) + len(coming), limits)
    lacking = max(best.prefill - prefill, 0) if best is not None else 0
    return [
        RoleOrder(each.id, Role.PREFILL, 0) if number < lacking else RoleOrder(each.id, Role.MIXED, engine.chunk_tokens)
        for number, each in enumerate(coming)
    ]


def _down(
    engine: WorkerProfile,
    work: Workload,
    serving: Sequence[PlannedWorker],
    leaving: Sequence[PlannedWorker],
    limits: ModelLimits,
    *,
    count: int,
) -> list[RoleOrder]:
    found: list[RoleOrder] = []
    counts = {role: sum(each.role is role for each in serving) for role in (Role.PREFILL, Role.MIXED)}
    least = {Role.PREFILL: max(limits.prefill_min, min(counts[Role.PREFILL], 1)), Role.MIXED: limits.decode_min}
    best = best_split(engine, work, len(serving) - count, limits) if count > 0 else None
    wanted = {Role.PREFILL: best.prefill, Role.MIXED: best.mixed} if best is not None else least
    # Take from the role with the largest surplus over the best split of the rest, least KV first.
    for each in sorted(leaving, key=lambda each: (each.kv_tokens, each.prompt_tokens)):
        beyond = {role: counts[role] - wanted[role] for role in counts}
        if len(found) < count and counts[each.role] > least[each.role] and beyond[each.role] == max(beyond.values()):
            counts[each.role] -= 1
            found.append(RoleOrder(each.id, Role.STANDBY, 0))
    return found
