"""A measurement of prefill under the lease of the worker's kind: two at once would disturb each other."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import numpy as np

from libs.contracts.errors import QueueFull
from libs.engine.port import Engine
from libs.perfmodel.fit import MIN_STEPS, fit_steps
from libs.perfmodel.samples import Rows
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.saturation import (
    MOST_TOKENS,
    MeasuredStep,
    Point,
    PrefillCurve,
    Saturation,
    knee_of,
    prefill_tokens_per_s,
    trial_work,
)
from libs.runtime.clock import Clock
from libs.worker.telemetry.step_times import StepTimes
from libs.worker.tuning.trials import room_tokens, run_trials


def find_knee(prior: StepTimeModel, trials: Sequence[MeasuredStep]) -> Saturation | None:
    """Return the knee of a curve fitted to the trials, or None if they are too few."""
    if len(trials) < MIN_STEPS:
        return None
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for trial in trials:
        by_size[trial.tokens].append(trial.duration_ns)
    model = fit_steps(prior, _rows(trials))
    chunk_tokens, plateau = knee_of(model, max(by_size))
    points = tuple(
        Point(size, size / float(np.median(durations)) * 1e9, prefill_tokens_per_s(model, size))
        for size, durations in sorted(by_size.items())
    )
    scatter = float(np.median([max(durations) / min(durations) - 1 for durations in by_size.values()]))
    return Saturation(chunk_tokens, plateau, points, model, scatter)


def _rows(trials: Sequence[MeasuredStep]) -> Rows:
    table = np.array([(trial.tokens, trial_work(trial.tokens).squared, trial.duration_ns) for trial in trials], float)
    nothing, everything = np.zeros(len(trials)), np.ones(len(trials))
    return Rows(table[:, 0], table[:, 1], nothing, nothing, table[:, 2], everything)


# Expected duration of a measurement if the caller names none.
LIMIT_S: Final = 10.0
# A measurement ends after this long with what it has: a busy device takes longer than expected.
PATIENCE_S: Final = 20.0
# Bound on a limit that the caller names, as for a slow device; within the call's own deadline.
MOST_LIMIT_S: Final = 50.0
# How long others leave a measuring worker alone: longer than it measures, unless it is dead.
LEASE_S: Final = 30.0
# Interval at which a waiting worker checks for the lease.
POLL_S: Final = 0.25


class Measurement:
    """Trials at one engine, which run at one worker of its kind at a time."""

    def __init__(self, engine: Engine, step_times: StepTimes, clock: Clock) -> None:
        self._engine = engine
        self._step_times = step_times
        self._clock = clock

    @asynccontextmanager
    async def turn(self, limit_s: float = 0.0) -> AsyncIterator[bool]:
        """Yield whether this worker may measure while the context is open, for `limit_s` or the usual time."""
        patience_s = min(limit_s, MOST_LIMIT_S) or PATIENCE_S
        async with self._step_times.claim(LEASE_S - PATIENCE_S + patience_s) as mine:
            yield mine

    async def in_turn(self, most_tokens: int, limit_s: float) -> PrefillCurve | None:
        """Call `run` once no other worker of this kind measures. Raise QueueFull if waiting would exceed the limit."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + MOST_LIMIT_S - (min(limit_s, MOST_LIMIT_S) or PATIENCE_S)
        while True:
            async with self.turn(limit_s) as mine:
                if mine:
                    return await self.run(most_tokens, limit_s)
            if clock() >= end_s:
                raise QueueFull("another worker of this kind measures: ask again when it has ended")
            await asyncio.sleep(POLL_S)

    async def run(
        self, most_tokens: int = 0, limit_s: float = 0.0, goes_on: Callable[[], bool] = lambda: True
    ) -> PrefillCurve | None:
        """Measure while holding the lease. Return None without room or time for enough steps."""
        limit_s = min(limit_s, MOST_LIMIT_S)
        trials = await run_trials(
            self._engine,
            lambda: self._step_times.fitted.model,
            most_tokens=room_tokens(self._engine, min(most_tokens or MOST_TOKENS, MOST_TOKENS)),
            limit_s=limit_s or LIMIT_S,
            patience_s=limit_s or PATIENCE_S,
            goes_on=goes_on,
        )
        saturation = find_knee(self._step_times.fitted.model, trials)
        return PrefillCurve(saturation, self._clock.now_ns()) if saturation is not None else None
