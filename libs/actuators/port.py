"""The actuator port, which sets the number of workers on any platform. Repeating a request is safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Started:
    """The workers of an actuator at one moment."""

    worker_ids: tuple[str, ...]
    """Their registered names, including workers that are still starting or ending but not ended ones."""
    most: int
    """The largest number of workers that the actuator can run."""
    model: str
    without_machine: frozenset[str] = frozenset()
    """The members of `worker_ids` that wait for a machine with room."""


class ActuatorDown(Exception):
    """The actuator is unreachable or refuses the call. Its workers stay as they are, and the call may be repeated."""


class Actuator(Protocol):
    """A port that starts and ends workers. `look` reflects earlier calls, including those of other callers."""

    kind: str
    """The name of the actuator in the planner's decisions."""

    async def look(self) -> Started:
        """Return the present workers and their limit. Raise ActuatorDown."""
        ...

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        """Request this many workers, at most `most`, and return once the request is accepted; the change follows.

        If workers have to end, those in `first_to_end` go first, in that order. Their running work may finish.
        Raise ActuatorDown.
        """
        ...

    async def show(self, roles: Mapping[str, str]) -> None:
        """Display the roles of workers, by name, where they run; do nothing if that is not supported. Raise
        ActuatorDown.
        """
        ...

    async def close(self) -> None:
        """Disconnect, leaving workers as they are. Idempotent."""
        ...


def to_end(worker_ids: Sequence[str], count: int, first_to_end: Sequence[str]) -> list[str]:
    """Return the workers that must end so that `count` are left: those in `first_to_end`, then the newest."""
    going = [name for name in dict.fromkeys(first_to_end) if name in worker_ids]
    going += [name for name in reversed(worker_ids) if name not in going]
    return going[: max(len(worker_ids) - count, 0)]
