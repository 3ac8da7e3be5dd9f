"""Where workers keep what they have learned of their step times, so that the next one starts from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from libs.perfmodel import FittedModel, StepKind
from libs.perfmodel.saturation import PrefillCurve


@dataclass(frozen=True, slots=True)
class StepTimeKey:
    """What step times are of."""

    engine: str
    model: str
    device: str
    """E.g. "cpu", "cuda:NVIDIA H200", "sim:llama-8b-h100"."""


class StepTimeStore(Protocol):
    """For each key the latest fit that covers each kind of step, and the latest measurement of prefill.

    It raises nothing: one that is away holds nothing.
    """

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """By kind of step, the last fit saved for it; of that fit only what concerns the kind counts."""
        ...

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Replace the fits of these kinds; those of others stay."""
        ...

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """The last measurement of prefill that was saved for it."""
        ...

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """Replace it."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
