"""Demand from gateways' records, folded as it arrives and written to the file every few seconds."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.bus.port import Record
from libs.contracts import metric_names as names
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandTotals
from libs.demand.counts import Counts, DemandKey
from libs.demand.fold import Deltas, DemandFold, GatewayKey, Mark
from libs.demand.history import DemandBins
from libs.demand.wire import mark_of
from libs.runtime.clock import Clock
from services.metrics.demand.file import COARSE, FINE, FINE_S, TIMES, DemandFile

log = structlog.get_logger()

EVERY_S: Final = 5.0
AHEAD_NS: Final = 300_000_000_000
"""The furthest that a record may lie in the future. A later one comes from a wrong clock and is left out."""
DAY_S: Final = 86_400.0
Read = TypeVar("Read")


class DemandKeeper(Collector):
    """The only writer of a demand file."""

    def __init__(self, file: DemandFile, clock: Clock, day_s: float = DAY_S) -> None:
        """Open the keeper; a `day_s` below 86,400 shortens bins and seasons alike, to try a day out in minutes."""
        self.bin_ns = round(FINE_S * 1e9 * day_s / DAY_S)
        self.speed = DAY_S / day_s
        """Factor by which time passes faster for seasons than by the clock."""
        self._file = file
        self._clock = clock
        self._fold = DemandFold(self.bin_ns, file.marks())
        self._lock = asyncio.Lock()
        self._failures = 0
        self._failing = False
        self._ahead = 0

    def take(self, record: Record, now_ns: int) -> None:
        """Record a value of the demand topic; records of other topics are ignored."""
        if isinstance(record.value, DemandTotals):
            gateway, mark = mark_of(record.value)
            if mark.at_ns > now_ns + AHEAD_NS:
                self._ahead += 1
            else:
                self._fold.take(gateway, mark)

    async def run(self) -> None:
        """Save what has changed every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write what has changed. After a failed write the changes stay in memory and are written the next time."""
        await self._in_turn(lambda: None)

    async def read(self, span_ns: int, *, coarse: bool = False) -> DemandBins:
        """Return the finished bins of the last `span_ns`, of a minute or of a quarter of an hour."""
        bin_ns = self.bin_ns * TIMES if coarse else self.bin_ns
        last = self._clock.now_ns() // bin_ns
        tier = COARSE if coarse else FINE
        return await self._in_turn(lambda: self._file.read(tier, last - span_ns // bin_ns, last, bin_ns))

    async def first_ns(self, *, coarse: bool = False) -> int | None:
        """Return the beginning of the kept demand; None if there is none."""
        span = await self._in_turn(lambda: self._file.span(COARSE if coarse else FINE))
        return None if span is None else span[0] * (self.bin_ns * TIMES if coarse else self.bin_ns)

    @property
    def now_bin(self) -> int:
        """The present fine bin, which is not over."""
        return self._clock.now_ns() // self.bin_ns

    async def fill(self, rows: Mapping[int, Mapping[DemandKey, Counts]]) -> int:
        """Import bins from elsewhere where none are known; return how many were taken."""
        return await self._in_turn(lambda: self._file.fill(rows))

    async def close(self) -> None:
        """Write what is left and close the file."""
        await self.save()
        await asyncio.to_thread(self._file.close)

    async def _in_turn(self, work: Callable[[], Read]) -> Read:
        """Run `work` in a thread, one at a time, after writing what has changed so far.

        It goes on when its caller is cancelled.
        """
        return await asyncio.shield(self._turn(work))

    async def _turn(self, work: Callable[[], Read]) -> Read:
        async with self._lock:
            deltas, marks = self._fold.take_deltas(), self._fold.newest()
            error = await asyncio.to_thread(self._written, deltas, marks)
            if error is not None:
                self._fold.give_back(deltas)
                self._failures += 1
                if not self._failing:
                    log.warning("demand cannot be written, trying again", problem=str(error))
            self._failing = error is not None
            return await asyncio.to_thread(work)

    def _written(self, deltas: Deltas, marks: Mapping[GatewayKey, Mark]) -> sqlite3.Error | None:
        try:
            if deltas:
                self._file.save(deltas, marks)
        except sqlite3.Error as error:
            return error
        return None

    def collect(self) -> Iterator[Metric]:
        records = CounterMetricFamily(
            names.DEMAND_RECORDS_TOTAL, "Records of demand, by what they brought.", labels=("brought",)
        )
        fold = self._fold
        for brought, count in (("news", fold.records), ("nothing", fold.known_records), ("future", self._ahead)):
            records.add_metric((brought,), count)
        yield records
        yield CounterMetricFamily(
            names.DEMAND_WRITE_FAILURES_TOTAL, "Times that demand could not be written to its file.", self._failures
        )
