"""What batches tell beside what their workers did: hosts' clocks, GPUs' counters, bytes handed over. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.telemetry.nodes.clocks import Clocks
from libs.telemetry.nodes.hardware import Hardware


class NodeStats:
    """Clock offsets and hardware counters of all nodes, and bytes of KV transfers."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.hardware = Hardware()
        self.kv_bytes: Counter[str] = Counter()
        """Bytes handed over between workers, by way: "shared_memory" or "grpc"."""

    def note(self, batches: Sequence[StepBatch], arrived_ns: Sequence[int]) -> None:
        """Update clocks and counters from batches and their times of arrival."""
        for batch in batches:
            if batch.gpu_readings:
                self.hardware.add(batch)
        delays_ns = [at_ns - batch.covered_to_unix_ns for batch, at_ns in zip(batches, arrived_ns, strict=True)]
        shortest: dict[str, int] = {}
        """Index of the batch with the smallest delay, by node. The others arrived with it and add nothing."""
        for place, batch in enumerate(batches):
            known = shortest.setdefault(batch.node, place)
            if delays_ns[place] < delays_ns[known]:
                shortest[batch.node] = place
        for node, place in shortest.items():
            self.clocks.note(node, batches[place].covered_to_unix_ns, arrived_ns[place])

    def note_transfers(self, batches: Iterable[StepBatch]) -> None:
        """Count KV transfers; each is in exactly one batch."""
        for batch in batches:
            for transfer in batch.kv_transfers or ():  # an empty list of protobuf is slow to walk
                self.kv_bytes["shared_memory" if transfer.shared_memory else "grpc"] += transfer.bytes
