"""The choice of how much of a model a pool worker keeps when it leaves it, within host and GPU memory."""

from collections.abc import Sequence
from enum import Enum


class Leaving(Enum):
    CLOSED = "closed"
    WITHOUT_WEIGHTS = "without weights"
    """The engine's processes stay, so waking up reads only the weights."""
    WITH_WEIGHTS = "with weights"
    """The weights stay too, in host memory."""


def leave(size_bytes: int, *, host_bytes: int, sleeps: bool, drops_weights: bool) -> Leaving:
    """Return the most that can stay of a model with weights of this size.

    `host_bytes` is the host memory for all sleeping models.
    """
    if not sleeps or not host_bytes:
        return Leaving.CLOSED
    if size_bytes <= host_bytes:
        return Leaving.WITH_WEIGHTS
    return Leaving.WITHOUT_WEIGHTS if drops_weights else Leaving.CLOSED


def too_many(held: Sequence[int], wanted: int, most: int) -> int:
    """Return how many of the held models must go, longest unused first, so that `wanted` fits within `most`."""
    over, gone = sum(held) + wanted - most, 0
    while over > 0 and gone < len(held):
        over -= held[gone]
        gone += 1
    return gone
