"""Capacity plans from sample paths of work: workers by hour, the first shortages, and the cost."""

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
"""The share of paths that must agree for a shortage to be reported."""


@dataclass(frozen=True, slots=True)
class PoolHour:
    """The workers that one pool needs in one stretch of time."""

    surely: int
    """Workers that at least `SURE` of the paths need."""
    p50: int
    p95: int
    asked: int
    """Workers at the requested confidence, plus spare ones."""
    short: float
    """The share of paths in which the present workers are too few."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first stretch in which a pool is too small."""

    phase: Phase
    at_s: float
    """The beginning of that stretch."""
    workers: int
    """Workers missing in at least `SURE` of the paths."""
    sure: float
    """The share of paths that are short in that stretch."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The needs of both pools over consecutive stretches of time."""

    starts_s: tuple[float, ...]
    step_s: float
    pools: Mapping[Phase, tuple[PoolHour, ...]]
    there: Mapping[Phase, int]
    """Present workers by phase; empty if unknown."""
    confidence: float
    spare: int
    """Workers of each pool beyond the need, to replace lost ones."""

    def most(self, phase: Phase) -> int:
        """Return the number of workers that suffices at all times."""
        return max((each.asked for each in self.pools[phase]), default=0)


def needed_workers(work: Floats, table: PoolTable) -> Whole:
    """Return the fewest workers by the table for each amount of work, in the same shape."""
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
    """Plan both pools for `work`, of shape [paths, stretches] for each phase, in permanently busy workers.

    Each pool has at least `least` workers, even without demand. Raise ValueError for a confidence outside (0, 1).
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
    """Return, of shape [levels, stretches], the least number that covers this share of the paths."""
    if not len(needed):
        return np.zeros((len(levels), needed.shape[1]), np.int64)
    ordered = np.sort(needed, axis=0)
    places = [min(int(np.ceil(level * len(ordered))) - 1, len(ordered) - 1) for level in levels]
    return np.asarray(ordered[places])


def first_shortages(plan: CapacityPlan) -> list[Shortage]:
    """Return the first stretch of each pool in which `SURE` of the paths are short."""
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
    """Return the beginning of the first stretch that needs more workers than are present.

    None means that there is none, or that the present workers are unknown.
    """
    have = plan.there.get(phase)
    if have is None:
        return None
    pairs = zip(plan.starts_s, plan.pools[phase], strict=True)
    return next((start_s for start_s, each in pairs if getattr(each, quantile) > have), None)


def gpu_hours(plan: CapacityPlan, gpus: int) -> tuple[float, float]:
    """Return the GPU-hours of the plan: (with as many as each stretch needs, with as many as suffice throughout)."""
    hours = plan.step_s / 3600
    moving = sum(each.asked for phase in PHASES for each in plan.pools[phase]) * hours * gpus
    still = sum(plan.most(phase) for phase in PHASES) * len(plan.starts_s) * hours * gpus
    return moving, still


def wished_workers(plan: CapacityPlan, now_s: float, lead_s: float) -> dict[Phase, int]:
    """Return the workers that each pool should have once those ordered now have started.

    It is the most that is needed from now until one stretch after `lead_s`, so no worker is released that is needed
    again before a new one could start. It is 0 for a pool without work in 19 of 20 paths, as a plan's minimum is no
    reason to start a worker. The result is empty if the plan does not cover that time.
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
    """A source of the newest capacity plan of each model."""

    def plan(self, model: str) -> CapacityPlan | None:
        """Return the newest plan in Unix seconds; None if there is none, which requests nothing."""
        ...


def wishes(plans: CapacityPlans, model: str, now_s: float, lead_s: float) -> dict[Phase, int]:
    """Return the workers that each pool of a model should have once those ordered now have started.

    `lead_s` is the time that a worker takes to start. The result is empty without a plan for that time, which
    leaves the pools as they are (see `wished_workers`).
    """
    plan = plans.plan(model)
    return {} if plan is None else wished_workers(plan, now_s, lead_s)
