"""What a worker of a pool keeps of the models that it leaves, within the memory of its host and of its GPUs. Pure."""

from collections.abc import Sequence
from enum import Enum


class Leaving(Enum):
    """How a model is left."""

    CLOSED = "closed"
    """Nothing stays."""
    WITHOUT_WEIGHTS = "without weights"
    """The engine's processes stay: waking reads the weights and spares the rest of a start."""
    WITH_WEIGHTS = "with weights"
    """The weights stay too, in host memory."""


def leave(size_bytes: int, *, host_bytes: int, sleeps: bool, drops_weights: bool) -> Leaving:
    """As much as can stay of a model of so much weight. `host_bytes`: for all models that sleep."""
    if not sleeps or not host_bytes:
        return Leaving.CLOSED
    if size_bytes <= host_bytes:
        return Leaving.WITH_WEIGHTS
    return Leaving.WITHOUT_WEIGHTS if drops_weights else Leaving.CLOSED


def too_many(held: Sequence[int], wanted: int, most: int) -> int:
    """How many of those that were left longest ago have to go, so that `wanted` fits in `most` beside the others."""
    over, gone = sum(held) + wanted - most, 0
    while over > 0 and gone < len(held):
        over -= held[gone]
        gone += 1
    return gone
