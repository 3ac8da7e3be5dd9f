"""A worker's learned step times, from the prior at its start to the fits stored for the next worker."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from libs.engine.port import Engine
from libs.engine.reports import EngineEvent, StepReport
from libs.model.info import ModelInfo
from libs.perfmodel.fit import MIN_STEPS
from libs.perfmodel.learner import FittedModel, StepKind, StepTimeLearner, combine
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.saturation import PrefillCurve
from libs.stores.steps.port import StepTimeKey, StepTimeStore

log = structlog.get_logger()

REFIT_S: Final = 2.0
# Leading characters of a model's revision in the keys of stored step times.
REVISION_CHARS: Final = 16
# Interval at which learned step times are stored; they are stored at the end too.
SAVE_S: Final = 30.0


class StepTimes:
    """Learns from every step, refits periodically, stores the fits, and notifies observers of changes."""

    def __init__(self, store: StepTimeStore, key: StepTimeKey, prior: StepTimeModel) -> None:
        self._store = store
        self._key = key
        self._learner = StepTimeLearner(prior)
        self._observers: list[Callable[[StepTimeModel], None]] = []
        self.fitted: FittedModel = self._learner.fitted()
        self.known: frozenset[StepKind] = frozenset()
        """Kinds of steps that earlier workers have learned."""

    def on_change(self, observer: Callable[[StepTimeModel], None]) -> None:
        """Call `observer` with the model now, and whenever it has changed noticeably."""
        self._observers.append(observer)
        observer(self.fitted.model)

    def on_event(self, event: EngineEvent) -> None:
        step = event.step
        if step is not None and step.end_unix_ns:
            self._learner.add(work_of(step), step.end_unix_ns - step.start_unix_ns)

    async def restore(self) -> None:
        """Start from what earlier workers of this kind have learned."""
        found = await self._store.load(self._key)
        if found:
            self.known = frozenset(found)
            self._learner = StepTimeLearner(combine(self._learner.model, found))
            self.fitted = self._learner.fitted()
            log.info("step times known", kinds=sorted(kind.value for kind in found))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        saved_s = loop.time()
        while True:
            await asyncio.sleep(REFIT_S)
            await self.refit()
            if loop.time() >= saved_s + SAVE_S:
                saved_s = loop.time()
                await self.save()

    async def refit(self) -> None:
        """Refit if there are new steps, on a thread so that the event loop never waits for it."""
        rows = self._learner.news()
        changed = rows is not None and self._learner.take(await asyncio.to_thread(self._learner.fit, rows), rows)
        self.fitted = self._learner.fitted()
        if changed:
            for observer in self._observers:
                observer(self.fitted.model)

    async def save(self) -> None:
        """Store the fits of those kinds of steps that this worker has seen often enough."""
        fits = {kind: self.fitted for kind in StepKind if self.fitted.of(kind).steps >= MIN_STEPS}
        await self._store.save(self._key, fits)

    async def kept_curve(self) -> PrefillCurve | None:
        """Return the last prefill measurement by a worker of this kind."""
        return await self._store.load_curve(self._key)

    async def keep_curve(self, curve: PrefillCurve) -> None:
        """Store a prefill measurement for other workers of this kind."""
        await self._store.save_curve(self._key, curve)

    @asynccontextmanager
    async def claim(self, lease_s: float) -> AsyncIterator[bool]:
        """Yield whether this worker alone of its kind may measure prefill while the context is open."""
        mine = await self._store.claim(self._key, lease_s=lease_s)
        try:
            yield mine
        finally:
            if mine:
                await self._store.release(self._key)


def step_time_key(engine: Engine, model: ModelInfo) -> StepTimeKey:
    """Return the key of all that a started engine's step times, and so its prefill curve, depend on."""
    name = f"{model.name}@{model.revision[:REVISION_CHARS]}"
    return StepTimeKey(engine.name, name, engine.device, engine.capabilities.variant)


def work_of(step: StepReport) -> StepWork:
    return StepWork(
        prefill_tokens=step.prefill_tokens,
        prefill_sequences=step.prefill_sequences,
        prefill_context_tokens=step.prefill_context_tokens,
        decode_sequences=step.decode_sequences,
        decode_kv_tokens=step.decode_kv_tokens,
        prefill_squared_tokens=step.prefill_squared_tokens,
    )
