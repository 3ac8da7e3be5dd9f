"""Where workers keep what they have learned of their step times, so that the next one starts from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from libs.perfmodel.learner import FittedModel, StepKind
from libs.policy.worker.saturation import PrefillCurve


@dataclass(frozen=True, slots=True)
class StepTimeKey:
    """What step times are of. Workers with equal ones take as long for the same step."""

    engine: str
    model: str
    """Its name, and the beginning of its revision: names can be chosen."""
    device: str
    """E.g. "cpu", "cuda:NVIDIA H200", "sim:llama-8b-h100"."""
    variant: str = ""
    """What else the engine says decides it, e.g. "bfloat16, tp4, vllm 0.32.0"."""

    @property
    def parts(self) -> tuple[str, ...]:
        """From the widest to the narrowest."""
        return self.engine, self.model, self.device, self.variant


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

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Whether the caller is to measure prefill for the key now, since nobody else does who uses this store.

        It holds until `release`, or until the caller is dead: `lease_s` at most where that cannot be known. One that is
        away lets everybody.
        """
        ...

    async def release(self, key: StepTimeKey) -> None:
        """The caller measures no more; nothing where it did not."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
