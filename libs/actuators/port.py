"""The actuator port: have this many workers, wherever they run. A wish is a number, so that asking again is safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Started:
    """What an actuator has."""

    worker_ids: tuple[str, ...]
    """By the names under which they register: those that it started and that have not ended, such as still start or end
    among them."""
    most: int
    """That it can have."""
    model: str
    """That they serve."""
    without_machine: frozenset[str] = frozenset()
    """Those of them that wait until there is a machine with room."""


class ActuatorDown(Exception):
    """It does not answer, or refuses; what it has stays as it is, and it may be asked again."""


class Actuator(Protocol):
    """Starts and ends workers. What a caller saw before, and another caller asked for, it sees when it looks again."""

    kind: str
    """As decisions name it."""

    async def look(self) -> Started:
        """What there is. Raises ActuatorDown."""
        ...

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        """Have this many from now on, at most `most`: returns once that is accepted, and the change follows. Where some
        have to go, those named go first, in their order; what runs there may finish. Raises ActuatorDown."""
        ...

    async def show(self, roles: Mapping[str, str]) -> None:
        """Show roles of workers, by their names, where they run; does nothing where such things cannot be shown. Raises
        ActuatorDown."""
        ...

    async def close(self) -> None:
        """Leave it; workers stay as they are. Idempotent."""
        ...


def to_end(worker_ids: Sequence[str], count: int, first_to_end: Sequence[str]) -> list[str]:
    """Which of them have to go so that `count` are left: those named first, then the newest."""
    going = [name for name in dict.fromkeys(first_to_end) if name in worker_ids]
    going += [name for name in reversed(worker_ids) if name not in going]
    return going[: max(len(worker_ids) - count, 0)]
