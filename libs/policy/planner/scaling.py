"""How many workers a model should have: the horizon of seconds to minutes. Pure: what was seen before comes in and goes
out.

Roles move work between phases; when no split of roles has room, workers have to come, and they take their start-up time
to. So the number is decided for the demand at the end of that time, as far as it has been growing, and standby workers
that are warm bridge it. A number falls only after work has been small for long, one worker at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.splits import best_split
from libs.policy.pressure.splits import KV_FILL, WorkerProfile, Workload, most_decodes, split

SECOND_NS: Final = 1_000_000_000
HOUR_S: Final = 3_600.0
DAY_NS: Final = 86_400 * SECOND_NS
FULL: Final = 0.85
"""Pressure up to which the best split of the workers has room: above it more are wished."""
SPARE: Final = 0.55
"""Pressure that the best split of one worker fewer must stay under for that one to go."""
PRESSED_NS: Final = 2 * SECOND_NS
"""Work must have been too much for so long: a burst is over before a worker has started."""
CALM_NS: Final = 60 * SECOND_NS
"""And small for so long."""
LINGER_NS: Final = 120 * SECOND_NS
"""A worker that is no longer wished stays on standby, warm, for so long before it is ended."""
TREND_NS: Final = 60 * SECOND_NS
"""How far back growth is looked at, and how far ahead it is taken to go on at most."""
SAMPLE_NS: Final = SECOND_NS
MAX_SAMPLES: Final = TREND_NS // SAMPLE_NS
MOST_GROWTH: Final = 2.0
"""Times the present work that growth is believed to reach."""
MOST_MORE: Final = 256
"""Workers that are wished beyond those that serve: a number further off is reached in several decisions."""
GUARD_S: Final = 60.0
"""GPU time that a started worker may still take once it is asked to end: kept back from the day's GPU-hours."""


class ScaleReason(Enum):
    """Why workers are wished, or not."""

    ENOUGH = "enough"
    PRESSES = "too_small"
    """No split of the workers there are has room for the work, or will have when others would have started."""
    CALM = "calm"
    FORECAST = "forecast"
    """What is to come wants more than what there is."""
    LIMITS = "limits"
    """The number that limits allow is another one than work asks for."""
    GPU_HOURS = "gpu_hours"
    """The day's GPU-hours of started workers are spent."""


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """A model's workers."""

    others: int
    """In a role, and not started by the actuator: people's, who alone end them."""
    started_serving: int = 0
    """In a role, and started by it."""
    standby: int = 0
    """Started by it, registered, warm, without work."""
    started: int = 0
    """By it, those that serve, stand by or still start."""
    most_started: int = 0
    """That it can have; 0: there is no actuator."""
    gpus_a_worker: int = 1

    @property
    def serving(self) -> int:
        """In a role."""
        return self.others + self.started_serving


@dataclass(frozen=True, slots=True)
class WorkTrend:
    """A second of work."""

    at_ns: int
    prompts: float
    decodes: int


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """What a decision leaves to the next one."""

    pressed_since_ns: int = 0
    calm_since_ns: int = 0
    idle_since_ns: int = 0
    """Since when more is started than wished; 0: no more is."""
    trend: tuple[WorkTrend, ...] = ()
    wished: int = 0
    spent_gpu_s: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Of started workers, by day since 1970, UTC; of today alone."""
    charged_ns: int = 0
    """Until when."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What was decided about a model's number of workers."""

    wished: int
    """Workers in a role."""
    started: int
    """That the actuator should have."""
    code: ScaleReason
    work: Workload
    """At the end of the start-up time, as far as growth is believed."""
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
    """Decide. `forecast`: workers that the horizon of hours wishes, at least; limits hold for them too."""
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
        # Those stand by, warm.
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
    """The fewest, not below `serving`, of which the best split presses no more than `FULL`."""
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
    """Mixed workers that do what a plan counts `prefill` and `decode` workers for: prompts that fill the ones up to
    `FULL`, beside as many sequences, of the length of those that decode now, as fill the others. Both together where
    nothing decodes now: how much hides beside sequences of unknown length is unknown."""
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
    """The GPU time that started workers have taken since the last decision, on the day that it was taken."""
    if not memory.charged_ns or now_ns <= memory.charged_ns:
        return replace(memory, charged_ns=max(now_ns, memory.charged_ns))
    today, gpus = now_ns // DAY_NS, pool.started * pool.gpus_a_worker
    since_ns = max(memory.charged_ns, today * DAY_NS)
    spent_s = memory.spent_gpu_s.get(today, 0.0) + gpus * (now_ns - since_ns) / SECOND_NS
    return replace(memory, spent_gpu_s=MappingProxyType({today: spent_s}), charged_ns=now_ns)


def _started(
    pool: ModelWorkers, wished: int, limits: ModelLimits, code: ScaleReason, *, memory: ScaleMemory, now_ns: int
) -> tuple[int, ScaleReason]:
    """How many the actuator should have: what is wished beyond the workers that others started."""
    wanted = min(max(wished - pool.others, 0), _most_started(pool, limits))
    affordable = _affordable(pool, limits, memory, now_ns)
    return (affordable, ScaleReason.GPU_HOURS) if affordable < wanted else (wanted, code)


def _affordable(pool: ModelWorkers, limits: ModelLimits, memory: ScaleMemory, now_ns: int) -> int:
    """Started workers that the rest of the day's GPU-hours is enough for, until they have ended."""
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
    """Workload as it will be so much later, where it has grown in a row of samples; else as it is."""
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
    """Of a nanosecond: the median of the slopes between neighbours, which one burst does not move."""
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points) if b[0] > a[0])
    return slopes[len(slopes) // 2] if slopes else 0.0
