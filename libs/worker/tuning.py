"""The prefill chunk of a worker: trial steps of growing size, the knee of their curve, and the report of both."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.config import DEFAULT_CHUNK_TOKENS
from libs.engine.port import Engine
from libs.perfmodel.fit import MIN_STEPS, Rows, fit_steps
from libs.perfmodel.learner import FittedModel, StepKind
from libs.perfmodel.wire import point_message
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import largest_batch
from libs.policy.worker.saturation import (
    MOST_TOKENS,
    TRIAL_PROMPT_TOKENS,
    MeasuredStep,
    Point,
    PrefillCurve,
    Saturation,
    calibrated,
    knee_of,
    plan_trials,
    prefill_tokens_per_s,
    trial_work,
    ttft_under_load_ns,
)
from libs.runtime.clock import Clock
from libs.worker.telemetry import StepTimes

log = structlog.get_logger()

# The tokens of the first trial steps, from which the time of a whole measurement is estimated.
GUESS_TOKENS: Final = 64
# The number of runs, of which the fastest counts. A disturbed step does not show the device's speed.
GUESSES: Final = 3


async def run_trials(
    engine: Engine,
    known: Callable[[], StepTimeModel],
    *,
    most_tokens: int,
    limit_s: float,
    patience_s: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[MeasuredStep]:
    """Run as many trials as fit the time, each size several times.

    Trials are planned for an estimated `limit_s`, and none starts after `patience_s`. `known` returns the current
    step-time model. Trials without room or time in the engine are left out. Once `goes_on` returns false, no further
    trial starts.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + patience_s
    prior = await _corrected(engine, known, min(GUESS_TOKENS, most_tokens))
    trials = []
    for tokens in plan_trials(prior, most_tokens, round(limit_s * 1e9), round(patience_s * 1e9)):
        if clock() >= end_s or not goes_on():
            break
        duration_ns = await engine.measure_prefill(tokens)
        if duration_ns:
            trials.append(MeasuredStep(tokens, duration_ns))
    return trials


def room_tokens(engine: Engine, most_tokens: int) -> int:
    """Return the size of the largest trial, at most `most_tokens`. It leaves half of the free KV blocks for prompts."""
    free = engine.load().free_kv_blocks * engine.capabilities.block_size_tokens // 2
    return max(min(most_tokens, free), 1)


async def _corrected(engine: Engine, known: Callable[[], StepTimeModel], tokens: int) -> StepTimeModel:
    """Return the step-time model after a correction by a few steps.

    An uncorrected guess may be wrong by a factor of ten.
    """
    await engine.measure_prefill(tokens)  # the first step of a shape includes set-up, so its time is dropped
    took_ns = [await engine.measure_prefill(tokens) for _ in range(GUESSES)]
    fastest_ns = min((each for each in took_ns if each), default=0)
    return calibrated(known(), MeasuredStep(tokens, fastest_ns)) if fastest_ns else known()


def find_knee(prior: StepTimeModel, trials: Sequence[MeasuredStep]) -> Saturation | None:
    """Return the knee of a curve fitted to the trials; None if there are too few."""
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


# The expected duration of a measurement for which the caller names none.
LIMIT_S: Final = 10.0
# The time after which a measurement ends with the results so far. A busy device takes longer than expected.
PATIENCE_S: Final = 20.0
# The upper bound of a limit that the caller names, for example for a slow device. It is within the call's deadline.
MOST_LIMIT_S: Final = 50.0
# The time for which other workers wait for one that measures. Only a dead worker exceeds it.
LEASE_S: Final = 30.0
# The interval at which a waiting worker checks for the lease.
POLL_S: Final = 0.25


class Measurement:
    """The trials on one engine. Of workers with the same key, only one runs trials at a time."""

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
        """Call `run` once no other worker with the same key measures.

        Raise QueueFull if the wait would exceed the limit.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + MOST_LIMIT_S - (min(limit_s, MOST_LIMIT_S) or PATIENCE_S)
        while True:
            async with self.turn(limit_s) as mine:
                if mine:
                    return await self.run(most_tokens, limit_s)
            if clock() >= end_s:
                raise QueueFull("another worker of this kind measures: try again when it has ended")
            await asyncio.sleep(POLL_S)

    async def run(
        self, most_tokens: int = 0, limit_s: float = 0.0, goes_on: Callable[[], bool] = lambda: True
    ) -> PrefillCurve | None:
        """Measure while this worker has the lease. Return None without room or time for enough steps."""
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


# The context length of each sequence in the decode batch that is reported with a curve.
DECODE_CONTEXT_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Tuned:
    """The chosen chunk size and its alternatives."""

    chunk_tokens: int
    before_tokens: int
    """The chunk size that was in effect before."""
    default_tokens: int
    """The engine's chunk size without a measurement."""
    model: StepTimeModel
    """The model that predicts prompt times, fitted to the curve if there is one."""
    curve: PrefillCurve | None

    @property
    def truncated(self) -> bool:
        """True if the curve ends before its plateau."""
        return self.curve is not None and not self.curve.saturation.is_whole


def tuned_message(tuned: Tuned, tpot_target_us: int, max_sequences: int) -> pb.TunePrefillResponse:
    """Return the chunk sizes, the curve if known, and the largest decode batch within a TPOT target."""
    sizes = (tuned.chunk_tokens, tuned.before_tokens, tuned.default_tokens)
    prompt, before, default = (round(ttft_under_load_ns(tuned.model, TRIAL_PROMPT_TOKENS, tokens)) for tokens in sizes)
    answer = pb.TunePrefillResponse(
        chunk_tokens=tuned.chunk_tokens,
        chunk_tokens_before=tuned.before_tokens,
        chunk_tokens_default=tuned.default_tokens,
        prompt_ns=prompt,
        prompt_ns_before=before,
        prompt_ns_default=default,
        decode_batch=largest_batch(tuned.model, tpot_target_us * 1000, DECODE_CONTEXT_TOKENS, max_sequences),
    )
    if tuned.curve is not None:
        answer.plateau_tokens_per_s = tuned.curve.saturation.plateau_tokens_per_s
        answer.curve.extend(map(point_message, tuned.curve.saturation.curve))
        answer.measured_unix_ns = tuned.curve.unix_ns
        answer.truncated = tuned.truncated
    return answer


def decode_message(fitted: FittedModel, request: pb.TuneDecodeRequest, max_sequences: int) -> pb.TuneDecodeResponse:
    """Return the largest decode batch within a TPOT target by learned step times, with the error of these times."""
    context_tokens = request.context_tokens or DECODE_CONTEXT_TOKENS
    batch = largest_batch(fitted.model, request.tpot_target_us * 1000, context_tokens, max_sequences)

    def step_ns(sequences: int) -> int:
        work = StepWork(decode_sequences=sequences, decode_kv_tokens=sequences * context_tokens)
        return round(fitted.model.decode_ns(work))

    return pb.TuneDecodeResponse(
        batch=batch,
        step_ns=step_ns(max(batch, 1)),
        next_step_ns=step_ns(batch + 1),
        max_sequences=max_sequences,
        steps=fitted.decode.steps,
        error_p50=fitted.decode.error_p50,
    )


# The time for which a starting worker waits for another's measurement, longer than the lease of a dead worker.
WAIT_S: Final = 45.0
# The interval at which a prefill worker without a final chunk size checks for another worker's result.
LOOK_S: Final = 30.0
# The number of times that an idle worker repeats a measurement that others disturbed, such as processes that load a
# model.
AGAIN: Final = 3
FEW: Final = (
    "there was no room, or no time, for enough steps: fulcrum tune prefill --limit 50 takes longer, and more fit where"
    " less runs; a worker whose sequences decode measures only as far as these can wait, so give it role prefill first"
)


class PrefillTuner:
    """The chunk size in effect and the search for a better one, with one measurement at a time."""

    def __init__(
        self,
        engine: Engine,
        step_times: StepTimes,
        clock: Clock,
        chosen: Callable[[int], None],
        *,
        named_tokens: int = 0,
    ) -> None:
        """Create the tuner.

        `chosen` is called with every size that takes effect. `named_tokens` is the size that settings name, or 0.
        """
        self._engine = engine
        self._step_times = step_times
        self._measurement = Measurement(engine, step_times, clock)
        self._chosen = chosen
        self._named_tokens = named_tokens
        self._curve: PrefillCurve | None = None
        self._busy = False
        self._tries_left = AGAIN
        self._settled = named_tokens > 0
        """True if the worker ignores measurements of other workers."""
        self._prompts_come = asyncio.Event()
        """Set while the role is prefill."""
        self.chunk_tokens = named_tokens or DEFAULT_CHUNK_TOKENS

    async def settle(self, role: Role) -> None:
        """Choose a size at the start of a prefill worker, unless settings name one.

        The worker first looks for an earlier worker's measurement, then measures, then falls back on learned step
        times. Of several workers that start together, one measures and the others wait. If none measures, the log gives
        the reason. A worker in another role keeps its size.
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

        This serves a worker that enters role prefill later, or whose start found no size. A curve with scattered times
        does not settle the size. It is measured again while the worker is idle, at most `AGAIN` times.
        """
        while not self._settled:
            await self._prompts_come.wait()
            await self._take_kept()
            if not self._settled:
                await asyncio.sleep(LOOK_S)
                await self._measure_again()

    def role_is(self, role: Role) -> None:
        """Record whether the role is prefill, after any change of the worker."""
        if role == Role.PREFILL:
            self._prompts_come.set()
        else:
            self._prompts_come.clear()

    async def tune(self, *, most_tokens: int = 0, limit_s: float = 0.0, apply: bool = True) -> Tuned | None:
        """Measure and, with `apply`, use the chosen chunk size. Return None if there was no room or time.

        A curve that ends before its plateau is not shared, because its end shows the limit of the measurement rather
        than of the device. Raise QueueFull while a measurement runs here, or if another worker with the same key
        measures for too long.
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

        Raise InvalidRequest beyond the largest measurable size, and QueueFull while a running measurement may choose
        another.
        """
        if not 1 <= tokens <= MOST_TOKENS:
            raise InvalidRequest(f"a step computes 1 to {MOST_TOKENS} prompt tokens, not {tokens}")
        self._check_free()
        self._settled = True
        tuned = self._tuned(tokens, self._curve)
        self._take(tokens)
        return tuned

    async def kept(self) -> Tuned | None:
        """Return the size in effect with the last measurement by this worker or an earlier one; None without one."""
        curve = self._curve or await self._step_times.kept_curve()
        return self._tuned(self.chunk_tokens, curve) if curve is not None else None

    async def _first(self) -> str:
        """Adopt a stored curve, or measure while no other worker with the same key does.

        Return the reason why this worker has not measured; empty if it has.
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
        """Repeat a disturbed measurement while idle. It stops when work arrives, and is used only if complete."""
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
        """Use a measured curve. Store it unless it is truncated, or less steady than the stored one."""
        found = curve.saturation
        self._curve, self._settled = curve, found.is_whole and found.is_steady
        self._take(found.chunk_tokens)
        if not found.is_whole:
            largest = found.curve[-1].tokens
            log.warning(
                "prefill saturates beyond the measured sizes: not kept for other workers", largest_tokens=largest
            )
            return
        if not found.is_steady:
            log.warning("prefill measured, but equal steps took different times", scatter=round(found.scatter, 3))
            kept = await self._step_times.kept_curve()
            if kept is not None and kept.saturation.is_steady:
                return
        await self._step_times.keep_curve(curve)

    def _tuned(self, chunk_tokens: int, curve: PrefillCurve | None) -> Tuned:
        model = curve.saturation.model if curve is not None else self._step_times.fitted.model
        return Tuned(chunk_tokens, self.chunk_tokens, DEFAULT_CHUNK_TOKENS, model, curve)

    async def _take_kept(self) -> bool:
        """Adopt a stored curve unless a size is settled. Return whether a curve or a settled size is in effect."""
        curve = await self._step_times.kept_curve()
        if curve is None or self._settled or self._busy:
            return self._settled
        if self._curve is None or curve.unix_ns != self._curve.unix_ns:
            self._settled, self._curve = curve.saturation.is_steady, curve
            self._take(curve.saturation.chunk_tokens)
        return True

    def _take_fitted(self) -> None:
        """Choose by the prefill times that earlier workers have learned, if there are any."""
        if StepKind.PREFILL in self._step_times.known:
            chunk_tokens, _ = knee_of(self._step_times.fitted.model, room_tokens(self._engine, MOST_TOKENS))
            self._take(chunk_tokens)

    def _check_free(self) -> None:
        if self._busy:
            raise QueueFull("another measurement is running: try again when it has ended")

    def _take(self, chunk_tokens: int) -> None:
        log.info("prefill chunk chosen", tokens=chunk_tokens, before=self.chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self._engine.set_prefill_chunk(chunk_tokens)
        self._chosen(chunk_tokens)
