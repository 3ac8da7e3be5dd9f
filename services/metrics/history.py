"""History kept over restarts: coarse windows of all workers in a SQLite file with one writer, off the event loop.

A window is one compressed row. It holds the length of the workers' names, the names (one a line), times [workers,
4] and roles. Where images were encoded, their time [workers] follows, which older releases do not read.
"""

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import ROLE_NAMES, role_from_name
from libs.runtime.paths import PRIVATE_FILE, PRIVATE_FOLDER
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.rollups import COVERED, NO_ROLE, RollUps, StoredWindow, Tier
from libs.telemetry.workers import Member, Members
from services.metrics.state import MetricsState

log = structlog.get_logger()

LAYOUT: Final = 1
COMPRESSION_LEVEL: Final = 1
SQLITE_MAGIC: Final = b"SQLite format 3\0"
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (
  id TEXT PRIMARY KEY, node TEXT NOT NULL, model TEXT NOT NULL, gpus INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS ranks (id TEXT PRIMARY KEY, data_group TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS windows (
  window_ns INTEGER, start_ns INTEGER, data BLOB NOT NULL, PRIMARY KEY (window_ns, start_ns)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class HistorySnapshot:
    """The content of one transaction, which is stored completely or not at all."""

    written_to_ns: int
    """The time up to which the rows are complete."""
    members: Sequence[Member]
    windows: Sequence[StoredWindow]


class HistoryFile:
    """The history file of one cluster. A damaged file, or one of another layout, is moved aside and replaced."""

    def __init__(self, path: Path, cluster: str, tiers: Sequence[Tier]) -> None:
        """Open the file. Raise StartupError if it is not writable, in use, or another cluster's."""
        self._path = path
        self._tiers = tiers
        self._members: set[str] = set()
        try:
            path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._database = self._open(cluster)
        except (OSError, sqlite3.OperationalError) as error:
            raise StartupError(
                f"FULCRUM_METRICS_HISTORY_FILE={path} cannot be used ({error}): it must be writable, and no other "
                "metrics service may have it open"
            ) from error

    def written_to_ns(self) -> int | None:
        """Return the end of the stored history; None for a new file."""
        found = self._fact("written_to_ns")
        return None if found is None else int(found)

    def members(self) -> list[Member]:
        """Return all members whose windows are stored."""
        rows = self._database.execute(
            "SELECT id, node, model, gpus, coalesce(data_group, '') FROM members LEFT JOIN ranks USING (id)"
        ).fetchall()
        self._members = {worker_id for worker_id, *_ in rows}
        return [Member(*row) for row in rows]

    def windows(self) -> Iterator[StoredWindow]:
        """Yield all stored windows, each tier's oldest first."""
        rows = self._database.execute("SELECT window_ns, start_ns, data FROM windows ORDER BY window_ns, start_ns")
        for window_ns, start_ns, data in rows:
            yield _decoded(window_ns, start_ns, data)

    def save(self, snapshot: HistorySnapshot) -> None:
        """Write a snapshot and delete what is older than roll-ups keep. Raise sqlite3.Error with nothing written."""
        with self._database as database:
            members = [(member.worker_id, member.node, member.model, member.gpus) for member in snapshot.members]
            database.executemany("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", members)
            ranks = [(member.worker_id, member.group) for member in snapshot.members if member.group]
            database.execute("DELETE FROM ranks")  # a separate table, so that older versions still read the file
            database.executemany("INSERT INTO ranks VALUES (?, ?)", ranks)
            known = {worker_id for worker_id, *_ in members}
            gone = [(worker_id,) for worker_id in self._members - known]
            database.executemany("DELETE FROM members WHERE id = ?", gone)
            database.executemany(
                "INSERT OR REPLACE INTO windows VALUES (?, ?, ?)",
                [(kept.window_ns, kept.start_ns, _encoded(kept)) for kept in snapshot.windows],
            )
            for tier in self._tiers:
                oldest_ns = snapshot.written_to_ns - tier.window_ns * tier.windows
                database.execute(
                    "DELETE FROM windows WHERE window_ns = ? AND start_ns < ?", (tier.window_ns, oldest_ns)
                )
            database.execute("INSERT OR REPLACE INTO facts VALUES ('written_to_ns', ?)", (str(snapshot.written_to_ns),))
        self._members = known

    def close(self) -> None:
        self._database.close()

    def _open(self, cluster: str) -> sqlite3.Connection:
        try:
            return self._opened(cluster)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            aside = self._path.with_name(f"{self._path.name}.unreadable-{int(time.time())}")
            log.warning("the history file was renamed, and history begins again", problem=str(error), aside=str(aside))
            self._path.rename(aside)
            for rest in ("-wal", "-shm"):
                self._path.with_name(self._path.name + rest).unlink(missing_ok=True)
            return self._opened(cluster)

    def _is_ours(self) -> bool:
        """Return whether the file is new or a database.

        A file that a setting names by mistake keeps its mode.
        """
        with self._path.open("rb") as file:
            return file.read(len(SQLITE_MAGIC)) in (b"", SQLITE_MAGIC)

    def _opened(self, cluster: str) -> sqlite3.Connection:
        self._path.touch(mode=PRIVATE_FILE)
        if self._is_ours():
            with suppress(PermissionError):  # another user's file, writable for this process
                self._path.chmod(PRIVATE_FILE)  # SQLite creates its side files with the same mode
        database = sqlite3.connect(self._path, timeout=0, check_same_thread=False)
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(SCHEMA)
            with database:
                database.execute("INSERT OR IGNORE INTO facts VALUES ('layout', ?)", (str(LAYOUT),))
                database.execute("INSERT OR IGNORE INTO facts VALUES ('cluster', ?)", (cluster,))
            self._check(dict(database.execute("SELECT name, value FROM facts").fetchall()), cluster)
        except BaseException:
            database.close()
            raise
        return database

    def _check(self, facts: dict[str, str], cluster: str) -> None:
        if facts["layout"] != str(LAYOUT):
            raise sqlite3.DatabaseError(f"its layout is {facts['layout']}, not {LAYOUT}")
        if facts["cluster"] != cluster:
            raise StartupError(
                f"FULCRUM_METRICS_HISTORY_FILE={self._path} is of cluster {facts['cluster']!r}, not {cluster!r}: "
                "name another file"
            )

    def _fact(self, name: str) -> str | None:
        with closing(self._database.execute("SELECT value FROM facts WHERE name = ?", (name,))) as found:
            row = found.fetchone()
        return None if row is None else str(row[0])


def _encoded(kept: StoredWindow) -> bytes:
    ids = "\n".join(kept.worker_ids).encode()
    data = len(ids).to_bytes(4, "little") + ids + kept.times_ns.astype("<i8").tobytes() + kept.roles.tobytes()
    if kept.encode_ns is not None and kept.encode_ns.any():
        data += kept.encode_ns.astype("<i8").tobytes()
    return zlib.compress(data, COMPRESSION_LEVEL)


def _decoded(window_ns: int, start_ns: int, data: bytes) -> StoredWindow:
    raw = zlib.decompress(data)
    times_at = 4 + int.from_bytes(raw[:4], "little")
    ids = raw[4:times_at].decode().split("\n") if times_at > 4 else []
    times = np.frombuffer(raw, "<i8", 4 * len(ids), times_at).reshape(len(ids), 4).astype(np.int64)
    roles = np.frombuffer(raw, np.uint8, len(ids), times_at + times.nbytes)
    encode_at = times_at + times.nbytes + roles.nbytes
    encode = np.frombuffer(raw, "<i8", len(ids), encode_at).astype(np.int64) if len(raw) > encode_at else None
    return StoredWindow(window_ns, start_ns, ids, times, roles, encode)


EVERY_S: Final = 5.0
UNSETTLED_NS: Final = 2_000_000_000
"""The newest windows are not written, since late telemetry still changes them. After a restart they are rebuilt from
the broker's records.
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
        """The time from which this run writes; earlier windows are in the file."""
        self._failures = 0
        self._failing = False
        self._writing: asyncio.Future[None] | None = None

    async def restore(self) -> int | None:
        """Restore the file's content; return the Unix ns from which to read telemetry, or None for a new file.

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

        A write continues in its thread if its caller is cancelled; the next write waits for it.
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
        await asyncio.wait([writing])  # cancelling this wait does not cancel the write
        if not isinstance(writing.exception(), sqlite3.Error):
            writing.result()

    def _written(self, changed: list[StoredWindow], writing: "asyncio.Future[None]") -> None:
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
        """Write the rest and close the file, once the history no longer changes."""
        await self.save()
        await asyncio.to_thread(self._file.close)

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(
            names.HISTORY_WRITE_FAILURES_TOTAL, "Times that history could not be written to its file.", self._failures
        )


def _missed(rollups: RollUps, members: Members, written_to_ns: int) -> Iterator[StepBatch]:
    """Yield a batch for each worker with the last window before `written_to_ns`, holding only its last report and
    role.

    A worker that left cleanly has no such window. For workers that left at that moment and for all live ones, the
    broker holds newer telemetry.
    """
    length_ns = rollups.tiers[1].window_ns
    end_ns = -(-written_to_ns // length_ns) * length_ns
    ids = rollups.present(length_ns, end_ns - length_ns, end_ns)
    series = rollups.read(length_ns, end_ns - LISTED_NS, end_ns, ids)
    for place, worker_id in enumerate(ids):
        covered_ns = series.times_ns[:, place, COVERED]
        covered, member = covered_ns.nonzero()[0], members.get(worker_id)
        if not len(covered) or member is None:
            continue
        last_covered_ns = int(series.starts_ns[covered[-1]] + covered_ns[covered[-1]])
        role, budget_tokens = role_from_name(ROLE_NAMES[int(series.roles[-1, place]) - NO_ROLE - 1], 1)
        yield StepBatch(
            worker_id=worker_id,
            node=member.node,
            gpus=member.gpus,
            assignment=Assignment(model=member.model, role=role, budget_tokens=budget_tokens),
            covered_from_unix_ns=last_covered_ns - 1,
            covered_to_unix_ns=last_covered_ns,
        )
