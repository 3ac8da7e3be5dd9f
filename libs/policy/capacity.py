"""Capacity plans: the work that sample paths of demand bring to pools, and the workers needed for it by hour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import DAY_S, Floats
from libs.policy.speed import Speed
from libs.policy.step_time import MATRIX_ROWS
from libs.policy.worker.pace import IN_HAND, largest_batch

MOST_WORKERS: Final = 100_000
"""The maximum number of workers of a pool that a plan or a limit may contain; a message with more is malformed."""


@dataclass(frozen=True, slots=True)
class PoolTable:
    """The capacity of one phase: the maximum work for each number of workers.

    Work is counted in permanently busy workers.
    """

    workers: tuple[int, ...]
    """The worker counts of the table's rows, in strictly increasing order."""
    work: tuple[float, ...]
    """The maximum work for each count, never decreasing."""

    def most_work(self, workers: float) -> float:
        """Return the maximum work, interpolated between measured counts and proportional beyond the last."""
        if workers <= 0:
            return 0.0
        below, under = 0, 0.0
        for count, work in zip(self.workers, self.work, strict=True):
            if workers <= count:
                return under + (work - under) * (workers - below) / (count - below)
            below, under = count, work
        return under / below * workers if below else 0.0

    def workers_for(self, work: float) -> int:
        """Return the fewest workers that can take this work; `MOST_WORKERS` if none can."""
        if not work > 0:
            return 0
        if work == inf or not self.work or self.work[-1] <= 0:
            return MOST_WORKERS
        low, high = 0, 1
        while self.most_work(high) < work and high < MOST_WORKERS:
            low, high = high, min(high * 2, MOST_WORKERS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.most_work(middle) >= work else (middle, high)
        return high


def make_table(measured: Sequence[tuple[int, float]]) -> PoolTable:
    """Make a table from pairs (workers, maximum work).

    Work never decreases with more workers, and never exceeds their time.
    """
    ordered = sorted(measured)
    work, most = [], 0.0
    for count, found in ordered:
        most = max(most, min(found, float(count)))
        work.append(most)
    return PoolTable(tuple(count for count, _ in ordered), tuple(work))


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker with the figures that planning needs."""

    speed: Speed
    gpus: int
    max_sequences: int
    kv_tokens: int
    """KV room in tokens; 0 if unknown."""
    encode_token_ns: float = 0.0
    """The mean time to encode the images that come with a prompt token."""


def prefill_seconds(kind: WorkerKind, prompt_tokens: float, cached_share: float = 0.0) -> float:
    """Return the seconds that one worker takes for a prompt and its images, without its cached tokens.

    Steps count as full as prompts make them.
    """
    tokens = prompt_tokens * (1 - cached_share)
    squares = prompt_tokens**2 - (prompt_tokens * cached_share) ** 2
    model, chunk = kind.speed.step_time, kind.speed.chunk_tokens
    if tokens <= 0:
        return 0.0
    # Prompts share steps, so the fixed part is divided by tokens.
    fixed_ns = model.prefill_fixed_ns * tokens / chunk
    floor_ns = model.prefill_floor_ns * tokens / chunk
    prompt_ns = fixed_ns + model.prefill_token_ns * tokens + model.prefill_token_squared_ns * squares
    # Images are encoded in steps of their own, which no step of prompts hides.
    return (max(prompt_ns, floor_ns) + kind.encode_token_ns * tokens) / 1e9


def decode_seconds(kind: WorkerKind, prompt_tokens: float, output_tokens: float, tpot_s: float) -> float:
    """Return the seconds that one worker takes for an answer in the largest batch that meets TPOT and fits its KV.

    The result is inf if not even one sequence keeps TPOT.
    """
    model = kind.speed.step_time
    context = max(prompt_tokens + output_tokens / 2, 1.0)
    batch = largest_batch(model, tpot_s * 1e9 * (1 - IN_HAND), round(context), kind.max_sequences)
    if kind.kv_tokens:
        batch = min(batch, int(kind.kv_tokens / (prompt_tokens + output_tokens + 1)))
    if batch < 1:
        return inf
    each_ns = (model.reading_ns(max(batch, MATRIX_ROWS)) + model.sequences_ns(batch)) / batch
    return output_tokens * (each_ns + model.decode_kv_token_ns * context) / 1e9


Phase = Literal["prefill", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
Whole = NDArray[np.int64]
SURE: Final = 0.8
"""The share of paths that must agree for a shortage to be reported."""


@dataclass(frozen=True, slots=True)
class PoolHour:
    """The workers that one pool needs in one stretch of time."""

    surely: int
    """The number of workers needed in at least `SURE` of the sampled paths."""
    p50: int
    p95: int
    planned: int
    """The number of workers needed at the requested confidence, plus spare ones."""
    short: float
    """The share of sampled paths in which the present workers are too few."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first stretch in which a pool is too small."""

    phase: Phase
    at_s: float
    """The beginning of the stretch that lacks workers."""
    workers: int
    """The number of workers missing in at least `SURE` of the sampled paths."""
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
    """The number of workers that each pool gets beyond its need, to replace lost ones."""

    def most(self, phase: Phase) -> int:
        """Return the number of workers that suffices at all times."""
        return max((each.planned for each in self.pools[phase]), default=0)


def needed_workers(work: Floats, table: PoolTable) -> Whole:
    """Return the fewest workers by the table for each amount of work, in the same shape."""
    flat = work.ravel()
    levels, indices = np.unique(np.round(flat, 3), return_inverse=True)
    found = np.array([table.workers_for(float(each)) for each in levels], np.int64)
    return np.asarray(found[indices].reshape(work.shape))


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
                planned=max(int(quantiles[3, at]), least) + spare,
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
    indices = [min(int(np.ceil(level * len(ordered))) - 1, len(ordered) - 1) for level in levels]
    return np.asarray(ordered[indices])


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
    """Return (GPU-hours with hourly sizes, GPU-hours with one fixed size)."""
    hours = plan.step_s / 3600
    moving = sum(each.planned for phase in PHASES for each in plan.pools[phase]) * hours * gpus
    still = sum(plan.most(phase) for phase in PHASES) * len(plan.starts_s) * hours * gpus
    return moving, still


def wished_workers(plan: CapacityPlan, now_s: float, lead_s: float) -> dict[Phase, int]:
    """Return the workers that each pool should have once those ordered now have started.

    It is the maximum need from now until one stretch after `lead_s`, so no worker is released that is needed again
    before a new one could start. It is 0 for a pool without work in 19 of 20 paths: a plan's minimum is no reason to
    start a worker. The result is empty if the plan does not cover that time.
    """
    until_s = now_s + lead_s + plan.step_s
    indices = [at for at, start in enumerate(plan.starts_s) if start < until_s and start + plan.step_s > now_s]
    if not indices:
        return {}
    wished = {}
    for phase in PHASES:
        pool = [plan.pools[phase][at] for at in indices]
        wished[phase] = max(each.planned for each in pool) if any(each.p95 for each in pool) else 0
    return wished


class CapacityPlans(Protocol):
    """A source of the newest capacity plan of each model."""

    def plan(self, model: str) -> CapacityPlan | None:
        """Return the newest plan in Unix seconds; None if there is none, in which case nothing is requested."""
        ...


def wishes(plans: CapacityPlans, model: str, now_s: float, lead_s: float) -> dict[Phase, int]:
    """Return the workers that each pool of a model should have once those ordered now have started.

    `lead_s` is the time that a worker takes to start. Without a plan for that time the result is empty and the pools
    stay unchanged (see `wished_workers`).
    """
    plan = plans.plan(model)
    return {} if plan is None else wished_workers(plan, now_s, lead_s)


AROUND_S: Final = 10_800.0
"""Demand within this time before or after a time of day counts for it."""


def most_supported(values: Floats, first: int, ahead: int, *, step_s: float, growth: float) -> Floats:
    """Return the maximum that history supports in `ahead` stretches, of shape [ahead]; inf if no demand is known.

    It is `growth` times the busiest stretch of `values` around the same time of day. If the history is under a day
    long, or has no demand at that time, all stretches count. `first` is the index of the first stretch, counted from
    the beginning of `values`.
    """
    known = np.where(np.isfinite(values), values, 0.0)
    busiest = float(known.max(initial=0.0))
    if busiest <= 0:
        return np.full(ahead, inf)
    day, around = max(round(DAY_S / step_s), 1), round(AROUND_S / step_s)
    by_time = np.zeros(day)
    np.maximum.at(by_time, np.arange(len(known)) % day, known)
    if len(known) < day:
        by_time[:] = busiest
    near = np.stack([np.roll(by_time, by) for by in range(-around, around + 1)]).max(axis=0)
    near[near <= 0] = busiest
    return np.asarray(growth * near[(first + np.arange(ahead)) % day])


# Callers pass random numbers as normal deviates. A path's deviate of an hour becomes a rate by the quantiles of that
# hour (a Gaussian copula).


_Z: Final = np.array([-1.6448536, -1.2815516, -0.6744898, 0.0, 0.6744898, 1.2815516, 1.6448536])
"""The deviates of a standard normal distribution at `LEVELS`."""
# Quantiles are known from 5 to 95 %. The last stretch is extrapolated to this deviate and no further.
MOST_Z: Final = 3.0
LEAST_HANG: Final = 0.5
MOST_HANG: Final = 0.98
_TINY: Final = 1e-12
assert len(_Z) == len(LEVELS)


def hang_together(values: Floats, day: int) -> float:
    """Return the correlation of neighbouring bins of a series around its daily profile.

    It lies within `LEAST_HANG` and `MOST_HANG`, and is their mean if too little is known.
    """
    off = residuals(values, day)
    pairs = np.isfinite(off[1:]) & np.isfinite(off[:-1])
    if pairs.sum() < 24:
        return (LEAST_HANG + MOST_HANG) / 2
    return float(np.clip(_correlation(off[1:][pairs], off[:-1][pairs]), LEAST_HANG, MOST_HANG))


def phases_together(prefill: Floats, decode: Floats, day: int) -> float:
    """Return the correlation of both phases around their daily profiles, 0 to 1; 0.5 with too little data."""
    mine, its = residuals(prefill, day), residuals(decode, day)
    both = np.isfinite(mine) & np.isfinite(its)
    return float(np.clip(_correlation(mine[both], its[both]), 0.0, 1.0)) if both.sum() >= 24 else 0.5


def residuals(values: Floats, day: int) -> Floats:
    """Return logarithms minus the mean at their time of day, or minus the overall mean with fewer than two days."""
    seen = values[np.isfinite(values) & (values > 0)]
    offset = 0.01 * float(np.median(seen)) if len(seen) else 1.0
    logs = np.log(np.maximum(values, 0.0) + offset)
    out = np.full(len(logs), np.nan)
    step = day if day > 1 and len(logs) >= 2 * day else 1
    for index in range(step):
        part = logs[index::step]
        known = part[np.isfinite(part)]
        if len(known):
            out[index::step] = part - known.mean()
    return out


def _correlation(first: Floats, second: Floats) -> float:
    spread = float(first.std() * second.std())
    return float(((first - first.mean()) * (second - second.mean())).mean() / spread) if spread > _TINY else 0.0


def sample_paths(quantiles: Floats, deviates: Floats, hang: float, together: float) -> Floats:
    """Return sampled rates of shape [paths, series, horizons].

    `quantiles` is [series, horizons, levels], sorted, at least 0. `deviates` is [paths, series + 1, horizons],
    independent standard normals, of which the last of each path is common to all series. `hang` is the correlation
    of neighbouring horizons, `together` that of series.
    """
    common = np.sqrt(together) * deviates[:, -1:] + np.sqrt(1 - together) * deviates[:, :-1]
    z = np.empty_like(common)
    z[..., 0] = common[..., 0]
    fresh = np.sqrt(1 - hang * hang)
    for at in range(1, common.shape[-1]):
        z[..., at] = hang * z[..., at - 1] + fresh * common[..., at]
    z = np.clip(z, -MOST_Z, MOST_Z)
    out: Floats = np.empty(z.shape)
    for series in range(quantiles.shape[0]):
        for at in range(quantiles.shape[1]):
            out[:, series, at] = quantile_at(quantiles[series, at], z[:, series, at])
    return out


def quantile_at(quantiles: Floats, z: Floats) -> Floats:
    """Return the rates at standard normal deviates, interpolating between logarithms of quantiles of shape [levels]."""
    top = float(quantiles[-1])
    if top <= _TINY:
        return np.full(z.shape, 0.0)
    offset = 1e-3 * top
    logs = np.log(quantiles + offset)
    inner = np.interp(z, _Z, logs)
    below = logs[0] + (z - _Z[0]) * (logs[1] - logs[0]) / (_Z[1] - _Z[0])
    above = logs[-1] + (z - _Z[-1]) * (logs[-1] - logs[-2]) / (_Z[-1] - _Z[-2])
    found = np.where(z < _Z[0], below, np.where(z > _Z[-1], above, inner))
    rates: Floats = np.maximum(np.exp(found) - offset, 0.0)
    return rates
