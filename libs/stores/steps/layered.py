"""A step-time store made of several others."""

from collections.abc import Mapping, Sequence

from libs.perfmodel.learner import FittedModel, StepKind
from libs.policy.worker.saturation import PrefillCurve
from libs.stores.steps.port import StepTimeKey, StepTimeStore


class LayeredStepTimes:
    """A store that saves to all others. The first one that has a kind of step provides it, and the latest curve
    counts.
    """

    def __init__(self, stores: Sequence[StepTimeStore]) -> None:
        self._stores = stores

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        found: dict[StepKind, FittedModel] = {}
        for store in self._stores:
            found = {**await store.load(key), **found}
        return found

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        for store in self._stores:
            await store.save(key, fits)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the curve measured last, since a worker of another host may have measured after this host's."""
        found = [curve for store in self._stores if (curve := await store.load_curve(key)) is not None]
        return max(found, key=lambda curve: curve.unix_ns, default=None)

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        for store in self._stores:
            await store.save_curve(key, curve)

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Claim in every store; return whether all of them granted it."""
        for number, store in enumerate(self._stores):
            if not await store.claim(key, lease_s=lease_s):
                for earlier in self._stores[:number]:
                    await earlier.release(key)
                return False
        return True

    async def release(self, key: StepTimeKey) -> None:
        for store in self._stores:
            await store.release(key)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
