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
    """StepTimeStore of one cluster and one process, whose claims are its own."""

    def __init__(self, store: MemoryStore, cluster: str) -> None:
        self._store = store
        self._cluster = cluster

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """What is there; nothing while the store is away."""
        return await self._ask(lambda: dict(self._store.fits.get(self._key(key), {})), {})

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Write the kinds; lost while the store is away."""
        await self._ask(lambda: self._store.fits.setdefault(self._key(key), {}).update(fits), None)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """What is there; nothing while the store is away."""
        return await self._ask(lambda: self._store.curves.get(self._key(key)), None)

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """Write it; lost while the store is away."""
        await self._ask(lambda: self._store.curves.update({self._key(key): curve}), None)

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """The first one has it until its lease ends; everybody is let while the store is away."""
        return await self._ask(lambda: self._store.claimed(self._key(key), self, lease_s), True)

    async def release(self, key: StepTimeKey) -> None:
        """Free it, if it is this one's."""
        await self._ask(lambda: self._store.released(self._key(key), self), None)

    async def close(self) -> None:
        """Nothing to disconnect; claims last as long as their leases."""

    def _key(self, key: StepTimeKey) -> Key:
        return (self._cluster, *key.parts)

    async def _ask(self, act: Callable[[], T], away: T) -> T:
        """The answer, or what stands for it while the store is away."""
        try:
            return await self._store.call(act, timeout_s=CALL_TIMEOUT_S)
        except ServerAway:
            return away
