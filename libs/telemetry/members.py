"""Node, model and GPUs of each worker that windows name. Pure.

Entries outlive their workers, so that past work still counts where it belongs.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from libs.telemetry.listing import Listed
from libs.telemetry.windows.rollups import MAX_WORKERS

UNKNOWN: Final = "not heard of"
"""Node and model of a worker known from windows alone."""


class Member(NamedTuple):
    """The last report of a worker, without what windows hold."""

    worker_id: str
    node: str
    model: str
    gpus: int
    group: str = ""
    """Data-parallel group of which the worker is a rank; empty if there is none."""

    @property
    def group_name(self) -> str:
        """Name of the group that is unique across models; empty for a worker without a group."""
        return group_name(self.model, self.group)


class Members:
    """Members by worker id. Beyond the roll-ups' bound, the worker that has been silent longest is dropped."""

    def __init__(self) -> None:
        self._known: dict[str, Member] = {}

    def enter(self, members: Iterable[Member]) -> None:
        """Add or replace members, which become the most recent ones."""
        for member in members:
            self._known.pop(member.worker_id, None)
            self._known[member.worker_id] = member
        while len(self._known) > MAX_WORKERS:
            del self._known[next(iter(self._known))]

    def get(self, worker_id: str) -> Member | None:
        return self._known.get(worker_id)

    def all(self) -> list[Member]:
        """Return all members, the longest silent first."""
        return list(self._known.values())


def member_of(worker: Listed) -> Member:
    return Member(worker.worker_id, worker.node, worker.model, worker.gpus, worker.group)


def group_name(model: str, group: str) -> str:
    # Groups of several models may use one address, one after the other.
    return f"{model}/{group}" if group else ""
