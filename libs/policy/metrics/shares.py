"""Who reads which partitions of the step telemetry, of instances that tell one another that they live. Pure."""

from typing import Final

ALIVE_NS: Final = 1_500_000_000
"""An instance that has been silent for so long has lost its partitions to the others: it tells ten times a second."""
MAX_INSTANCES: Final = 64
"""Further ones are not heard: there are fewer partitions."""


class Shares:
    """Partitions go round among those who live, by their names' order. While two have not heard of one another, both
    read a partition, which costs time and changes no figure."""

    def __init__(self, own_id: str) -> None:
        self.own_id = own_id
        self._heard_ns: dict[str, int] = {}

    def hear(self, instance_id: str, now_ns: int) -> None:
        """An instance has reported of itself."""
        if instance_id in self._heard_ns or len(self._heard_ns) < MAX_INSTANCES:
            self._heard_ns[instance_id] = now_ns

    def alive(self, now_ns: int) -> list[str]:
        """Names in order, this one's among them."""
        self._heard_ns = {name: at_ns for name, at_ns in self._heard_ns.items() if now_ns - at_ns < ALIVE_NS}
        return sorted({self.own_id, *self._heard_ns})

    def mine(self, partition: int, now_ns: int) -> bool:
        """Whether this instance is to read it."""
        alive = self.alive(now_ns)
        return alive[partition % len(alive)] == self.own_id

    def leads(self, now_ns: int) -> bool:
        """Whether this instance does what only one need do: the first of those who live."""
        return self.alive(now_ns)[0] == self.own_id

    def traces(self, *, own: bool, covered_to_ns: int | None, now_ns: int) -> bool:
        """Whether this instance makes the traces of a worker whose telemetry reaches until then:
        all do for one that nobody seems to read, since a trace that is made twice is the same."""
        return own or covered_to_ns is None or covered_to_ns < now_ns - ALIVE_NS
