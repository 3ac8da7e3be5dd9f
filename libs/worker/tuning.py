"""The prefill chunk size of one worker: kept from an earlier measurement, or measured, at its start and when asked."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_PREFILL, Role
from libs.engine.config import DEFAULT_CHUNK_TOKENS
from libs.engine.port import Engine
from libs.perfmodel import StepKind, StepTimeModel
from libs.perfmodel.fit import MIN_STEPS
from libs.perfmodel.saturation import (
    PrefillCurve,
    Trial,
    calibrated,
    find_knee,
    knee_of,
    plan_trials,
)
from libs.runtime.clock import Clock
from libs.worker.step_times import StepTimes
from libs.worker.tuned import Tuned

log = structlog.get_logger()

MOST_TOKENS: Final = 8192
LIMIT_S: Final = 10.0
"""Measuring is to take so long at most, where nobody says how long."""
PATIENCE_S: Final = 20.0
"""It ends after so long, with what there is by then: a busy device takes longer than was expected of it."""
MOST_LIMIT_S: Final = 50.0
"""The same, where whoever asks gives it longer, as a slow device needs; within the call's own deadline."""
FIRST_GUESS_TOKENS: Final = 64
"""Of the step that tells how much a measurement may hope for."""


class PrefillTuner:
    """Knows the chunk size in effect and how to find a better one. One measurement at a time."""

    def __init__(
        self,
        engine: Engine,
        step_times: StepTimes,
        clock: Clock,
        chosen: Callable[[int], None],
        *,
        named_tokens: int = 0,
    ) -> None:
        """`chosen` is called with every size that is taken over. `named_tokens`: asked for by settings; 0: none."""
        self._engine = engine
        self._step_times = step_times
        self._clock = clock
        self._chosen = chosen
        self._named_tokens = named_tokens
        self._curve: PrefillCurve | None = None
        self._busy = False
        self._settled = named_tokens > 0
        self._prompts_come = asyncio.Event()
        self.chunk_tokens = named_tokens or DEFAULT_CHUNK_TOKENS
        """In effect."""

    async def settle(self, role: Role) -> None:
        """Choose at the start of a prefill worker, unless a size is named: by what an earlier one has measured, else
        by measuring, else by what is known of its steps.

        Where nothing is measured the log says why. A worker in another role goes on with what it has.
        """
        if role != ROLE_PREFILL:
            return
        self._settled = True
        if self._named_tokens:
            reason = "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS names a size; 0 would measure"
        elif await self._take_kept():
            reason = "an earlier worker of this kind has"
        elif await self.tune() is None:
            reason = "there was no room or no time for enough steps: fulcrum tune prefill --limit 50 takes longer"
            if StepKind.PREFILL in self._step_times.known:
                chunk_tokens, _ = knee_of(self._step_times.fitted.model, self._most(MOST_TOKENS))
                self._take(chunk_tokens)
        else:
            return
        log.info("prefill not measured at start", reason=reason, chunk_tokens=self.chunk_tokens)

    async def run(self) -> None:
        """For a worker that comes to role prefill later: take over what others have measured by then, once."""
        while True:
            await self._prompts_come.wait()
            self._prompts_come.clear()
            if not self._settled:
                self._settled = await self._take_kept()

    def role_is(self, role: Role) -> None:
        """The worker's assignment has changed, perhaps."""
        if role == ROLE_PREFILL and not self._settled:
            self._prompts_come.set()

    async def tune(self, *, most_tokens: int = 0, limit_s: float = 0.0, apply: bool = True) -> Tuned | None:
        """Measure and, unless told otherwise, take the choice over; None when there was no room or time to measure.

        Raises QueueFull while another measurement runs.
        """
        if self._busy:
            raise QueueFull("another measurement runs")
        self._busy = True
        try:
            limit_s = min(limit_s, MOST_LIMIT_S)
            trials = await self._measure(
                self._most(most_tokens or MOST_TOKENS), limit_s or LIMIT_S, limit_s or PATIENCE_S
            )
        finally:
            self._busy = False
        saturation = find_knee(self._step_times.fitted.model, trials)
        if saturation is None:
            return None
        curve = PrefillCurve(saturation, self._clock.now_ns())
        tuned = self._tuned(saturation.chunk_tokens, curve)
        if apply:
            self._settled, self._curve = True, curve
            self._take(saturation.chunk_tokens)
            await self._step_times.keep_curve(curve)
        return tuned

    def set(self, tokens: int) -> Tuned:
        """Take a size that an administrator names; raises InvalidRequest beyond what is ever measured."""
        if not 1 <= tokens <= MOST_TOKENS:
            raise InvalidRequest(f"a step computes 1 to {MOST_TOKENS} prompt tokens, not {tokens}")
        self._settled = True
        tuned = self._tuned(tokens, self._curve)
        self._take(tokens)
        return tuned

    async def kept(self) -> Tuned | None:
        """The size in effect and the last measurement, by this worker or an earlier one; None where there is none."""
        curve = self._curve or await self._step_times.kept_curve()
        return self._tuned(self.chunk_tokens, curve) if curve is not None else None

    def _tuned(self, chunk_tokens: int, curve: PrefillCurve | None) -> Tuned:
        model = curve.saturation.model if curve is not None else self._step_times.fitted.model
        return Tuned(chunk_tokens, self.chunk_tokens, DEFAULT_CHUNK_TOKENS, model, curve)

    async def _take_kept(self) -> bool:
        curve = await self._step_times.kept_curve()
        if curve is not None:
            self._curve = curve
            self._take(curve.saturation.chunk_tokens)
        return curve is not None

    async def _measure(self, most_tokens: int, limit_s: float, patience_s: float) -> list[Trial]:
        clock = asyncio.get_running_loop().time
        end_s = clock() + patience_s
        trials: list[Trial] = []
        prior = await self._prior(most_tokens)
        for tokens in plan_trials(prior, most_tokens, round(limit_s * 1e9), round(patience_s * 1e9)):
            if clock() >= end_s:
                break
            duration_ns = await self._engine.measure_prefill(tokens)
            if duration_ns:
                trials.append(Trial(tokens, duration_ns))
        return trials

    async def _prior(self, most_tokens: int) -> StepTimeModel:
        """What steps are known to take, corrected by one: a guess about the device may be off by an order."""
        await self._engine.measure_prefill(min(MIN_STEPS, most_tokens))  # what a first step sets up is not measured
        tokens = min(FIRST_GUESS_TOKENS, most_tokens)
        duration_ns = await self._engine.measure_prefill(tokens)
        prior = self._step_times.fitted.model
        return calibrated(prior, Trial(tokens, duration_ns)) if duration_ns else prior

    def _most(self, tokens: int) -> int:
        """As far as half of the free KV blocks go."""
        free = self._engine.load().free_kv_blocks * self._engine.capabilities.block_size_tokens // 2
        return max(min(tokens, free), 1)

    def _take(self, chunk_tokens: int) -> None:
        log.info("prefill chunk chosen", tokens=chunk_tokens, before=self.chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self._engine.set_prefill_chunk(chunk_tokens)
        self._chosen(chunk_tokens)
