"""From paths of work to workers by hour, when those there are run short, and what it costs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from libs.policy.capacity.table import PoolTable
from libs.policy.forecast.history import Floats

Phase = Literal["prefill", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
Whole = NDArray[np.int64]
SURE: Final = 0.8
"""Share of paths that agree before a shortage is one to speak of."""


@dataclass(frozen=True, slots=True)
class PoolHour:
    """What one pool needs in one stretch of time, in workers."""

    surely: int
    """That at least `SURE` of the paths need."""
    p50: int
    p95: int
    asked: int
    """At the confidence that was asked for, with spare workers."""
    short: float
    """Share of paths in which the workers that are there are too few."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first stretch in which a pool is too small."""

    phase: Phase
    at_s: float
    """Begin of that stretch."""
    workers: int
    """That are missing in at least `SURE` of the paths."""
    sure: float
    """Share of paths that are short in that stretch."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Stretches one after the other."""

    starts_s: tuple[float, ...]
    step_s: float
    pools: Mapping[Phase, tuple[PoolHour, ...]]
    there: Mapping[Phase, int]
    """Workers of today; empty: not known."""
    confidence: float
    spare: int
    """Workers of each pool beyond what is needed, for those that are lost."""

    def most(self, phase: Phase) -> int:
        """Workers that are enough all the time."""
        return max((each.asked for each in self.pools[phase]), default=0)


def needed_workers(work: Floats, table: PoolTable) -> Whole:
    """[...] of [...] work: the fewest workers by the table."""
    flat = work.ravel()
    levels, places = np.unique(np.round(flat, 3), return_inverse=True)
    found = np.array([table.workers_for(float(each)) for each in levels], np.int64)
    return np.asarray(found[places].reshape(work.shape))


def make_plan(
    work: Mapping[Phase, Floats],
    tables: Mapping[Phase, PoolTable],
    *,
    starts_s: Sequence[float],
    step_s: float,
    confidence: float,
    spare: int = 0,
    there: Mapping[Phase, int] | None = None,
    least: int = 1,
) -> CapacityPlan:
    """work: [paths, stretches] of each phase, in workers that would be busy all the time.

    `least`: of each pool, also while nothing comes. Raises ValueError for a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError("a confidence is between 0 and 1")
    pools: dict[Phase, tuple[PoolHour, ...]] = {}
    for phase in PHASES:
        needed = needed_workers(work[phase], tables[phase])
        have = (there or {}).get(phase)
        quantiles = _quantiles(needed, (1 - SURE, 0.5, 0.95, confidence))
        pools[phase] = tuple(
            PoolHour(
                surely=int(quantiles[0, at]),
                p50=int(quantiles[1, at]),
                p95=int(quantiles[2, at]),
                asked=max(int(quantiles[3, at]), least) + spare,
                short=float((needed[:, at] > have).mean()) if have is not None else 0.0,
            )
            for at in range(len(starts_s))
        )
    return CapacityPlan(tuple(starts_s), step_s, pools, dict(there or {}), confidence, spare)


def _quantiles(needed: Whole, levels: Sequence[float]) -> Whole:
    """[levels, stretches] The least number that so large a share of paths needs at most."""
    if not len(needed):
        return np.zeros((len(levels), needed.shape[1]), np.int64)
    ordered = np.sort(needed, axis=0)
    places = [min(int(np.ceil(level * len(ordered))) - 1, len(ordered) - 1) for level in levels]
    return np.asarray(ordered[places])


def first_shortages(plan: CapacityPlan) -> list[Shortage]:
    """Find the first stretch of each pool in which `SURE` of the paths are short."""
    found = []
    for phase in PHASES:
        have = plan.there.get(phase)
        if have is None:
            continue
        for start_s, each in zip(plan.starts_s, plan.pools[phase], strict=True):
            if each.surely > have:
                found.append(Shortage(phase, start_s, each.surely - have, each.short))
                break
    return found


def runs_short(plan: CapacityPlan, phase: Phase, quantile: Literal["p50", "p95"]) -> float | None:
    """Begin of the first stretch that needs more than is there; None: none does, or what is there is not known."""
    have = plan.there.get(phase)
    if have is None:
        return None
    pairs = zip(plan.starts_s, plan.pools[phase], strict=True)
    return next((start_s for start_s, each in pairs if getattr(each, quantile) > have), None)


def gpu_hours(plan: CapacityPlan, gpus: int) -> tuple[float, float]:
    """(as many as each stretch needs, as many as are enough all the time) over the plan."""
    hours = plan.step_s / 3600
    moving = sum(each.asked for phase in PHASES for each in plan.pools[phase]) * hours * gpus
    still = sum(plan.most(phase) for phase in PHASES) * len(plan.starts_s) * hours * gpus
    return moving, still


def wished_workers(plan: CapacityPlan, now_s: float, lead_s: float) -> dict[Phase, int]:
    """Workers that each pool is to have once those ordered now are there: the most that is needed from now until one
    stretch after `lead_s`, so that nobody is let go who is wanted again before a new one could start. 0 for a pool that
    has no work in 19 of 20 paths: the least that a plan counts for it is no reason to start a worker.

    Empty where the plan says nothing of that time.
    """
    until_s = now_s + lead_s + plan.step_s
    places = [at for at, start in enumerate(plan.starts_s) if start < until_s and start + plan.step_s > now_s]
    if not places:
        return {}
    wished = {}
    for phase in PHASES:
        pool = [plan.pools[phase][at] for at in places]
        wished[phase] = max(each.asked for each in pool) if any(each.p95 for each in pool) else 0
    return wished


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
