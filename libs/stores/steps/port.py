"""The port to step times that workers have learned, from which later workers start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from libs.perfmodel.learner import FittedModel, StepKind
from libs.policy.worker.saturation import PrefillCurve


@dataclass(frozen=True, slots=True)
class StepTimeKey:
    """The key of step times. Workers with equal keys take the same time for the same step."""

    engine: str
    model: str
    """The model's name and the beginning of its revision, since names can be chosen freely."""
    device: str
    """For example "cpu", "cuda:NVIDIA H200" or "sim:llama-8b-h100"."""
    variant: str = ""
    """Further properties that the engine considers decisive, e.g. "bfloat16, tp4, vllm 0.32.0"."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the key from the widest to the narrowest."""
        return self.engine, self.model, self.device, self.variant


class StepTimeStore(Protocol):
    """The latest fit for each kind of step and the latest measurement of prefill, by key.

    No method raises; a store that is away behaves like an empty one.
    """

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """Return the last fit saved for each kind of step. Only the part of it that concerns the kind counts."""
        ...

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Replace the fits of these kinds; those of other kinds stay."""
        ...

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the last measurement of prefill that was saved."""
        ...

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None: ...

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Return whether the caller should measure prefill, because no other user of this store does.

        The claim lasts until `release` or the caller's death, or `lease_s` if its death cannot be detected. A store
        that is away grants every claim.
        """
        ...

    async def release(self, key: StepTimeKey) -> None:
        """End the caller's claim, if it has one."""
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...
