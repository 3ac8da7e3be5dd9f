"""Persistence of history: restored from the file at the start, then written as it changes."""

import asyncio
import sqlite3
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import ROLE_NAMES, role_from_name
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.rollups import COVERED, NO_ROLE, KeptWindow, RollUps
from libs.telemetry.workers import Members
from services.metrics.history.file import HistoryFile, HistorySnapshot
from services.metrics.state import MetricsState

log = structlog.get_logger()

EVERY_S: Final = 5.0
UNSETTLED_NS: Final = 2_000_000_000
"""The newest windows are not written, as late telemetry still changes them. After a restart they are rebuilt from the
broker's records.
"""
OVERLAP_NS: Final = 10_000_000_000
"""The overlap with the file at which telemetry is read after a restart. It allows for steps that began earlier and for
clocks that differ.
"""


class HistoryKeeper(Collector):
    """The link between one service's history and its file."""

    def __init__(self, state: MetricsState, file: HistoryFile) -> None:
        self._state = state
        self._file = file
        self._from_ns = 0
        """Time from which this run writes; earlier windows are in the file."""
        self._failures = 0
        self._failing = False
        self._writing: asyncio.Future[None] | None = None

    async def restore(self) -> int | None:
        """Restore the file's content; return the Unix ns from which to read telemetry, None for a new file.

        Nothing else may use the state meanwhile.
        """
        written_to_ns = await asyncio.to_thread(self._restore)
        return None if written_to_ns is None else written_to_ns - OVERLAP_NS

    def _restore(self) -> int | None:
        written_to_ns = self._file.written_to_ns()
        if written_to_ns is not None:
            self._state.members.enter(self._file.members())
            for kept in self._file.windows():
                self._state.rollups.restore(kept)
            self._state.rollups.resume(written_to_ns)
            self._state.history.resume(written_to_ns)
            for batch in _missed(self._state.rollups, self._state.members, written_to_ns):
                self._state.fleet.expect(batch)
            self._from_ns = written_to_ns
        return written_to_ns

    async def run(self) -> None:
        """Save what has changed every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write what has changed. After a failed write the changes stay in memory and are written the next time.

        A write goes on in its thread when its caller is cancelled; the next one waits for it.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing])
        newest_ns = self._state.history.written_to_ns
        if newest_ns is None:
            return
        before_ns = max(newest_ns - UNSETTLED_NS, self._from_ns)
        changed = self._state.rollups.take_changed(before_ns)
        snapshot = HistorySnapshot(before_ns, self._state.members.all(), changed)
        writing = self._writing = asyncio.ensure_future(asyncio.to_thread(self._file.save, snapshot))
        writing.add_done_callback(partial(self._written, changed))
        await asyncio.wait([writing])  # unlike awaiting it, this does not cancel it
        if not isinstance(writing.exception(), sqlite3.Error):
            writing.result()

    def _written(self, changed: list[KeptWindow], writing: "asyncio.Future[None]") -> None:
        self._writing = None
        error = None if writing.cancelled() else writing.exception()
        if not isinstance(error, sqlite3.Error):
            self._failing = self._failing and error is not None
            return
        self._failures += 1
        if not self._failing:
            log.warning("history cannot be written, trying again", problem=str(error))
        self._failing = True
        self._state.rollups.give_back(changed)

    async def close(self) -> None:
        """Write the rest and close the file, once nothing changes the history any more."""
        await self.save()
        await asyncio.to_thread(self._file.close)

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(
            names.HISTORY_WRITE_FAILURES_TOTAL, "Times that history could not be written to its file.", self._failures
        )


def _missed(rollups: RollUps, members: Members, written_to_ns: int) -> Iterator[StepBatch]:
    """Yield a batch for each worker with the last window before `written_to_ns`, holding only its last report and
    role.

    A worker that left in good order has no such window. For one that left right then, and for all live ones, the
    broker's telemetry has more.
    """
    length_ns = rollups.tiers[1].window_ns
    end_ns = -(-written_to_ns // length_ns) * length_ns
    ids = rollups.present(length_ns, end_ns - length_ns, end_ns)
    series = rollups.read(length_ns, end_ns - LISTED_NS, end_ns, ids)
    for place, worker_id in enumerate(ids):
        covered_ns = series.times_ns[:, place, COVERED]
        heard, member = covered_ns.nonzero()[0], members.get(worker_id)
        if not len(heard) or member is None:
            continue
        heard_to_ns = int(series.starts_ns[heard[-1]] + covered_ns[heard[-1]])
        role, budget_tokens = role_from_name(ROLE_NAMES[int(series.roles[-1, place]) - NO_ROLE - 1], 1)
        yield StepBatch(
            worker_id=worker_id,
            node=member.node,
            gpus=member.gpus,
            assignment=Assignment(model=member.model, role=role, budget_tokens=budget_tokens),
            covered_from_unix_ns=heard_to_ns - 1,
            covered_to_unix_ns=heard_to_ns,
        )
