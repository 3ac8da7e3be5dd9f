"""One measurement of prefill: under the lease of the worker's kind, since two at once would measure each other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from libs.contracts.errors import QueueFull
from libs.engine.port import Engine
from libs.perfmodel.knee import find_knee
from libs.policy.worker.saturation import MOST_TOKENS, PrefillCurve
from libs.runtime.clock import Clock
from libs.worker.step_times import StepTimes
from libs.worker.trials import room_tokens, run_trials

LIMIT_S: Final = 10.0
"""Measuring is to take so long at most, where nobody says how long."""
PATIENCE_S: Final = 20.0
"""It ends after so long, with what there is by then: a busy device takes longer than was expected of it."""
MOST_LIMIT_S: Final = 50.0
"""The same, where whoever asks gives it longer, as a slow device needs; within the call's own deadline."""
LEASE_S: Final = 30.0
"""A worker that measures is let alone for so long: longer than it measures, unless it is dead."""
POLL_S: Final = 0.25
"""Whoever waits for another looks so often."""


class Measurement:
    """Trials at one engine. One at a time, of all workers of this kind."""

    def __init__(self, engine: Engine, step_times: StepTimes, clock: Clock) -> None:
        self._engine = engine
        self._step_times = step_times
        self._clock = clock

    @asynccontextmanager
    async def turn(self, limit_s: float = 0.0) -> AsyncIterator[bool]:
        """Whether this worker may measure now, for `limit_s` or as long as usual, while the context is open."""
        patience_s = min(limit_s, MOST_LIMIT_S) or PATIENCE_S
        async with self._step_times.claim(LEASE_S - PATIENCE_S + patience_s) as mine:
            yield mine

    async def in_turn(self, most_tokens: int, limit_s: float) -> PrefillCurve | None:
        """`run`, as soon as nobody else measures. Raises QueueFull where that would be too late for who asks."""
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
        """Measure, in one's turn; None where there was no room, or no time, for enough steps."""
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
