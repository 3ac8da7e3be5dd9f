"""Advice on actions open to an operator but not to the planner, with the expected effect as a range.

The effect is the change of pressure from now. It is evaluated with present demand and with its spread, and with the
present queue computed by then or not. Prompts that wait only for decode places are computed as soon as some are free,
and by then their sequences decode or have ended. The range covers both outcomes. The measured effect of followed advice
is reported beside it.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from libs.policy.kv_links import LEAST_GB_PER_S, SLOW_LINK
from libs.policy.planner.due import LEAST_DUE_NS, prompts_served, prompts_wanted
from libs.policy.planner.limits import ModelLimits, best_split
from libs.policy.planner.scaling import FULL
from libs.policy.pressure import Split, WorkerProfile, Workload, split


def pressing_tokens(served: float, hopeful_tokens: int, waiting_tokens: int) -> int:
    """Return the prompt tokens at gateways that count as pressure.

    Late requests use the capacity that others leave, so they count only if nothing is being served.
    """
    return hopeful_tokens if served else max(hopeful_tokens, waiting_tokens)


def decodes_to_come(running: int, waiting: int, prompt_tokens: int) -> tuple[int, float]:
    """Return the sequences of a prefill worker that will decode soon, and the KV tokens they bring.

    Only prompts being computed count. A waiting prompt replaces an earlier sequence that has ended.
    `prompt_tokens` is the number still to be computed, of running and waiting prompts together.
    """
    if not running:
        return 0, 0.0
    return running, prompt_tokens * running / (running + waiting)


def workload(
    engine: WorkerProfile,
    *,
    served: float,
    waiting_tokens: int,
    decodes: int,
    kv_tokens: int,
    held: int,
    held_prompt_tokens: int,
    tpot_ns: int,
    prompt_tokens: float = 0.0,
    due_ns: float = LEAST_DUE_NS,
    encode_ns: float = 0.0,
    held_encode_ns: float = 0.0,
) -> Workload:
    """Return the work of a model's workers.

    - served: the number of workers kept busy by the prompts computed recently
    - waiting_tokens: tokens of waiting prompts
    - decodes, kv_tokens: sequences that decode or soon will, and their KV
    - held, held_prompt_tokens: requests waiting for a place to decode
    - prompt_tokens: the length of the waiting prompts; 0 if it is unknown
    - due_ns: the time within which they should be computed
    - encode_ns, held_encode_ns: the time of one worker to encode the images of waiting prompts and of held requests

    Gateways do not report how much of the held requests is already computed, so each is assumed to hold as much KV
    as the other sequences.
    """
    speed = engine.speed_at(prompt_tokens)
    waiting_ns = waiting_tokens / speed + encode_ns
    alike = kv_tokens // decodes if decodes else 0
    return Workload(
        prompts_wanted(served, waiting_ns, due_ns),
        decodes,
        kv_tokens,
        tpot_ns,
        waiting_ns,
        held=held,
        held_kv_tokens=max(held_prompt_tokens, held * alike),
        held_prompts=prompts_wanted(0.0, held_prompt_tokens / speed + held_encode_ns, due_ns),
        due_ns=due_ns,
    )


DEMAND_SPREAD: Final = 0.15
"""The assumed relative variation of demand that was observed only briefly. A mean over five seconds varies no more."""
LEAST_GAIN: Final = 0.15
"""The minimum gain in pressure or speed worth advising; less is within the error of the predictions."""
CHUNK_OF_BEST: Final = 0.95
"""The share of the best prompt speed at which a chunk counts as large enough."""
MOST_CHUNK_TOKENS: Final = 16_384
CHUNK_STEP: Final = 32
SHORT_SHARE: Final = 0.3
"""The share of a worker's time up to which prompts count as short in comparison with its decodes."""
LIKELY: Final = 0.8
"""The target probability that the effect lies in its range."""
DRAIN_S: Final = 10.0
MAX_NAMED: Final = 4
MAYBE: Final = 0.5
"""The confidence of advice about a link that has no faster link to be compared with."""
MOST_PRESSURE: Final = 1e3
"""The finite pressure that represents a phase without workers."""


class AdviceKind(Enum):
    ADD_WORKERS = "add_workers"
    CHUNK = "chunk"
    AGGREGATE = "aggregate"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class KvSpeed:
    """The highest speed at which KV reaches a worker."""

    worker_id: str
    gb_per_s: float
    gpu: bool
    """True if the worker has a GPU; transfers between CPUs are small and do not measure the link."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation to the operator of a model, with its expected effect."""

    kind: AdviceKind
    what: str
    """The recommendation as a sentence for the operator."""
    command: str
    figure: str
    """The figure that changes: `pressure` of the worse phase, `prompt_tokens_per_s` or `kv_gb_per_s`."""
    # Lower and upper bound of the figure's change.
    low: float
    high: float
    confidence: float = LIKELY


def settled(work: Workload) -> Workload:
    """Return the work that determines the number of workers in the long run.

    The queue is to be computed within `DRAIN_S` rather than within `due_ns`, which would take many times the workers
    while it lasts.
    """
    queued = min(work.waiting_ns / work.due_ns, work.prompts)
    return replace(work, prompts=prompts_served(work) + queued * work.due_ns / 1e9 / DRAIN_S)


def mean_of(looks: Sequence[tuple[Workload, Split]]) -> tuple[Workload, Split]:
    """Return the mean of one or more samples taken a second apart while the model's roles did not change.

    Single samples are too noisy to promise an effect by.
    """
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
    """Return all advice worth giving now.

    `needed` is the number of workers whose best split has room. `spread` is the share by which demand varies.
    """
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
    what = f"add {more} worker{'' if more == 1 else 's'} ({where}): no split of the present {workers} has room"
    command = f"fulcrum planner limits --model {shlex.quote(model)} workers_min={workers + more}"
    return Advice(AdviceKind.ADD_WORKERS, what, command, "pressure", low, high)


def advise_links(links: Sequence[KvSpeed]) -> Advice | None:
    """Return advice about workers that receive KV much slower than others of their model, or than any GPU link.

    The promised speed lies between half of the others' speed and all of it.
    """
    fastest = max((each.gb_per_s for each in links), default=0.0)
    others = fastest >= LEAST_GB_PER_S or not any(each.gpu for each in links)
    wanted = fastest if others else 2 * LEAST_GB_PER_S
    slow = [each for each in links if each.gb_per_s < wanted * SLOW_LINK and (each.gpu or fastest >= LEAST_GB_PER_S)]
    if not slow:
        return None
    slowest = min(each.gb_per_s for each in slow)
    names = ", ".join(each.worker_id for each in slow[:MAX_NAMED]) + ("…" if len(slow) > MAX_NAMED else "")
    beside = f", to others at {fastest:.1f}" if others else ""
    what = f"KV comes to {names} at {slowest:.2g} GB/s{beside}; the link could do more, so check shared memory and RDMA"
    return Advice(AdviceKind.LINK, what, "fulcrum doctor", "kv_gb_per_s", wanted / 2 - slowest, wanted - slowest,
                  LIKELY if others else MAYBE)  # fmt: skip


def _aggregate(engine: WorkerProfile, work: Workload, now: Split, *, spread: float) -> Advice | None:
    """Advise mixed workers only, if prompts are short in comparison with decodes and the split costs more."""
    workers = now.prefill + now.mixed
    if not now.prefill or workers < 2 or not work.decodes:
        return None
    together = split(engine, work, 0, workers)
    if work.prompts > SHORT_SHARE * workers or together.cost > now.cost * (1 - LEAST_GAIN) or now.cost < FULL:
        return None
    low, high = _relief(engine, work, now, together, spread)
    share = f"prompts take {work.prompts / workers:.0%} of its workers' time"
    what = f"have every worker of this model do both: {share}, and hide beside decodes"
    return Advice(AdviceKind.AGGREGATE, what, "fulcrum role WORKER mixed", "pressure", low, high)


def _relief(engine: WorkerProfile, work: Workload, before: Split, after: Split, spread: float) -> tuple[float, float]:
    """Return the lower and upper bound of the change in pressure.

    They cover the spread of demand, and the present queue being computed by then or still waiting.
    """
    now = min(before.pressure, MOST_PRESSURE)
    found = []
    for factor in (1 - spread, 1.0, 1 + spread):
        for waiting in (0.0, 1.0):
            at = _with_demand(work, factor, waiting)
            found.append(min(split(engine, at, after.prefill, after.mixed).pressure, MOST_PRESSURE) - now)
    return min(found), max(found)


def _with_demand(work: Workload, factor: float, waiting: float) -> Workload:
    """Return the work with `factor` times the demand and the share `waiting` of the present queue."""
    queued = min(work.waiting_ns / work.due_ns, work.prompts)
    for_places = min(work.held_prompts, queued)
    decodes, kv_tokens = work.decodes + work.held * waiting, work.kv_tokens + work.held_kv_tokens * waiting
    return replace(
        work,
        prompts=(work.prompts - queued) * factor + (queued - for_places) * waiting,
        decodes=round(decodes * factor),
        kv_tokens=round(kv_tokens * factor),
        waiting_ns=max(work.waiting_ns - for_places * work.due_ns, 0.0) * waiting,
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
        f"prefill chunk {best:,} in place of {engine.chunk_tokens:,}: prompts are computed {there / here:.1f} times as "
        "fast",
        f"FULCRUM_WORKER_PREFILL_CHUNK_TOKENS={best}",
        "prompt_tokens_per_s",
        gain * (1 - DEMAND_SPREAD),
        gain * (1 + DEMAND_SPREAD),
    )


def best_chunk(engine: WorkerProfile) -> int:
    """Return the smallest chunk, in steps of `CHUNK_STEP`, at which prompts run nearly as fast as at any size."""
    sizes: Sequence[int] = range(CHUNK_STEP, MOST_CHUNK_TOKENS + 1, CHUNK_STEP)
    speeds = [size / max(engine.step_time.chunks_ns(size, size * size), 1.0) for size in sizes]
    enough = max(speeds) * CHUNK_OF_BEST
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= enough)
