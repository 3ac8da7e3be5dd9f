"""The prefill chunk size of one worker: stored by an earlier measurement, or measured at its start and on request."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.engine.config import DEFAULT_CHUNK_TOKENS
from libs.engine.port import Engine
from libs.perfmodel.learner import StepKind
from libs.policy.roles import Role
from libs.policy.worker.saturation import MOST_TOKENS, PrefillCurve, knee_of
from libs.runtime.clock import Clock
from libs.worker.telemetry.step_times import StepTimes
from libs.worker.tuning.measurement import POLL_S, Measurement
from libs.worker.tuning.trials import room_tokens
from libs.worker.tuning.tuned import Tuned

log = structlog.get_logger()

# How long a starting worker waits for another's measurement; longer than the lease of a dead one.
WAIT_S: Final = 45.0
# Interval at which a prefill worker without a final chunk size checks whether another worker has found one.
LOOK_S: Final = 30.0
# How many times an idle worker repeats a measurement that others disturbed, such as processes that load a model
# beside it.
AGAIN: Final = 3
FEW: Final = (
    "there was no room, or no time, for enough steps: fulcrum tune prefill --limit 50 takes longer, and more fit where"
    " less runs; a worker whose sequences decode measures only as far as these can wait, so give it role prefill first"
)


class PrefillTuner:
    """Holds the chunk size in effect and looks for a better one, with one measurement at a time."""

    def __init__(
        self,
        engine: Engine,
        step_times: StepTimes,
        clock: Clock,
        chosen: Callable[[int], None],
        *,
        named_tokens: int = 0,
    ) -> None:
        """`chosen` is called with every size that takes effect. `named_tokens` is a size set by settings, or 0."""
        self._engine = engine
        self._step_times = step_times
        self._measurement = Measurement(engine, step_times, clock)
        self._chosen = chosen
        self._named_tokens = named_tokens
        self._curve: PrefillCurve | None = None
        self._busy = False
        self._tries_left = AGAIN
        self._settled = named_tokens > 0
        """Whether measurements by other workers are ignored."""
        self._prompts_come = asyncio.Event()
        """Set while the role is prefill."""
        self.chunk_tokens = named_tokens or DEFAULT_CHUNK_TOKENS

    async def settle(self, role: Role) -> None:
        """Choose a size at the start of a prefill worker, unless settings name one.

        An earlier worker's measurement comes first, then a measurement of its own, then learned step times. Of
        several workers that start together, one measures and the others wait. If nothing is measured, the log says
        why. A worker in another role keeps its size.
        """
        if role != Role.PREFILL:
            return
        self._prompts_come.set()
        if self._named_tokens:
            reason = "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS names a size; 0 would measure"
        else:
            reason = await self._first()
        if reason:
            log.info("prefill not measured at start", reason=reason, chunk_tokens=self.chunk_tokens)

    async def run(self) -> None:
        """Adopt measurements of other workers until a size is settled.

        This serves a worker that enters role prefill later or has found nothing. A curve whose equal steps differ
        settles nothing: it is measured again while the worker is idle, at most a few times.
        """
        while not self._settled:
            await self._prompts_come.wait()
            await self._take_kept()
            if not self._settled:
                await asyncio.sleep(LOOK_S)
                await self._measure_again()

    def role_is(self, role: Role) -> None:
        """Update whether the role is prefill, after any change of the worker."""
        if role == Role.PREFILL:
            self._prompts_come.set()
        else:
            self._prompts_come.clear()

    async def tune(self, *, most_tokens: int = 0, limit_s: float = 0.0, apply: bool = True) -> Tuned | None:
        """Measure and, with `apply`, use the chosen chunk. Return None if there was no room or time to measure.

        A curve that ends before its plateau is not shared: it shows how far could be measured, not what saturates
        the device. Raise QueueFull while a measurement runs here, or if one at a worker of this kind takes too
        long.
        """
        self._check_free()
        self._busy = True
        try:
            curve = await self._measurement.in_turn(most_tokens, limit_s)
            if curve is None:
                return None
            tuned = self._tuned(curve.saturation.chunk_tokens, curve)
            if apply:
                await self._adopt(curve)
                self._settled = True
            return tuned
        finally:
            self._busy = False

    def set(self, tokens: int) -> Tuned:
        """Use a size that an administrator names until the worker ends.

        Raise InvalidRequest beyond the largest size measured, and QueueFull while a measurement runs that would
        choose another.
        """
        if not 1 <= tokens <= MOST_TOKENS:
            raise InvalidRequest(f"a step computes 1 to {MOST_TOKENS} prompt tokens, not {tokens}")
        self._check_free()
        self._settled = True
        tuned = self._tuned(tokens, self._curve)
        self._take(tokens)
        return tuned

    async def kept(self) -> Tuned | None:
        """Return the size in effect and the last measurement, by this worker or an earlier one; None without one."""
        curve = self._curve or await self._step_times.kept_curve()
        return self._tuned(self.chunk_tokens, curve) if curve is not None else None

    async def _first(self) -> str:
        """Adopt a stored curve, or measure while no other worker of this kind does. Return why nothing was measured,
        if so.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + WAIT_S
        while not await self._take_kept():
            async with self._measurement.turn() as mine:
                if mine and not await self._take_kept():
                    return await self._measure_first()
            if clock() >= end_s:
                self._take_fitted()
                return "another worker of this kind has been measuring for too long"
            await asyncio.sleep(POLL_S)
        return "an earlier worker of this kind has"

    async def _measure_first(self) -> str:
        self._check_free()
        self._busy = True
        try:
            curve = await self._measurement.run()
            if curve is None:
                self._take_fitted()
                return FEW
            await self._adopt(curve)
        finally:
            self._busy = False
        return ""

    async def _measure_again(self) -> None:
        """Repeat a disturbed measurement while idle. It stops when work arrives and counts only if complete."""
        known = self._curve.saturation if self._curve is not None else None
        if known is None or known.is_steady or not known.is_whole or self._settled or self._busy or not self._idles():
            return
        self._busy = True
        try:
            async with self._measurement.turn() as mine:
                if not mine:
                    return
                self._tries_left -= 1
                curve = await self._measurement.run(goes_on=self._idles)
                if curve is not None and curve.saturation.is_whole and curve.saturation.scatter < known.scatter:
                    await self._adopt(curve)
            self._settled = self._settled or not self._tries_left
        finally:
            self._busy = False

    def _idles(self) -> bool:
        load = self._engine.load()
        return self._prompts_come.is_set() and not (load.running or load.waiting)

    async def _adopt(self, curve: PrefillCurve) -> None:
        """Use a measured curve, and store it unless it is truncated or the stored one is steadier."""
        found = curve.saturation
        self._curve, self._settled = curve, found.is_whole and found.is_steady
        self._take(found.chunk_tokens)
        if not found.is_whole:
            largest = found.curve[-1].tokens
            log.warning("prefill saturates beyond what was measured: not kept for others", largest_tokens=largest)
            return
        if not found.is_steady:
            log.warning("prefill measured while equal steps differed", scatter=round(found.scatter, 3))
            kept = await self._step_times.kept_curve()
            if kept is not None and kept.saturation.is_steady:
                return
        await self._step_times.keep_curve(curve)

    def _tuned(self, chunk_tokens: int, curve: PrefillCurve | None) -> Tuned:
        model = curve.saturation.model if curve is not None else self._step_times.fitted.model
        return Tuned(chunk_tokens, self.chunk_tokens, DEFAULT_CHUNK_TOKENS, model, curve)

    async def _take_kept(self) -> bool:
        """Return whether a curve is in effect. One that arrives after a size was named is ignored."""
        curve = await self._step_times.kept_curve()
        if curve is None or self._settled or self._busy:
            return self._settled
        if self._curve is None or curve.unix_ns != self._curve.unix_ns:
            self._settled, self._curve = curve.saturation.is_steady, curve
            self._take(curve.saturation.chunk_tokens)
        return True

    def _take_fitted(self) -> None:
        """Choose by the prefill times that earlier workers have learned, if any."""
        if StepKind.PREFILL in self._step_times.known:
            chunk_tokens, _ = knee_of(self._step_times.fitted.model, room_tokens(self._engine, MOST_TOKENS))
            self._take(chunk_tokens)

    def _check_free(self) -> None:
        if self._busy:
            raise QueueFull("another measurement runs: ask again when it has ended")

    def _take(self, chunk_tokens: int) -> None:
        log.info("prefill chunk chosen", tokens=chunk_tokens, before=self.chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self._engine.set_prefill_chunk(chunk_tokens)
        self._chosen(chunk_tokens)
