"""The prefill chunk size of one worker: measured at its start where that is asked for, and whenever somebody asks."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from libs.contracts.errors import QueueFull
from libs.engine.port import Engine
from libs.perfmodel import StepKind
from libs.perfmodel.fit import MIN_STEPS
from libs.perfmodel.saturation import Trial, find_knee, knee_of, plan_trials
from libs.worker.step_times import StepTimes
from libs.worker.tuned import Tuned

log = structlog.get_logger()

MOST_TOKENS: Final = 8192
LIMIT_S: Final = 10.0
"""Measuring ends after so long, with what there is by then."""
MOST_LIMIT_S: Final = 50.0
"""The same, where whoever asks gives it longer, as a slow device needs; within the call's own deadline."""


class PrefillTuner:
    """Knows the chunk size in effect and how to find a better one. One measurement at a time."""

    def __init__(self, engine: Engine, step_times: StepTimes, chunk_tokens: int, chosen: Callable[[int], None]) -> None:
        """`chosen` is called with every chunk size that is taken over."""
        self._engine = engine
        self._step_times = step_times
        self.chunk_tokens = chunk_tokens
        self._chosen = chosen
        self._busy = False

    async def settle(self, *, configured: bool = False) -> None:
        """Choose at the start, unless it is configured: from what earlier workers have learned, else by measuring.

        Where nothing is measured the log says why.
        """
        if configured:
            reason = "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS names a size; 0 would measure"
        elif StepKind.PREFILL in self._step_times.known:
            reason = "earlier workers of this kind have learned it"
            chunk_tokens, _ = knee_of(self._step_times.fitted.model, self._most(MOST_TOKENS))
            self._take(chunk_tokens)
        elif await self.tune() is None:
            reason = "there was no room or no time for enough steps"
        else:
            return
        log.info("prefill not measured at start", reason=reason, chunk_tokens=self.chunk_tokens)

    async def tune(self, *, most_tokens: int = 0, limit_s: float = 0.0, apply: bool = True) -> Tuned | None:
        """Measure and, unless told otherwise, take the choice over; None when there was no room or time to measure.

        Raises QueueFull while another measurement runs.
        """
        if self._busy:
            raise QueueFull("another measurement runs")
        self._busy = True
        try:
            trials = await self._measure(self._most(most_tokens or MOST_TOKENS), min(limit_s or LIMIT_S, MOST_LIMIT_S))
        finally:
            self._busy = False
        saturation = find_knee(self._step_times.fitted.model, trials)
        if saturation is None:
            return None
        tuned = Tuned(saturation, self.chunk_tokens)
        if apply:
            self._take(saturation.chunk_tokens)
        return tuned

    async def _measure(self, most_tokens: int, limit_s: float) -> list[Trial]:
        clock = asyncio.get_running_loop().time
        end_s = clock() + limit_s
        trials: list[Trial] = []
        await self._engine.measure_prefill(min(MIN_STEPS, most_tokens))  # what a first step sets up is not measured
        for tokens in plan_trials(self._step_times.fitted.model, most_tokens, round(limit_s * 1e9)):
            if clock() >= end_s:
                break
            duration_ns = await self._engine.measure_prefill(tokens)
            if duration_ns:
                trials.append(Trial(tokens, duration_ns))
        return trials

    def _most(self, tokens: int) -> int:
        """As far as half of the free KV blocks go."""
        free = self._engine.load().free_kv_blocks * self._engine.capabilities.block_size_tokens // 2
        return max(min(tokens, free), 1)

    def _take(self, chunk_tokens: int) -> None:
        log.info("prefill chunk chosen", tokens=chunk_tokens, before=self.chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self._engine.set_prefill_chunk(chunk_tokens)
        self._chosen(chunk_tokens)
