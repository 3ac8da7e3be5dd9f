"""The distribution of step-telemetry partitions over instances that announce themselves to one another."""

from typing import Final

# Instances announce themselves ten times a second; one silent for this long loses its partitions to the others.
ALIVE_NS: Final = 1_500_000_000
# Further instances are ignored, as there are fewer partitions.
MAX_INSTANCES: Final = 64


class Shares:
    """The partitions that each live instance reads, assigned round robin in order of instance names.

    While two instances have not seen each other, both may read a partition. That costs time and changes no figure.
    """

    def __init__(self, own_id: str) -> None:
        self.own_id = own_id
        self._heard_ns: dict[str, int] = {}

    def hear(self, instance_id: str, now_ns: int) -> None:
        """Record the announcement of an instance."""
        if instance_id in self._heard_ns or len(self._heard_ns) < MAX_INSTANCES:
            self._heard_ns[instance_id] = now_ns

    def alive(self, now_ns: int) -> list[str]:
        """Return the sorted names of live instances, including this one."""
        self._heard_ns = {name: at_ns for name, at_ns in self._heard_ns.items() if now_ns - at_ns < ALIVE_NS}
        return sorted({self.own_id, *self._heard_ns})

    def mine(self, partition: int, now_ns: int) -> bool:
        """Return whether this instance reads a partition."""
        alive = self.alive(now_ns)
        return alive[partition % len(alive)] == self.own_id

    def leads(self, now_ns: int) -> bool:
        """Return whether this instance is the first live one, which does the work that only one need do."""
        return self.alive(now_ns)[0] == self.own_id

    def traces(self, *, own: bool, covered_to_ns: int | None, now_ns: int) -> bool:
        """Return whether this instance makes the traces of a worker with telemetry up to `covered_to_ns`.

        If nobody seems to read the worker, all instances do, since duplicate traces are identical.
        """
        return own or covered_to_ns is None or covered_to_ns < now_ns - ALIVE_NS
