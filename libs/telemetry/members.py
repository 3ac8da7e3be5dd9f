"""Who windows are of: kept for workers that have gone, so that what they did still counts where it belongs. Pure."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from libs.telemetry.listing import Listed
from libs.telemetry.windows.rollups import MAX_WORKERS

UNKNOWN: Final = "not heard of"
"""Node and model of a worker of which windows are all that is known."""


class Member(NamedTuple):
    """A worker as last heard of."""

    worker_id: str
    node: str
    model: str
    gpus: int
    group: str = ""
    """Data-parallel group of which it is a rank; empty: of none."""

    @property
    def group_name(self) -> str:
        """That no other group has, of whatever model; empty for a worker of none."""
        return group_name(self.model, self.group)


class Members:
    """By worker id; of more than roll-ups keep, the longest silent is forgotten."""

    def __init__(self) -> None:
        self._known: dict[str, Member] = {}

    def enter(self, members: Iterable[Member]) -> None:
        """What is known of them by now."""
        for member in members:
            self._known.pop(member.worker_id, None)
            self._known[member.worker_id] = member
        while len(self._known) > MAX_WORKERS:
            del self._known[next(iter(self._known))]

    def get(self, worker_id: str) -> Member | None:
        """None for one that is not known."""
        return self._known.get(worker_id)

    def all(self) -> list[Member]:
        """The longest silent first."""
        return list(self._known.values())


def member_of(worker: Listed) -> Member:
    """From a worker's own words."""
    return Member(worker.worker_id, worker.node, worker.model, worker.gpus, worker.group)


def group_name(model: str, group: str) -> str:
    """Of a data-parallel group, with the model: groups of several may meet at one address, one after the other."""
    return f"{model}/{group}" if group else ""
