"""Several step-time stores as one."""

from collections.abc import Mapping, Sequence

from libs.perfmodel import FittedModel, StepKind
from libs.perfmodel.saturation import PrefillCurve
from libs.stepstore.port import StepTimeKey, StepTimeStore


class LayeredStepTimes:
    """Saves to every store; of each kind of step, and of the curve, the first store that has it counts."""

    def __init__(self, stores: Sequence[StepTimeStore]) -> None:
        self._stores = stores

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """The first of each kind."""
        found: dict[StepKind, FittedModel] = {}
        for store in self._stores:
            found = {**await store.load(key), **found}
        return found

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """To all."""
        for store in self._stores:
            await store.save(key, fits)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """The first there is."""
        for store in self._stores:
            if (curve := await store.load_curve(key)) is not None:
                return curve
        return None

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """To all."""
        for store in self._stores:
            await store.save_curve(key, curve)

    async def close(self) -> None:
        """Close all."""
        for store in self._stores:
            await store.close()
