"""The latest hardware counters of every GPU, bounded in number. A GPU without recent readings counts as absent, not
idle.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from libs.contracts.pb.fulcrum.telemetry.v1 import telemetry_pb2 as pb
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.contracts.step_row import step_rows
from libs.counters import GpuReading
from libs.policy.kv_links import MAX_TOGETHER, KvLink, MovedKv, awaited_prompt, way
from libs.policy.newest import put_newest
from libs.policy.verdict.state import CPU_WAIT, Grade
from libs.telemetry.columns import Bools, Ints
from libs.telemetry.relayed import COVERED_TO, WAITED, RelayTable
from libs.telemetry.rollups import MAX_WORKERS

MAX_GPUS: Final = 16_384
FRESH_NS: Final = 5 * 1_000_000_000
"""The maximum distance in time of a reading from the moment that it describes. Readings come once a second."""


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU's reading with its node and the time it was taken."""

    node: str
    read_unix_ns: int
    reading: GpuReading


class NodeGpus:
    """Readings keyed by node and by the GPU's UUID."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], SeenGpu] = {}

    def add(self, batch: pb.StepBatch) -> None:
        """Record a worker's readings of its node's GPUs; readings older than the known ones change nothing."""
        for message in batch.gpu_readings or ():  # iterating over an empty protobuf list is slow
            reading = _reading(message)
            key = (batch.node, message.uuid)
            known = self._seen.get(key)
            if reading is None or (known is not None and known.read_unix_ns >= batch.covered_to_unix_ns):
                continue
            if known is None and len(self._seen) >= MAX_GPUS:
                del self._seen[min(self._seen, key=lambda each: self._seen[each].read_unix_ns)]
            self._seen[key] = SeenGpu(batch.node, batch.covered_to_unix_ns, reading)

    def fresh(self, now_ns: int) -> Iterator[SeenGpu]:
        """Yield readings less than `FRESH_NS` away from `now_ns`, by node and index. Only the latest reading of a GPU
        is kept.
        """
        for seen in sorted(self._seen.values(), key=lambda each: (each.node, each.reading.index)):
            if abs(seen.read_unix_ns - now_ns) < FRESH_NS:
                yield seen


def _reading(message: pb.GpuReading) -> GpuReading | None:
    """Return the reading; None if any number is not finite."""
    present = {field.name for field, _ in message.ListFields()}
    values: dict[str, Any] = {"uuid": "", "index": 0, "name": ""}
    values |= {field.name: getattr(message, field.name) for field in fields(GpuReading) if field.name in present}
    sound = all(math.isfinite(value) for value in values.values() if isinstance(value, float))
    return GpuReading(**values) if sound else None


MAX_LINKS: Final = 4_096
"""The maximum number of links that are kept; the one that has been idle longest is dropped."""
STEPWISE: Final = frozenset({"vllm"})
"""Engines that notice the arrival of KV only between their steps (libs/engine/vllm/scheduling/scheduler.py)."""
IDLE_STEP_NS: Final = 2_000_000
"""The delay after which such an idle engine notices KV. Its loop sleeps 1 ms (vllm/v1/engine/core.py), then polls its
processes.
"""

IncarnationOf = Callable[[str], int]
"""A function that returns the incarnation of a worker's process, 0 if unknown."""
WaitsForCpu = Callable[[str, int], bool]
"""A function that returns whether a worker's waits for a CPU make its timings unreliable at a moment."""


class Peer(NamedTuple):
    model: str
    node: str
    incarnation: int


class _Pair(NamedTuple):
    """A link with the incarnations of the processes at its ends."""

    link: KvLink
    source_incarnation: int
    target_incarnation: int
    moved: tuple[MovedKv, ...] = ()
    """The latest transfers over the link, in order of arrival."""

    def is_between(self, source_incarnation: int, target_incarnation: int) -> bool:
        """Return whether both ends are still the same processes, as far as is known."""
        return _is_same(self.source_incarnation, source_incarnation) and _is_same(
            self.target_incarnation, target_incarnation
        )


def _is_same(known: int, now: int) -> bool:
    # An incarnation of 0 is unknown and matches any other.
    return known == now or not known or not now


class KvLinks:
    """The links to workers whose telemetry this process reads."""

    def __init__(
        self,
        incarnation_of: IncarnationOf = lambda _worker_id: 0,
        waits_for_cpu: WaitsForCpu = lambda _worker_id, _at_ns: False,
    ) -> None:
        self._incarnation_of = incarnation_of
        self._waits_for_cpu = waits_for_cpu
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()

    def note(self, batch: StepBatch) -> None:
        step_ns = _step_ns(batch)
        for transfer in batch.kv_transfers:
            self._note(batch, transfer, step_ns)
        while len(self._pairs) > MAX_LINKS:
            self._pairs.popitem(last=False)

    def _note(self, batch: StepBatch, transfer: KvTransfer, step_ns: int) -> None:
        key = transfer.from_worker_id, batch.worker_id
        pair, source = self._pairs.get(key), self._incarnation_of(transfer.from_worker_id)
        if pair is not None and batch.incarnation < pair.target_incarnation:
            return  # a late batch of a process that has been replaced
        if pair is None or not pair.is_between(source, batch.incarnation):
            pair = _Pair(KvLink(*key, transfer.shared_memory), 0, 0)
        span_ns = transfer.start_unix_ns, transfer.end_unix_ns
        short = any(self._waits_for_cpu(each, batch.covered_to_unix_ns) for each in key)
        awaited = _awaited_prompt(transfer, batch.chunk_tokens)
        moved = MovedKv(transfer.bytes, *span_ns, transfer.shared_memory, step_ns, short, awaited).beside(pair.moved)
        link, last = pair.link.moved(moved), (*pair.moved, moved)[-MAX_TOGETHER:]
        self._pairs[key] = _Pair(link, source or pair.source_incarnation, batch.incarnation, last)
        self._pairs.move_to_end(key)

    def ends(self) -> set[str]:
        """Return the workers at either end of a link."""
        return {worker_id for pair in self._pairs for worker_id in pair}

    def among(self, peers: Mapping[str, Peer], now_ns: int) -> list[KvLink]:
        """Return recently used links between processes that still run; `peers` holds the live workers by name."""
        found = []
        for key, pair in list(self._pairs.items()):
            one, other = map(peers.get, key)
            if one is None or other is None or not pair.is_between(one.incarnation, other.incarnation):
                continue
            placed = _placed(pair.link, one, other)
            if placed is not pair.link:  # cached, because it seldom changes and links are read several times a second
                self._pairs[key] = pair._replace(link=placed)
            if (link := placed.at(now_ns)) is not None:
                found.append(link)
        return found


def _awaited_prompt(transfer: KvTransfer, chunk_tokens: int) -> bool:
    """Return whether a transfer was slow mainly because its prompt was still being computed in several steps."""
    if transfer.named and not transfer.ready_ns:
        return True  # an older sender did not measure for how long its receiver waited
    whole_ns = transfer.end_unix_ns - transfer.start_unix_ns
    # KV of a single step arrives at once, before the receiver is notified that it is ready. A sender of named blocks
    # measures it.
    is_measured = transfer.named or 0 < chunk_tokens < transfer.prompt_tokens
    return is_measured and awaited_prompt(whole_ns, transfer.ready_ns)


def _placed(link: KvLink, source: Peer, target: Peer) -> KvLink:
    """Return the link with the model and node reported by its ends."""
    one_node = bool(source.node) and source.node == target.node
    if (link.model, link.one_node) == (target.model, one_node):
        return link
    return replace(link, model=target.model, one_node=one_node)


def _step_ns(batch: StepBatch) -> int:
    """Return the uncertainty of the durations of transfers in the batch (see `MovedKv.step_ns`)."""
    if batch.engine not in STEPWISE:
        return 0
    try:
        steps = step_rows(batch.steps)
    except ValueError:
        steps = []
    return max([IDLE_STEP_NS, *(each.end_unix_ns - each.start_unix_ns for each in steps if each.end_unix_ns)])


BUCKET_NS: Final = 10 * 1_000_000_000
BUCKETS: Final = 6
MAX_NODES: Final = 4096
"""The maximum number of nodes tracked at once. Further nodes are left out until another has been silent for a
minute.
"""


class Clocks:
    """The smallest delay of each node by interval of ten seconds."""

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
        """Return the lead of each node's clock over the median node's, for nodes seen in the last minute."""
        self._forget(now_ns // BUCKET_NS)
        least = {node: min(delays.values()) for node, delays in self._nodes.items()}
        middle_ns = round(median(least.values())) if least else 0
        return {node: middle_ns - delay_ns for node, delay_ns in least.items()}

    def _forget(self, bucket: int) -> None:
        self._nodes = {node: delays for node, delays in self._nodes.items() if max(delays) > bucket - BUCKETS}


# A worker's steps are judged over the last two seconds, or by the last two steps. Its waits for a CPU therefore rise
# quickly and are remembered as long as the steps that they slowed.
WAIT_RISES_NS: Final = 400_000_000
WAIT_FALLS_NS: Final = 2_000_000_000
CPU_WAIT_UNITS: Final = 1_000
"""Waits for a CPU are sent in thousandths of the time."""

_NO_WAIT: Final = (0.0, 0)


class CpuWaits:
    """The share of time that each worker waits for a CPU, as a running mean."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Pairs of (share, end of the newest batch) by worker."""

    def __len__(self) -> int:
        return len(self._known)

    def note(self, batch: StepBatch) -> None:
        """Record a worker's batch; one that is older than the known ones changes nothing."""
        self.add(batch.worker_id, batch.covered_from_unix_ns, batch.covered_to_unix_ns, batch.sched_delay_ns)

    def add(self, worker_id: str, start_ns: int, end_ns: int, waited_ns: int) -> None:
        """Record what a worker waited in [start, end); a span that ends before the known ones changes nothing."""
        span_ns = end_ns - start_ns
        mean, known_ns = self._known.get(worker_id, _NO_WAIT)
        if span_ns <= 0 or end_ns <= known_ns:
            return
        share = min(waited_ns / span_ns, 1.0)
        mean += (share - mean) * (1 - math.exp(-span_ns / (WAIT_RISES_NS if share > mean else WAIT_FALLS_NS)))
        put_newest(self._known, worker_id, (mean, end_ns), MAX_WORKERS)

    def put(self, worker_id: str, share: float, end_ns: int) -> None:
        """Record a share that another process has computed; an older share changes nothing."""
        if end_ns > self._known.get(worker_id, (0.0, 0))[1]:
            put_newest(self._known, worker_id, (share, end_ns), MAX_WORKERS)

    def share(self, worker_id: str, at_ns: int) -> float | None:
        """Return a worker's share at a moment; None if it reported none within `FRESH_NS` of it."""
        share, end_ns = self._known.get(worker_id, (0.0, 0))
        return share if abs(at_ns - end_ns) < FRESH_NS else None

    def are_long(self, worker_id: str, at_ns: int) -> bool:
        """Return whether a worker's waits may be the cause of its delays."""
        share = self.share(worker_id, at_ns)
        return share is not None and CPU_WAIT.grade(share) is not Grade.CLEAR


class NodeStats:
    """Clock offsets and hardware counters of all nodes, bytes of KV transfers, and workers' waits for a CPU."""

    def __init__(self, incarnation_of: IncarnationOf) -> None:
        self.clocks = Clocks()
        self.hardware = NodeGpus()
        self.kv_bytes: Counter[str] = Counter()
        """The bytes handed over between workers, by route: "shared_memory" or "network"."""
        self.cpu_waits = CpuWaits()
        self.kv_links = KvLinks(incarnation_of, self.cpu_waits.are_long)

    def note(self, nodes: Sequence[str], covered_to_ns: Sequence[int], arrived_ns: Sequence[int]) -> None:
        """Update clocks from the nodes of batches, the ends of their covers and their times of arrival."""
        delays_ns = np.array(arrived_ns, np.int64) - np.array(covered_to_ns, np.int64)
        # The index of the batch with the smallest delay, by node. The others arrived with it and add nothing.
        longest_first = np.argsort(-delays_ns, kind="stable").tolist()
        for node, place in {nodes[place]: place for place in longest_first}.items():
            self.clocks.note(node, covered_to_ns[place], arrived_ns[place])

    def add(self, batch: StepBatch) -> None:
        if batch.gpu_readings:
            self.hardware.add(batch)
        if batch.HasField("sched_delay_ns"):
            self.cpu_waits.note(batch)

    def note_arrivals(self, table: RelayTable, taken: Bools, arrived_ns: Ints) -> None:
        """Update clocks from the entries in `taken` of another process's report, given the arrival of each batch
        there.
        """
        for node, covered_to_ns, at_ns in table.soonest(taken, arrived_ns):
            self.clocks.note(node, covered_to_ns, at_ns)

    def note_waits(self, table: RelayTable, taken: Bools) -> None:
        """Copy the waits for a CPU from another process's report."""
        units = table.columns[WAITED]
        for place in np.flatnonzero(taken & (units > 0)).tolist():
            share = (int(units[place]) - 1) / CPU_WAIT_UNITS
            self.cpu_waits.put(table.worker_ids[place], share, int(table.columns[COVERED_TO, place]))

    def note_transfers(self, batches: Iterable[StepBatch]) -> None:
        """Count KV transfers; each is in exactly one batch."""
        for batch in batches:
            for transfer in batch.kv_transfers or ():  # iterating over an empty protobuf list is slow
                self.kv_bytes[way(shared_memory=transfer.shared_memory)] += transfer.bytes
            if batch.kv_transfers:
                self.kv_links.note(batch)
