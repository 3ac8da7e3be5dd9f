"""Refill of the gaps that the live reader has jumped over, and the task that reads them."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import structlog

from libs.bus.clients import CONNECTION_ERRORS
from libs.bus.port import BackReader, Gap, Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import Topic
from libs.policy.reading import ChunkRead, GapChunk, Gaps, Stretch
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from libs.telemetry.columns import PrefillShares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.timeline import BatchOutcome
from libs.telemetry.workers import member_of
from services.metrics.state import MetricsState

ItemT = TypeVar("ItemT")
A_TURN: Final = 50
"""Batches entered in one turn of the event loop, a few ms."""
WORKERS_A_TURN: Final = 20
LONGEST_NS: Final = 600 * 1_000_000_000
"""The longest cover of a batch that is filled in; longer ones are left to the live reader's bounds."""


def fill(
    state: MetricsState,
    prefill_shares: PrefillShares,
    batches: Sequence[StepBatch],
    own: slice,
    now_ns: int,
) -> Iterator[None]:
    """Enter `batches[own]` into the state; the batches before and after them are only context.

    `batches` are in the order of their partition. The caller must exhaust the iterator, which yields after each part of
    the work so that the event loop can run. Batches enter the live timelines as far as the timelines reach back.
    """
    # A separate fleet computes the windows: it also holds earlier incarnations of workers.
    fleet = FleetTelemetry(prefill_shares)
    known: list[BatchOutcome] = []
    for part in _parts(batches, A_TURN):
        known += [fleet.add(batch, now_ns) for batch in part]
        yield
    seconds: dict[int, set[str]] = {}
    length_ns = state.history.filled_ns
    for pairs in _parts(list(zip(batches[own], known[own], strict=True)), A_TURN):
        for batch, counted in pairs:
            low_ns, high_ns = batch.covered_from_unix_ns, batch.covered_to_unix_ns
            taken = state.fleet.add_late(batch, now_ns)
            if taken is BatchOutcome.VOID and counted is BatchOutcome.COUNTED:
                state.fleet.add_late_transfers(batch)
            if taken is BatchOutcome.MALFORMED or high_ns - low_ns > LONGEST_NS:
                continue
            for start_ns in range(low_ns - low_ns % length_ns, high_ns, length_ns):
                seconds.setdefault(start_ns, set()).add(batch.worker_id)
        yield
    listed = fleet.directory.listing(now_ns).workers
    state.members.enter(member_of(each) for each in listed if state.members.get(each.worker_id) is None)
    for start_ns in sorted(seconds, reverse=True):
        for workers in _parts(sorted(seconds[start_ns]), WORKERS_A_TURN):
            state.history.fill(start_ns, workers, fleet)
            yield


def _parts(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    return (items[first : first + size] for first in range(0, len(items), size))


log = structlog.get_logger()

CPU_SHARE: Final = 0.2
"""The share of a core that filling gaps may take, since current telemetry has priority."""
LOOK_S: Final = 0.5
"""The interval between two checks for due gaps."""
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 10.0
Partition = tuple[Topic, int]
Connect = Callable[[], AbstractAsyncContextManager[BackReader]]


class Refill:
    """The link between the live reader's gaps and the state."""

    def __init__(
        self,
        state: MetricsState,
        gaps: Gaps[Partition],
        prefill_shares: PrefillShares,
        clock: Clock,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Create a refill; `thread_s` returns the CPU time of the calling thread."""
        self._state = state
        self._gaps = gaps
        self._prefill_shares = prefill_shares
        self._clock = clock
        self._thread_s = thread_s

    def note(self, gap: Gap) -> None:
        """Record a gap over which the live reader has jumped."""
        log.warning("reading current telemetry first and the skipped records afterwards", records=gap.end - gap.start)
        self._gaps.add(Stretch((gap.topic, gap.partition), gap.start, gap.end), self._clock.now_ns())

    async def run(self, connect: Connect) -> None:
        """Fill gaps as they come until cancelled, waiting out outages of the broker."""
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        while True:
            await asyncio.sleep(LOOK_S)
            if self._gaps.next(self._clock.now_ns()) is None:
                continue
            try:
                async with connect() as reader:
                    while chunk := self._gaps.next(self._clock.now_ns()):
                        await self._take(reader, chunk)
                        backoff.reset()
            except CONNECTION_ERRORS as error:
                wait_s = backoff.next_s()
                log.info("skipped telemetry cannot be read now", error=repr(error))
                await asyncio.sleep(wait_s)

    async def _take(self, reader: BackReader, chunk: GapChunk[Partition]) -> None:
        """Fill in one chunk, or report to the gaps that the chunk must be split differently."""
        gap, (topic, partition) = chunk.gap, chunk.gap.partition
        held = await reader.held(topic, partition)
        if held.start > gap.start:
            self._gaps.held_from(gap, held.start)
            return
        low, high = max(chunk.read_from, held.start), min(chunk.read_to, held.end)
        records = [record async for record in reader.between(topic, partition, low, high)]
        own = [record for record in records if chunk.start <= record.offset < chunk.end]
        if not own:
            self._gaps.filled(chunk, None)
            return
        read = ChunkRead(
            low=low,
            high=high,
            begins=low <= held.start,
            ends=high >= held.end,
            records=len(records),
            first_ns=_covered_to_ns(records[0]),
            own_first_ns=_covered_to_ns(own[0]),
            own_last_ns=_covered_to_ns(own[-1]),
            last_ns=_covered_to_ns(records[-1]),
        )
        if not self._gaps.suffices(chunk, read):
            return
        first = records.index(own[0])
        await self._enter(_batches(records), slice(first, first + len(own)))
        self._gaps.filled(chunk, _covered_to_ns(own[0]))

    async def _enter(self, batches: list[StepBatch], own: slice) -> None:
        work: Iterator[None] = fill(self._state, self._prefill_shares, batches, own, self._clock.now_ns())
        while True:
            began_s = self._thread_s()
            if next(work, _DONE) is _DONE:
                return
            spent_s = self._thread_s() - began_s
            await asyncio.sleep(spent_s * (1 / CPU_SHARE - 1))


_DONE: Final = object()


def _covered_to_ns(record: Record) -> int:
    assert isinstance(record.value, StepBatch)
    return record.value.covered_to_unix_ns


def _batches(records: list[Record]) -> list[StepBatch]:
    return [record.value for record in records if isinstance(record.value, StepBatch)]
