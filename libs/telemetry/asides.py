"""What batches tell beside what their workers did: hosts' clocks, GPUs' counters, bytes handed over. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.telemetry.clocks import Clocks
from libs.telemetry.hardware import Hardware


class Asides:
    """Of all workers."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.hardware = Hardware()
        self.kv_bytes: Counter[str] = Counter()
        """Bytes handed over between workers, by way: "shared_memory" or "grpc"."""

    def note(self, batches: Sequence[StepBatch], arrived_ns: Sequence[int]) -> None:
        """Clocks and counters, of batches by when they came."""
        for batch in batches:
            if batch.gpu_readings:
                self.hardware.add(batch)
        delays_ns = [at_ns - batch.covered_to_unix_ns for batch, at_ns in zip(batches, arrived_ns, strict=True)]
        shortest: dict[str, int] = {}
        """By node, the place of the batch that took least. The others came within a round of it and tell no more."""
        for place, batch in enumerate(batches):
            known = shortest.setdefault(batch.node, place)
            if delays_ns[place] < delays_ns[known]:
                shortest[batch.node] = place
        for node, place in shortest.items():
            self.clocks.note(node, batches[place].covered_to_unix_ns, arrived_ns[place])

    def note_transfers(self, batches: Iterable[StepBatch]) -> None:
        """Hand-offs, each told by one batch alone."""
        for batch in batches:
            for transfer in batch.kv_transfers or ():  # an empty list of protobuf is slow to walk
                self.kv_bytes["shared_memory" if transfer.shared_memory else "grpc"] += transfer.bytes
