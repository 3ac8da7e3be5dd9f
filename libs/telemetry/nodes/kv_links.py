"""Speeds of KV between pairs of workers, from the transfers that receivers report."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.contracts.step_row import step_rows
from libs.policy.metrics.kv_links import KvLink, MovedKv

MAX_LINKS: Final = 4_096
"""The most links that are kept; the one that has been idle longest is dropped."""
STEPWISE: Final = frozenset({"vllm"})
"""Engines that notice the arrival of KV only between their steps (libs/engine/vllm/scheduler.py)."""
IDLE_STEP_NS: Final = 2_000_000
"""Delay at which such an engine notices KV when idle: its loop sleeps 1 ms (vllm/v1/engine/core.py) and then polls its
processes.
"""

IncarnationOf = Callable[[str], int]
"""A function that returns the incarnation of a worker's process, 0 if unknown."""


class Peer(NamedTuple):
    model: str
    node: str
    incarnation: int


class _Pair(NamedTuple):
    """A link with the incarnations of the processes at its ends."""

    link: KvLink
    source_incarnation: int
    target_incarnation: int

    def is_between(self, source_incarnation: int, target_incarnation: int) -> bool:
        """Report whether both ends are still the same processes, as far as is known."""
        return _is_same(self.source_incarnation, source_incarnation) and _is_same(
            self.target_incarnation, target_incarnation
        )


def _is_same(known: int, now: int) -> bool:
    # An incarnation of 0 is unknown and matches any other.
    return known == now or not known or not now


class KvLinks:
    """The links to workers whose telemetry this process reads."""

    def __init__(self, incarnation_of: IncarnationOf = lambda _worker_id: 0) -> None:
        self._incarnation_of = incarnation_of
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()

    def note(self, batch: StepBatch) -> None:
        """Record the transfers that a receiver reports."""
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
        moved = MovedKv(transfer.bytes, *span_ns, transfer.shared_memory, step_ns)
        self._pairs[key] = _Pair(pair.link.moved(moved), source or pair.source_incarnation, batch.incarnation)
        self._pairs.move_to_end(key)

    def among(self, peers: Mapping[str, Peer], now_ns: int) -> list[KvLink]:
        """Return recently used links between processes that still run; `peers` holds the live workers by name."""
        found = []
        for key, pair in list(self._pairs.items()):
            one, other = map(peers.get, key)
            if one is None or other is None or not pair.is_between(one.incarnation, other.incarnation):
                continue
            placed = _placed(pair.link, one, other)
            if placed is not pair.link:  # cached, as it seldom changes and links are read several times a second
                self._pairs[key] = pair._replace(link=placed)
            if (link := placed.at(now_ns)) is not None:
                found.append(link)
        return found


def _placed(link: KvLink, source: Peer, target: Peer) -> KvLink:
    """Return the link with the model and node that its ends report."""
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
