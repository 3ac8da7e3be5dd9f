"""Workers whose telemetry another process reads, as that process reports them. Pure.

A report comes worker by worker, or as columns of many workers beside descriptions that are sent only when they change.
New columns replace earlier ones in one step, and nothing is built for a worker until it is read.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedLoads, SharedWorker, StepBatch
from libs.contracts.step_row import ENTRY_BYTES
from libs.telemetry.columns import INT64_END, Bools, Ints
from libs.telemetry.steps import FULL_SHARE, RunningStep
from libs.telemetry.workers import MOST_COUNTED, REPORTED, WorkerFacts, facts_of, reported_compute

LOAD_FIELDS: Final = tuple(Load.DESCRIPTOR.fields_by_name)
COLUMNS: Final = (
    "descriptions",
    "arrived_unix_ns",
    "covered_to_unix_ns",
    "last_step_end_unix_ns",
    "running_step_unix_ns",
    "running_step_share",
    "lost_batches",
    "dropped_batches",
    "dummy_steps",
    "cpu_waits",
    *LOAD_FIELDS,
)
"""Fields of `SharedLoads` with one entry for each worker."""
(
    DESCRIPTION, ARRIVED, COVERED_TO, LAST_STEP_END, RUNNING_STEP, RUNNING_SHARE, LOST, DROPPED, DUMMY_STEPS, WAITED,
) = range(len(COLUMNS) - len(LOAD_FIELDS))  # fmt: skip
FIRST_LOAD: Final = len(COLUMNS) - len(LOAD_FIELDS)
_REPORTED: Final = [COLUMNS.index(name) for name in REPORTED]
Columns = NDArray[np.uint64]
"""[columns, workers] uint64 in the order of `COLUMNS`."""


def _most() -> NDArray[np.uint64]:
    """Return the largest valid entry of each column."""
    own = dict.fromkeys(COLUMNS, MOST_COUNTED)
    own |= {name: INT64_END - 1 for name in COLUMNS if name.endswith("_unix_ns") or name == "descriptions"}
    own |= {field.name: 2**32 - 1 for field in Load.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_UINT32} | {
        "running_step_share": FULL_SHARE
    }
    return np.array([own[name] for name in COLUMNS], np.uint64)


_MOST: Final = _most()


def shared_loads(worker_ids: Sequence[str], columns: Columns | None, part: int) -> SharedLoads:
    """Build the message about workers; without `columns` it only names them."""
    message = SharedLoads(worker_ids=worker_ids, part=part)
    if columns is not None:
        # One worker's impossible count must not make the columns of all of them invalid.
        for name, column in zip(COLUMNS, np.minimum(columns, _MOST[:, None]), strict=True):
            if column.any():
                setattr(message, name, column.astype("<u8").tobytes())
    return message


def columns_of(loads: SharedLoads) -> Columns:
    """Return the columns of a report. Raise ValueError for a wrong length or values out of range."""
    workers = len(loads.worker_ids)
    found = np.zeros((len(COLUMNS), workers), np.uint64)
    for number, name in enumerate(COLUMNS):
        column = getattr(loads, name)
        if not column:
            continue
        if len(column) != workers * ENTRY_BYTES:
            raise ValueError(f"{name}: {len(column)} bytes for {workers} workers")
        found[number] = np.frombuffer(column, "<u8")
    if (found > _MOST[:, None]).any():
        raise ValueError("values out of range")
    return found


@dataclass(frozen=True, slots=True)
class Relayed:
    """A worker whose telemetry another process reads, reported individually."""

    facts: WorkerFacts
    last_step_end_ns: int
    lost_batches: int
    running_step: RunningStep | None
    reader: str = ""
    """The name of the process that reads the worker's telemetry."""

    @property
    def incarnation(self) -> int:
        return self.facts.incarnation

    @property
    def covered_to_ns(self) -> int:
        return self.facts.covered_to_unix_ns

    def detach(self) -> None:
        """Do nothing, since no later report changes this one."""


def relayed_of(worker: SharedWorker, reader: str) -> Relayed:
    """Build the entry of a worker that the process `reader` reports."""
    batch = worker.newest
    facts = facts_of(batch, reported_compute(batch))
    running = _running_step(worker.running_step_unix_ns, worker.running_step_share, batch.covered_to_unix_ns)
    return Relayed(facts, worker.last_step_end_unix_ns, worker.lost_batches, running, reader)


def _running_step(start_ns: int, share: int, covered_to_ns: int) -> RunningStep | None:
    return (start_ns, min(share, FULL_SHARE)) if 0 < start_ns <= covered_to_ns else None


class RelayedRow:
    """A worker of a `RelayTable`. It shows the table's newest columns until it is frozen."""

    __slots__ = ("_columns", "_described", "_facts", "_facts_from", "_place", "_table", "reader")

    def __init__(self, table: "RelayTable", place: int, described: WorkerFacts) -> None:
        self.reader = table.reader
        self._table: RelayTable | None = table
        self._columns = table.columns
        """The columns that count once the table has dropped the worker."""
        self._place = place
        self._described = described
        self._facts: WorkerFacts | None = None
        self._facts_from: Columns | None = None

    @property
    def entry(self) -> tuple[Columns, int]:
        """The columns with the worker's report, and its index there."""
        return (self._columns if self._table is None else self._table.columns), self._place

    @property
    def facts(self) -> WorkerFacts:
        columns, place = self.entry
        if self._facts is None or self._facts_from is not columns:
            values = columns[:, place].tolist()
            self._facts_from = columns
            self._facts = self._described._replace(
                load=Load(
                    **{name: count for name, count in zip(LOAD_FIELDS, values[FIRST_LOAD:], strict=True) if count}
                ),
                covered_to_unix_ns=values[COVERED_TO],
                dropped_batches=values[DROPPED],
                dummy_steps=values[DUMMY_STEPS],
            )
        return self._facts

    @property
    def incarnation(self) -> int:
        return self._described.incarnation

    @property
    def covered_to_ns(self) -> int:
        return self._value(COVERED_TO)

    @property
    def last_step_end_ns(self) -> int:
        return self._value(LAST_STEP_END)

    @property
    def lost_batches(self) -> int:
        return self._value(LOST)

    @property
    def running_step(self) -> RunningStep | None:
        return _running_step(self._value(RUNNING_STEP), self._value(RUNNING_SHARE), self._value(COVERED_TO))

    def _value(self, column: int) -> int:
        columns, place = self.entry
        return int(columns[column, place])

    def describe(self, described: WorkerFacts) -> None:
        self._described, self._facts = described, None

    def move(self, place: int) -> None:
        """Update the worker's index after the table was reordered."""
        self._place, self._facts = place, None

    def freeze(self) -> None:
        """Keep the present values, because the table no longer has the worker."""
        if self._table is not None:
            self._columns, self._place, self._table = self._table.columns[:, [self._place]], 0, None

    def detach(self) -> None:
        """Stop following the table, because another source covers more of the worker's time."""
        if self._table is not None:
            table, place = self._table, self._place
            self.freeze()
            table.give_up(place)


def reported_by(rows: Sequence[RelayedRow]) -> Columns:
    """Return [workers, `REPORTED`] of many entries, read table by table."""
    found = np.zeros((len(rows), len(REPORTED)), np.uint64)
    by_columns: dict[int, tuple[Columns, list[int], list[int]]] = {}
    for number, row in enumerate(rows):
        columns, place = row.entry
        _, numbers, places = by_columns.setdefault(id(columns), (columns, [], []))
        numbers.append(number)
        places.append(place)
    for columns, numbers, places in by_columns.values():
        found[numbers] = columns[np.ix_(_REPORTED, places)].T
    return found


class RelayTable:
    """One part of the workers that another process reads, in the order of its last report."""

    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.worker_ids: list[str] = []
        self.known_ids: frozenset[str] = frozenset()
        self.columns: Columns = np.zeros((len(COLUMNS), 0), np.uint64)
        """The newest columns; an array is never changed once it is stored here."""
        self._places: dict[str, int] = {}
        self._numbers = np.zeros(0, np.uint64)
        """The known number of each worker's description; 0 for none."""
        self._described: list[WorkerFacts | None] = []
        self._rows: list[RelayedRow | None] = []
        """The entries that follow this table; None for workers of which another source covers more."""
        self._attached = np.zeros(0, np.bool_)
        self._nodes: tuple[list[str], Ints] | None = None
        """Names of nodes, and the index of each worker's; None until computed."""

    def enrol(self, worker_ids: list[str]) -> None:
        """Set the table's workers, keeping the facts about those that it had.

        Raise ValueError for an empty id or a duplicate.
        """
        if worker_ids == self.worker_ids:
            return
        if len({*worker_ids, ""}) <= len(worker_ids):
            raise ValueError("an empty id, or one that comes twice")
        before = [self._places.get(worker_id, -1) for worker_id in worker_ids]
        had = np.array(before, np.int64)
        columns, numbers = np.zeros((len(COLUMNS), len(had)), np.uint64), np.zeros(len(had), np.uint64)
        columns[:, had >= 0], numbers[had >= 0] = self.columns[:, had[had >= 0]], self._numbers[had[had >= 0]]
        rows = [None if place < 0 else self._rows[place] for place in before]
        staying = {*before}
        for place, row in enumerate(self._rows):
            if row is not None and place not in staying:
                row.freeze()
        for place, row in enumerate(rows):
            if row is not None:
                row.move(place)
        self._described = [None if place < 0 else self._described[place] for place in before]
        self.columns, self._numbers, self._rows, self._nodes = columns, numbers, rows, None
        self._attached = np.array([row is not None for row in rows], np.bool_)
        self.worker_ids, self.known_ids = worker_ids, frozenset(worker_ids)
        self._places = {worker_id: place for place, worker_id in enumerate(worker_ids)}

    def describe(self, worker: SharedWorker) -> bool:
        """Record a worker's description; return whether it is new."""
        place = self._places.get(worker.newest.worker_id)
        if place is None or int(self._numbers[place]) == worker.description:
            return False
        batch = StepBatch()
        batch.CopyFrom(worker.newest)  # copied, because a submessage keeps its whole record in memory
        described = facts_of(batch, reported_compute(batch))
        self._numbers[place], self._described[place], self._nodes = worker.description, described, None
        row = self._rows[place]
        if row is not None:
            row.describe(described)
        return True

    def newer(self, columns: Columns) -> Bools:
        """Return a mask of the workers with a known description whose entry covers no less than the current one."""
        known = (columns[DESCRIPTION] == self._numbers) & (self._numbers > 0)
        fits: Bools = known & (columns[COVERED_TO] >= self.columns[COVERED_TO])
        return fits

    def contested(self, taken: Bools, own: AbstractSet[str]) -> list[int]:
        """Return the indices in `taken` of workers that do not follow this table or are in `own`."""
        doubtful = taken & ~self._attached
        for worker_id in own & self.known_ids:
            doubtful[self._places[worker_id]] = taken[self._places[worker_id]]
        found: list[int] = np.flatnonzero(doubtful).tolist()
        return found

    def take(self, columns: Columns, taken: Bools) -> None:
        """Make these the newest columns, except for workers that are not in `taken`."""
        if not taken.all():
            columns[:, ~taken] = self.columns[:, ~taken]
        self.columns = columns

    def attach(self, place: int) -> RelayedRow:
        """Return the entry of a worker, which follows this table from now on."""
        row, described = self._rows[place], self._described[place]
        if row is None:
            assert described is not None  # `newer` returned true
            row = self._rows[place] = RelayedRow(self, place, described)
            self._attached[place] = True
        return row

    def give_up(self, place: int) -> None:
        self._rows[place] = None
        self._attached[place] = False

    def soonest(self, taken: Bools, arrived_ns: Ints) -> Iterator[tuple[str, int, int]]:
        """Yield (node, end of cover, arrival) for each node in `taken`, of its entry with the smallest delay."""
        names, of = self._node_indices()
        places = np.flatnonzero(taken)
        covered_ns = self.columns[COVERED_TO, places].astype(np.int64)
        order = np.lexsort((arrived_ns[places] - covered_ns, of[places]))
        nodes, first = np.unique(of[places[order]], return_index=True)
        for node, place in zip(nodes.tolist(), order[first].tolist(), strict=True):
            yield names[node], int(covered_ns[place]), int(arrived_ns[places[place]])

    def _node_indices(self) -> tuple[list[str], Ints]:
        if self._nodes is None:
            nodes = ["" if described is None else described.node for described in self._described]
            names = sorted({*nodes})
            numbers = {name: number for number, name in enumerate(names)}
            self._nodes = names, np.array([numbers[node] for node in nodes], np.int64)
        return self._nodes
