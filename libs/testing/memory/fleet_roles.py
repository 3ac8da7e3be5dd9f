"""A fleet whose roles are stored in a dictionary."""

from collections.abc import Sequence
from dataclasses import replace

from libs.observe.roles import FleetAway, FleetWorker, MoveRefused, check_move


class MemoryFleetRoles:
    """Roles that change at once, unless the fleet is away or refuses."""

    kind = "memory"

    def __init__(self, workers: Sequence[FleetWorker] = ()) -> None:
        self._workers = {each.name: each for each in workers}
        self._changes = 0
        self.away = ""
        self.refuses = ""
        """The reason why changes are refused; empty if they are accepted."""
        self.moves: list[tuple[str, str, str]] = []
        """The name, role and reason of each change."""

    def put(self, worker: FleetWorker) -> None:
        """Add a worker, or replace its state."""
        self._changes += 1
        self._workers[worker.name] = replace(worker, version=str(self._changes))

    async def workers(self) -> Sequence[FleetWorker]:
        if self.away:
            raise FleetAway(self.away)
        return sorted(self._workers.values(), key=lambda each: each.name)

    async def set_role(self, worker: FleetWorker, role: str, why: str) -> None:
        if self.away:
            raise FleetAway(self.away)
        check_move(worker, role)
        if self.refuses:
            raise MoveRefused(f"{worker.name}: {self.refuses}")
        known = self._workers.get(worker.name)
        if known is None or known.version != worker.version:
            raise MoveRefused(f"{worker.name} has changed since it was read: read the roles again")
        self.put(replace(known, role=role))
        self.moves.append((worker.name, role, why))

    async def close(self) -> None: ...


class MemoryLeases:
    """The leases of all processes that could act on one fleet."""

    def __init__(self) -> None:
        self.holder = ""
        self.away = ""

    def of(self, identity: str) -> "MemoryLease":
        return MemoryLease(self, identity)


class MemoryLease:
    """One process's view of the lease."""

    def __init__(self, leases: MemoryLeases, identity: str) -> None:
        self._leases = leases
        self._identity = identity

    async def hold(self) -> str:
        if self._leases.away:
            raise FleetAway(self._leases.away)
        self._leases.holder = self._leases.holder or self._identity
        return "" if self._leases.holder == self._identity else self._leases.holder

    async def close(self) -> None:
        if self._leases.holder == self._identity:
            self._leases.holder = ""
