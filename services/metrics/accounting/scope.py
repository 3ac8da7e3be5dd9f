"""The scope of a series: the cluster, a model, a pool, a node, a data-parallel group or a worker. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.rollups import ROLE_NUMBERS
from libs.telemetry.workers import Member, Members

ALLOWED: Final = f"cluster, model:NAME, pool:{'|'.join(ROLE_NAMES)}, node:NAME, group:MODEL/NAME or worker:ID"
MAX_NAMES: Final = 8
"""The most existing names that an error lists."""
_OF_WORKER: Final[dict[str, Callable[[Member], str]]] = {
    "model": lambda member: member.model,
    "node": lambda member: member.node,
    "group": lambda member: member.group_name,
    "worker": lambda member: member.worker_id,
}


@dataclass(frozen=True, slots=True)
class Scope:
    """A requested scope.

    A pool is matched by the role that a worker had in each window, all others by the worker's last report.
    """

    text: str
    kind: str = "cluster"
    name: str = ""

    @property
    def role(self) -> int | None:
        """The number of the pool's role in roll-ups; None where workers of every role count."""
        return ROLE_NUMBERS[self.name] if self.kind == "pool" else None

    def of(self, members: Members, worker_ids: Sequence[str]) -> list[str]:
        """Return those of the workers that may count. Raise InvalidRequest if the scope's name does not exist."""
        attribute = _OF_WORKER.get(self.kind)
        if attribute is None:
            return list(worker_ids)
        names = {worker_id: attribute(member) for worker_id in worker_ids if (member := members.get(worker_id))}
        names = {worker_id: name for worker_id, name in names.items() if name}  # most workers have no group
        found = [worker_id for worker_id, name in names.items() if name == self.name]
        if not found:
            known = sorted(set(names.values()))
            more = ", ..." if len(known) > MAX_NAMES else ""
            raise InvalidRequest(
                f"scope={self.text[:80]!r}: there is no such {self.kind}; known: "
                f"{', '.join(known[:MAX_NAMES]) or 'none'}{more}",
                param="scope",
            )
        return found


def parse_scope(text: str) -> Scope:
    """Parse "cluster" or "kind:name". Raise InvalidRequest, which names the allowed forms."""
    kind, _, name = text.strip().partition(":")
    if kind == "cluster" and not name:
        return Scope(text)
    if (kind == "pool" and name in ROLE_NAMES) or (kind in _OF_WORKER and name):
        return Scope(text, kind, name)
    raise InvalidRequest(f"scope={text[:80]!r} is not {ALLOWED}", param="scope")
