"""What somebody may do that the planner may not, and what it is expected to bring, as a range. Pure.

The effect is the change of pressure from now: with demand as it is and with as much less and more of it as it varies,
and with what waits now computed by then or not. Prompts that wait for places alone are computed as soon as there are
some: by then their sequences decode, or have ended. The range spans what comes of those. What came of an
advice that was taken stands beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from libs.policy.metrics.kv_links import LEAST_GB_PER_S, SLOW_LINK
from libs.policy.planner.demand import HORIZON_NS
from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.scaling import FULL
from libs.policy.planner.splits import best_split
from libs.policy.pressure.splits import Split, WorkerProfile, Workload, split

DEMAND_SPREAD: Final = 0.15
"""Share by which demand is taken to vary where it has not been seen for long: a mean over five seconds does no more."""
LEAST_GAIN: Final = 0.15
"""Of pressure or speed: less is within what predictions are off."""
CHUNK_OF_BEST: Final = 0.95
"""A chunk is large enough that computes prompts at this share of the best speed of any."""
MOST_CHUNK_TOKENS: Final = 16_384
CHUNK_STEP: Final = 32
SHORT_SHARE: Final = 0.3
"""Prompts are short where they are this much of a worker's time beside its decodes, or less."""
LIKELY: Final = 0.8
"""That the effect lies in its range: the aim."""
DRAIN_S: Final = 10.0
MAX_NAMED: Final = 4
MAYBE: Final = 0.5
"""Where there is no faster link to promise by."""
MOST_PRESSURE: Final = 1e3
"""Of a phase that nobody serves."""


class AdviceKind(Enum):
    """What is advised."""

    ADD_WORKERS = "add_workers"
    CHUNK = "chunk"
    AGGREGATE = "aggregate"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class KvSpeed:
    """How fast KV comes to a worker, at best."""

    worker_id: str
    gb_per_s: float
    gpu: bool
    """Whether it has one: between CPUs what is sent is small, and says little of the link."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do about a model."""

    kind: AdviceKind
    what: str
    """In words."""
    command: str
    figure: str
    """What changes: pressure (of the phase that is worse off), or prompt_tokens_per_s."""
    low: float
    high: float
    """Its change, from the least to the most."""
    confidence: float = LIKELY


def settled(work: Workload) -> Workload:
    """What workers are needed for in the long run: what waits computed within `DRAIN_S`, not within a second, which
    would take many times the workers for as long as it lasts."""
    queued = min(work.waiting_ns / HORIZON_NS, work.prompts)
    return replace(work, prompts=work.prompts - queued * (1 - 1 / DRAIN_S))


def mean_of(looks: Sequence[tuple[Workload, Split]]) -> tuple[Workload, Split]:
    """Of at least one look, one second apart, at a model whose roles did not change: single ones are too noisy to
    promise by."""
    count = len(looks)
    work, now = looks[-1]
    return (
        replace(
            work,
            prompts=sum(each.prompts for each, _ in looks) / count,
            decodes=round(sum(each.decodes for each, _ in looks) / count),
            kv_tokens=round(sum(each.kv_tokens for each, _ in looks) / count),
            waiting_ns=sum(each.waiting_ns for each, _ in looks) / count,
            held=round(sum(each.held for each, _ in looks) / count),
            held_kv_tokens=round(sum(each.held_kv_tokens for each, _ in looks) / count),
            held_prompts=sum(each.held_prompts for each, _ in looks) / count,
        ),
        replace(
            now,
            prompt_pressure=sum(min(each.prompt_pressure, MOST_PRESSURE) for _, each in looks) / count,
            decode_pressure=sum(min(each.decode_pressure, MOST_PRESSURE) for _, each in looks) / count,
        ),
    )


def advise(
    model: str,
    engine: WorkerProfile,
    work: Workload,
    now: Split,
    limits: ModelLimits,
    *,
    needed: int,
    spread: float = DEMAND_SPREAD,
) -> list[Advice]:
    """All that is worth saying now. `needed`: workers with which the best split has room; `spread`: the share by which
    demand varies."""
    found = []
    workers = now.prefill + now.mixed
    if needed > workers and now.pressure > FULL:
        found.append(_add(model, engine, work, now, limits, more=needed - workers, spread=spread))
    if (together := _aggregate(engine, work, now, spread=spread)) is not None:
        found.append(together)
    if (chunk := _chunk(engine)) is not None:
        found.append(chunk)
    return found


def _add(
    model: str, engine: WorkerProfile, work: Workload, now: Split, limits: ModelLimits, *, more: int, spread: float
) -> Advice:
    workers = now.prefill + now.mixed
    best = best_split(engine, work, workers + more, limits) or now
    to_prefill, to_decode = max(best.prefill - now.prefill, 0), max(best.mixed - now.mixed, 0)
    where = " and ".join(
        f"{count} to {role}" for count, role in ((to_prefill, "prefill"), (to_decode, "decode")) if count
    )
    low, high = _relief(engine, work, now, best, spread)
    what = f"add {more} worker{'' if more == 1 else 's'} ({where}): no split of {workers} has room"
    return Advice(AdviceKind.ADD_WORKERS, what, f"fulcrum planner limits --model {model} workers_min={workers + more}",
                  "pressure", low, high)  # fmt: skip


def advise_links(links: Sequence[KvSpeed]) -> Advice | None:
    """Where KV comes to workers at a fraction of what others of their model get, or of what any link of a GPU brings.
    At most as fast as to the others is promised, at least half of that."""
    fastest = max((each.gb_per_s for each in links), default=0.0)
    others = fastest >= LEAST_GB_PER_S or not any(each.gpu for each in links)
    wanted = fastest if others else 2 * LEAST_GB_PER_S
    slow = [each for each in links if each.gb_per_s < wanted * SLOW_LINK and (each.gpu or fastest >= LEAST_GB_PER_S)]
    if not slow:
        return None
    slowest = min(each.gb_per_s for each in slow)
    names = ", ".join(each.worker_id for each in slow[:MAX_NAMED]) + ("…" if len(slow) > MAX_NAMED else "")
    beside = f", to others at {fastest:.1f}" if others else ""
    what = f"KV comes to {names} at {slowest:.2g} GB/s{beside}: that is not the link's, check shared memory and RDMA"
    return Advice(AdviceKind.LINK, what, "fulcrum doctor", "kv_gb_per_s", wanted / 2 - slowest, wanted - slowest,
                  LIKELY if others else MAYBE)  # fmt: skip


def _aggregate(engine: WorkerProfile, work: Workload, now: Split, *, spread: float) -> Advice | None:
    """All workers mixed, where prompts are little beside the decodes and the split costs more."""
    workers = now.prefill + now.mixed
    if not now.prefill or workers < 2 or not work.decodes:
        return None
    together = split(engine, work, 0, workers)
    if work.prompts > SHORT_SHARE * workers or together.cost > now.cost * (1 - LEAST_GAIN) or now.cost < FULL:
        return None
    low, high = _relief(engine, work, now, together, spread)
    share = f"its prompts are {work.prompts / workers:.0%} of its workers' time"
    what = f"aggregate this model: {share}, and hide beside decodes"
    return Advice(AdviceKind.AGGREGATE, what, "fulcrum role WORKER mixed", "pressure", low, high)


def _relief(engine: WorkerProfile, work: Workload, before: Split, after: Split, spread: float) -> tuple[float, float]:
    """By how much the pressure of now will have changed, from the least to the most: over demand as it may be, and
    over what waits now having been computed by then, or as much waiting still."""
    now = min(before.pressure, MOST_PRESSURE)
    found = []
    for factor in (1 - spread, 1.0, 1 + spread):
        for waiting in (0.0, 1.0):
            at = _changed(work, factor, waiting)
            found.append(min(split(engine, at, after.prefill, after.mixed).pressure, MOST_PRESSURE) - now)
    return min(found), max(found)


def _changed(work: Workload, factor: float, waiting: float) -> Workload:
    """With `factor` times the demand, and the share `waiting` of what waits now."""
    queued = min(work.waiting_ns / HORIZON_NS, work.prompts)
    for_places = min(work.held_prompts, queued)
    decodes, kv_tokens = work.decodes + work.held * waiting, work.kv_tokens + work.held_kv_tokens * waiting
    return replace(
        work,
        prompts=(work.prompts - queued) * factor + (queued - for_places) * waiting,
        decodes=round(decodes * factor),
        kv_tokens=round(kv_tokens * factor),
        waiting_ns=max(work.waiting_ns - for_places * HORIZON_NS, 0.0) * waiting,
        held=0,
    )


def _chunk(engine: WorkerProfile) -> Advice | None:
    best = best_chunk(engine)
    here, there = engine.chunk_speed, replace(engine, chunk_tokens=best).chunk_speed
    if best <= engine.chunk_tokens or there < here * (1 + LEAST_GAIN):
        return None
    gain = (there - here) * 1e9
    return Advice(
        AdviceKind.CHUNK,
        f"prefill chunk {best:,} in place of {engine.chunk_tokens:,}: prompts at {there / here:.1f}x the speed",
        f"FULCRUM_WORKER_PREFILL_CHUNK_TOKENS={best}",
        "prompt_tokens_per_s",
        gain * (1 - DEMAND_SPREAD),
        gain * (1 + DEMAND_SPREAD),
    )


def best_chunk(engine: WorkerProfile) -> int:
    """The smallest chunk, in steps of `CHUNK_STEP`, at which prompts go nearly as fast as at any."""
    sizes: Sequence[int] = range(CHUNK_STEP, MOST_CHUNK_TOKENS + 1, CHUNK_STEP)
    speeds = [size / max(engine.step_time.chunks_ns(size, size * size), 1.0) for size in sizes]
    enough = max(speeds) * CHUNK_OF_BEST
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= enough)
