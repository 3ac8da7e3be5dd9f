"""Demand from gateways' records, folded as it arrives and written every few seconds to a SQLite file.

The file keeps a month of fine bins and a year of coarse ones over restarts. Its only writer runs off the event loop. A
bin is one compressed row with the counts of each series that is not zero. The marks of the gateway records in the bins
are written in the same transaction. A restart therefore counts no record twice and loses none.
"""

import asyncio
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.bus.port import Record
from libs.contracts import metric_names as names
from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandTotals
from libs.contracts.ranges import MOST_INT64
from libs.demand.counts import NOTHING, OTHER, Counts, DemandKey
from libs.demand.history import FIELDS, DemandBins, Ints
from libs.demand.wire import BinDelta, Deltas, DemandFold, GatewayKey, Mark, mark_of
from libs.runtime.clock import Clock
from libs.runtime.paths import PRIVATE_FILE, PRIVATE_FOLDER

LAYOUT: Final = 1
FINE_S: Final = 60
COARSE_S: Final = 900
"""Lengths of bins, for a day of 86,400 s."""
FINE_BINS: Final = 30 * 1440
COARSE_BINS: Final = 400 * 96
TIMES: Final = COARSE_S // FINE_S
MAX_SERIES: Final = 256
"""The bound on combinations of model, class and tenant with rows of their own; further tenants count as `OTHER`."""
MAX_MARKS: Final = 256
MOST_IN_BIN: Final = 2**38
"""The bound on any count in a bin, over all gateways: 4.6 thousand million tokens a second. Higher counts are clipped.
Sums over all bins and series then fit an int64, however many gateways report the most that a record may hold.
"""
COMPRESSED_BYTES: Final = 200
"""The size of a row above which it is compressed."""
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS series (
  id INTEGER PRIMARY KEY, model TEXT NOT NULL, class TEXT NOT NULL, tenant TEXT NOT NULL,
  UNIQUE (model, class, tenant)
);
CREATE TABLE IF NOT EXISTS bins (
  tier INTEGER, number INTEGER, heard INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (tier, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unknown (
  tier INTEGER, number INTEGER, model TEXT, PRIMARY KEY (tier, number, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (gateway TEXT, incarnation INTEGER, at_ns INTEGER, data BLOB NOT NULL,
  PRIMARY KEY (gateway, incarnation)) WITHOUT ROWID;
"""
FINE, COARSE = range(2)


class DemandFile:
    """The demand file of one cluster; ":memory:" does not survive restarts."""

    def __init__(self, path: str, cluster: str) -> None:
        """Open the file. Raise StartupError if it is not writable, in use, or of another cluster."""
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
                Path(path).touch(mode=PRIVATE_FILE)
            self._database = sqlite3.connect(path, timeout=0, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(SCHEMA)
            with self._database as database:
                for name, value in (("layout", str(LAYOUT)), ("cluster", cluster)):
                    database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
            facts = dict(self._database.execute("SELECT name, value FROM facts").fetchall())
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"demand cannot be kept in {path} ({error}): move it away, or free it") from error
        if (facts["layout"], facts["cluster"]) != (str(LAYOUT), cluster):
            raise StartupError(f"{path} holds demand of cluster {facts['cluster']!r}, layout {facts['layout']}")
        rows = self._database.execute("SELECT id, model, class, tenant FROM series").fetchall()
        self._keys = {number: DemandKey(*names) for number, *names in rows}
        self._ids = {key: number for number, key in self._keys.items()}
        self._marked: dict[GatewayKey, int] = {}
        """The times of the marks that are written, by gateway."""

    def marks(self) -> dict[GatewayKey, Mark]:
        """Return, by gateway, the mark up to which its records are counted."""
        found = self._database.execute("SELECT gateway, incarnation, at_ns, data FROM marks ORDER BY at_ns").fetchall()
        return {(name, began): Mark(at_ns, _rows(msgspec.msgpack.decode(data))) for name, began, at_ns, data in found}

    def save(self, deltas: Deltas, marks: Mapping[GatewayKey, Mark]) -> None:
        """Add to bins, store the marks and delete old bins. Raise sqlite3.Error with nothing written."""
        known = dict(self._ids)
        try:
            with self._database as database:
                for number, delta in deltas.items():
                    self._add(FINE, number, delta)
                self._make_coarse({number // TIMES for number in deltas})
                self._forget()
                rows = [
                    (name, began, mark.at_ns, msgspec.msgpack.encode([[*key, *row] for key, row in mark.rows.items()]))
                    for (name, began), mark in marks.items()
                    if self._marked.get((name, began)) != mark.at_ns
                ]
                database.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?)", rows)
                database.execute(
                    "DELETE FROM marks WHERE at_ns < (SELECT min(at_ns) FROM "
                    "(SELECT at_ns FROM marks ORDER BY at_ns DESC LIMIT ?))",
                    (MAX_MARKS,),
                )
        except sqlite3.Error:
            self._ids = known
            self._keys = {number: key for key, number in known.items()}
            raise
        self._marked = {gateway: mark.at_ns for gateway, mark in marks.items()}

    def fill(self, rows: Mapping[int, Mapping[DemandKey, Counts]]) -> int:
        """Import fine bins where none are known and return the number taken."""
        taken = 0
        with self._database:
            query = "SELECT number FROM bins WHERE tier = ? AND heard"
            there = {number for (number,) in self._database.execute(query, (FINE,))}
            for number, counts in rows.items():
                if number not in there:
                    self._put(FINE, number, 1, {self._id(key): row for key, row in counts.items()})
                    taken += 1
            self._make_coarse({number // TIMES for number in rows})
            self._forget()
        return taken

    def read(self, tier: int, first: int, last: int, bin_ns: int) -> DemandBins:
        """Read the bins [first, last) of a tier whose bins are `bin_ns` long."""
        count = max(last - first, 0)
        covered = np.zeros(count, np.bool_)
        found: dict[DemandKey, Ints] = {}
        unknown: dict[str, NDArray[np.bool_]] = {}
        query = "SELECT number, heard, data FROM bins WHERE tier = ? AND number >= ? AND number < ?"
        for number, known, data in self._database.execute(query, (tier, first, last)):
            covered[number - first] = known > 0
            for series, *counts in _unpacked(data):
                key = self._keys.get(series)
                if key is None:
                    continue
                if key not in found:
                    found[key] = np.zeros((count, FIELDS), np.int64)
                found[key][number - first] = counts
        query = "SELECT number, model FROM unknown WHERE tier = ? AND number >= ? AND number < ?"
        for number, model in self._database.execute(query, (tier, first, last)):
            unknown.setdefault(model, np.zeros(count, np.bool_))[number - first] = True
        return DemandBins(bin_ns, first, covered, found, unknown)

    def span(self, tier: int) -> tuple[int, int] | None:
        """Return the first bin and one past the last; None if there is none."""
        query = "SELECT min(number), max(number) FROM bins WHERE tier = ?"
        low, high = self._database.execute(query, (tier,)).fetchone()
        return None if low is None else (low, high + 1)

    def close(self) -> None:
        self._database.close()

    def _add(self, tier: int, number: int, delta: BinDelta) -> None:
        covered, rows = self._get(tier, number)
        for key, counts in delta.rows.items():
            series = self._id(key)
            rows[series] = rows.get(series, NOTHING).plus(counts)
        self._put(tier, number, covered + delta.covered_ns, rows)
        self._database.executemany(
            "INSERT OR IGNORE INTO unknown VALUES (?, ?, ?)", [(tier, number, model) for model in delta.unknown]
        )

    def _make_coarse(self, numbers: Iterable[int]) -> None:
        """Sum fine bins into coarse ones. If half of the fine bins are known, they stand for the rest as well."""
        for number in numbers:
            covered, rows, others = 0, dict[int, Counts](), dict[int, Counts]()
            unknown = self._unknown(number)
            for fine in range(number * TIMES, (number + 1) * TIMES):
                known, parts = self._get(FINE, fine)
                covered += known > 0
                into = rows if known > 0 else others
                for series, counts in parts.items():
                    into[series] = into.get(series, NOTHING).plus(counts)
            is_covered = 2 * covered >= TIMES
            if is_covered:
                rows = {series: self._whole(series, counts, covered, unknown) for series, counts in rows.items()}
            else:
                rows |= {series: rows.get(series, NOTHING).plus(counts) for series, counts in others.items()}
            self._put(COARSE, number, int(is_covered), rows)
            masked = [(COARSE, number, model) for model, missing in unknown.items() if 2 * (covered - missing) < TIMES]
            self._database.execute("DELETE FROM unknown WHERE tier = ? AND number = ?", (COARSE, number))
            self._database.executemany("INSERT INTO unknown VALUES (?, ?, ?)", masked)

    def _whole(self, series: int, counts: Counts, covered: int, unknown: Mapping[str, int]) -> Counts:
        """Scale the counts of the known fine bins to the whole coarse bin."""
        key = self._keys.get(series)
        known = max(covered - (0 if key is None else unknown.get(key.model, 0)), 1)
        return Counts(*(each * TIMES // known for each in counts))

    def _unknown(self, number: int) -> dict[str, int]:
        """Return, by model, the number of a coarse bin's fine bins that are unknown."""
        query = "SELECT model, count(*) FROM unknown WHERE tier = ? AND number >= ? AND number < ? GROUP BY model"
        return dict(self._database.execute(query, (FINE, number * TIMES, (number + 1) * TIMES)).fetchall())

    def _get(self, tier: int, number: int) -> tuple[int, dict[int, Counts]]:
        query = "SELECT heard, data FROM bins WHERE tier = ? AND number = ?"
        found = self._database.execute(query, (tier, number)).fetchone()
        return (0, {}) if found is None else (found[0], {series: Counts(*row) for series, *row in _unpacked(found[1])})

    def _put(self, tier: int, number: int, covered: int, rows: Mapping[int, Counts]) -> None:
        cut = ((series, [min(max(each, 0), MOST_IN_BIN) for each in counts]) for series, counts in rows.items())
        kept = [[series, *counts] for series, counts in cut if any(counts)]
        data = msgspec.msgpack.encode(kept)
        if len(data) > COMPRESSED_BYTES:
            data = b"z" + zlib.compress(data, 1)
        self._database.execute(
            "INSERT OR REPLACE INTO bins VALUES (?, ?, ?, ?)", (tier, number, min(covered, MOST_INT64), data)
        )

    def _id(self, key: DemandKey) -> int:
        if key not in self._ids:
            if len(self._ids) >= MAX_SERIES:
                key = key._replace(tenant=OTHER)
            if key not in self._ids:
                if len(self._ids) >= 2 * MAX_SERIES:
                    key = DemandKey(OTHER, OTHER, OTHER)
                found = self._database.execute(
                    "INSERT INTO series (model, class, tenant) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET model = model"
                    " RETURNING id",
                    key,
                ).fetchone()
                self._ids[key] = int(found[0])
                self._keys[found[0]] = key
        number: int = self._ids[key]
        return number

    def _forget(self) -> None:
        for tier, kept in ((FINE, FINE_BINS), (COARSE, COARSE_BINS)):
            self._database.execute(
                "DELETE FROM bins WHERE tier = ? AND number < (SELECT max(number) FROM bins WHERE tier = ?) - ?",
                (tier, tier, kept - 1),
            )
            self._database.execute(
                "DELETE FROM unknown WHERE tier = ? AND number < (SELECT min(number) FROM bins WHERE tier = ?)",
                (tier, tier),
            )


def _unpacked(data: bytes) -> list[list[int]]:
    found: list[list[int]] = msgspec.msgpack.decode(zlib.decompress(data[1:]) if data[:1] == b"z" else data)
    return found


def _rows(packed: list[list[object]]) -> dict[DemandKey, Counts]:
    return {DemandKey(*map(str, names[:3])): Counts(*(int(str(each)) for each in names[3:])) for names in packed}


log = structlog.get_logger()

EVERY_S: Final = 5.0
AHEAD_NS: Final = 300_000_000_000
"""The furthest that a record may lie in the future. A later one comes from a wrong clock and is left out."""
DAY_S: Final = 86_400.0
Read = TypeVar("Read")


class DemandKeeper(Collector):
    """The only writer of a demand file."""

    def __init__(self, file: DemandFile, clock: Clock, day_s: float = DAY_S) -> None:
        """Open the keeper; a `day_s` below 86,400 shortens bins and seasons alike, to simulate a day in minutes."""
        self.bin_ns = round(FINE_S * 1e9 * day_s / DAY_S)
        self.speed = DAY_S / day_s
        """The speed of seasonal time relative to the clock."""
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

    def add(self, deltas: Deltas) -> None:
        """Enter counts of bins that no gateway's records contain."""
        self._fold.add(deltas)

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
        """Return the beginning of the kept demand, or None if there is none."""
        span = await self._in_turn(lambda: self._file.span(COARSE if coarse else FINE))
        return None if span is None else span[0] * (self.bin_ns * TIMES if coarse else self.bin_ns)

    @property
    def now_bin(self) -> int:
        """The current fine bin, which is not complete."""
        return self._clock.now_ns() // self.bin_ns

    async def fill(self, rows: Mapping[int, Mapping[DemandKey, Counts]]) -> int:
        """Import bins from elsewhere where none are known and return the number taken."""
        return await self._in_turn(lambda: self._file.fill(rows))

    async def close(self) -> None:
        """Write what is left and close the file."""
        await self.save()
        await asyncio.to_thread(self._file.close)

    async def _in_turn(self, work: Callable[[], Read]) -> Read:
        """Run `work` in a thread, one at a time, after writing what has changed so far.

        The work continues if its caller is cancelled.
        """
        return await asyncio.shield(self._turn(work))

    async def _turn(self, work: Callable[[], Read]) -> Read:
        async with self._lock:
            deltas, marks = self._fold.take_deltas(), self._fold.newest()
            error = await asyncio.to_thread(self._written, deltas, marks)
            if error is not None:
                self._fold.add(deltas)
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
        records = CounterMetricFamily(names.DEMAND_RECORDS_TOTAL, "Records of demand by outcome.", labels=("brought",))
        fold = self._fold
        for brought, count in (("news", fold.records), ("nothing", fold.known_records), ("future", self._ahead)):
            records.add_metric((brought,), count)
        yield records
        yield CounterMetricFamily(
            names.DEMAND_WRITE_FAILURES_TOTAL, "Times that demand could not be written to its file.", self._failures
        )
