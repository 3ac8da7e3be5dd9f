"""Step times over a store in memory."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from libs.perfmodel.learner import FittedModel, StepKind
from libs.policy.worker.saturation import PrefillCurve
from libs.stores.steps import CALL_TIMEOUT_S, StepTimeKey
from libs.testing.memory.server import ServerAway
from libs.testing.memory.store import Key, MemoryStore

T = TypeVar("T")


class MemoryStepTimes:
    """A StepTimeStore of one cluster and one process, which holds its own claims."""

    def __init__(self, store: MemoryStore, cluster: str) -> None:
        self._store = store
        self._cluster = cluster

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """Return the stored fits; none while the store is away."""
        return await self._ask(lambda: dict(self._store.fits.get(self._key(key), {})), {})

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Store the fits; they are lost while the store is away."""
        await self._ask(lambda: self._store.fits.setdefault(self._key(key), {}).update(fits), None)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the stored curve; None while the store is away."""
        return await self._ask(lambda: self._store.curves.get(self._key(key)), None)

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """Store the curve; it is lost while the store is away."""
        await self._ask(lambda: self._store.curves.update({self._key(key): curve}), None)

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Grant the claim to the first caller until its lease ends, and to everyone while the store is away."""
        return await self._ask(lambda: self._store.claimed(self._key(key), self, lease_s), True)

    async def release(self, key: StepTimeKey) -> None:
        """Release the claim if this process holds it."""
        await self._ask(lambda: self._store.released(self._key(key), self), None)

    async def close(self) -> None: ...

    def _key(self, key: StepTimeKey) -> Key:
        return (self._cluster, *key.parts)

    async def _ask(self, act: Callable[[], T], away: T) -> T:
        """Return the result of `act`, or `away` while the store is away."""
        try:
            return await self._store.call(act, timeout_s=CALL_TIMEOUT_S)
        except ServerAway:
            return away
