"""Statistics that batches carry about their hosts: clock offsets, GPU counters and bytes handed over. Pure.

A batch arrives later than the moment it covers by its transit time and by the lag of its host's clock. The shortest
transit is much the same for all hosts. A clock's offset is therefore its host's smallest delay of the last minute,
less that of the median host. Its error is the difference between the shortest transits, some milliseconds in one
data centre.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.policy.metrics.kv_links import way
from libs.telemetry.nodes.hardware import NodeGpus
from libs.telemetry.nodes.kv_links import IncarnationOf, KvLinks

BUCKET_NS: Final = 10 * 1_000_000_000
BUCKETS: Final = 6
MAX_NODES: Final = 4096
"""The most nodes tracked at once. A further one is left out until another has been silent for a minute."""


class Clocks:
    """The smallest delay of each node in every interval of ten seconds."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, int]] = {}

    def note(self, node: str, stamped_ns: int, arrived_ns: int) -> None:
        """Record a batch stamped `stamped_ns` by its node's clock that arrived at `arrived_ns` by this process's
        clock.
        """
        bucket = arrived_ns // BUCKET_NS
        least = self._nodes.get(node)
        if least is None:
            if len(self._nodes) >= MAX_NODES:
                self._forget(bucket)
                if len(self._nodes) >= MAX_NODES:
                    return
            least = self._nodes[node] = {}
        delay_ns = arrived_ns - stamped_ns
        known_ns = least.get(bucket)
        if known_ns is None:
            for old in [number for number in least if number <= bucket - BUCKETS]:
                del least[old]
        if known_ns is None or delay_ns < known_ns:
            least[bucket] = delay_ns

    def offsets_ns(self, now_ns: int) -> dict[str, int]:
        """Return how far the clock of each node is ahead of the median node's, for nodes seen in the last minute."""
        self._forget(now_ns // BUCKET_NS)
        least = {node: min(delays.values()) for node, delays in self._nodes.items()}
        middle_ns = round(median(least.values())) if least else 0
        return {node: middle_ns - delay_ns for node, delay_ns in least.items()}

    def _forget(self, bucket: int) -> None:
        self._nodes = {node: delays for node, delays in self._nodes.items() if max(delays) > bucket - BUCKETS}


class NodeStats:
    """Clock offsets and hardware counters of all nodes, and bytes of KV transfers."""

    def __init__(self, incarnation_of: IncarnationOf) -> None:
        self.clocks = Clocks()
        self.hardware = NodeGpus()
        self.kv_bytes: Counter[str] = Counter()
        """Bytes handed over between workers, by route: "shared_memory" or "network"."""
        self.kv_links = KvLinks(incarnation_of)

    def note(self, batches: Sequence[StepBatch], arrived_ns: Sequence[int]) -> None:
        """Update clocks and counters from batches and their times of arrival."""
        for batch in batches:
            if batch.gpu_readings:
                self.hardware.add(batch)
        delays_ns = [at_ns - batch.covered_to_unix_ns for batch, at_ns in zip(batches, arrived_ns, strict=True)]
        # Index of the batch with the smallest delay, by node. The others arrived with it and add nothing.
        shortest: dict[str, int] = {}
        for place, batch in enumerate(batches):
            known = shortest.setdefault(batch.node, place)
            if delays_ns[place] < delays_ns[known]:
                shortest[batch.node] = place
        for node, place in shortest.items():
            self.clocks.note(node, batches[place].covered_to_unix_ns, arrived_ns[place])

    def note_transfers(self, batches: Iterable[StepBatch]) -> None:
        """Count KV transfers; each is in exactly one batch."""
        for batch in batches:
            for transfer in batch.kv_transfers or ():  # iterating an empty protobuf list is slow
                self.kv_bytes[way(shared_memory=transfer.shared_memory)] += transfer.bytes
            if batch.kv_transfers:
                self.kv_links.note(batch)
