"""Conversion of workers and windows to the messages that instances of the metrics service exchange, and back. Pure.

The form with columns costs a tenth of the older one, which has a message for each worker and serves instances of older
releases.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    SharedCells,
    SharedWindow,
    SharedWindows,
    SharedWorker,
    StepBatch,
)
from libs.telemetry.columns import Ints
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.fleet_loads import cpu_wait
from libs.telemetry.history import WrittenWindow
from libs.telemetry.relayed import COLUMNS, LOAD_FIELDS, Columns, shared_loads
from libs.telemetry.rollups import COVERED, DECODE, KV_WAIT, PREFILL, PROVISIONAL, ROLE_NUMBERS, Cells
from libs.telemetry.timeline import Timeline

MAX_WORKERS_A_RECORD: Final = 1_000
"""The maximum number of workers in a record, about 200 kB; Kafka takes records of 1 MB."""
MAX_WINDOWS_A_RECORD: Final = 20
"""The maximum number of windows in a record, 400 kB with that many workers."""
MAX_DESCRIBED: Final = 250
"""The maximum number of descriptions in a record, about 100 kB."""
DESCRIBED_IN: Final = 20
"""The number of records over which all workers' descriptions are sent in turn; they take two seconds."""
_ROLES: Final = list(ROLE_NUMBERS.values())
_TIMES: Final = ("covered_ns", "prefill_ns", "decode_ns", "kv_wait_ns")
_OF_CELLS: Final = attrgetter(*_TIMES)
_OF_BATCH: Final = attrgetter("covered_to_unix_ns", "dropped_batches", "dummy_steps.steps", "load")
_OF_LOAD: Final = attrgetter(*LOAD_FIELDS)


def shared_worker(batch: StepBatch, arrived_ns: int, fleet: FleetTelemetry, description: int = 0) -> SharedWorker:
    """Describe a worker by its newest batch, with what later batches do not repeat."""
    last_step_end_ns, start_ns, share, lost = _steps_of(batch.worker_id, fleet)
    worker = SharedWorker(
        newest=batch,
        arrived_unix_ns=arrived_ns,
        last_step_end_unix_ns=last_step_end_ns,
        lost_batches=lost,
        running_step_unix_ns=start_ns,
        running_step_share=share,
        description=description,
    )
    for field in ("steps", "kv_waits", "starved", "kv_transfers"):
        worker.newest.ClearField(field)
    if worker.newest.HasField("dummy_steps"):  # clearing a field of an absent message would make it present
        worker.newest.dummy_steps.ClearField("spans")
    return worker


def _steps_of(worker_id: str, fleet: FleetTelemetry) -> tuple[int, int, int, int]:
    """Return a worker's entries in the columns from `last_step_end_unix_ns` to `lost_batches`."""
    known = fleet.directory.newest(worker_id)
    if known is None:
        return 0, 0, 0, 0
    return known.last_step_end_ns, *(known.running_step or (0, 0)), known.lost_batches


class Report(NamedTuple):
    """A worker's newest batch with its arrival, and the number of the description that it belongs to."""

    worker_id: str
    batch: StepBatch
    arrived_ns: int
    description: int


def _columns_of(reports: Sequence[Report], fleet: FleetTelemetry) -> Columns:
    """Return the columns of workers in the order of `COLUMNS`."""
    count = len(reports)
    if not count:
        return np.zeros((len(COLUMNS), 0), np.uint64)
    worker_ids, batches, arrived_ns, descriptions = zip(*reports, strict=True)
    covered_to_ns, dropped, dummy_steps, loads = zip(*map(_OF_BATCH, batches), strict=True)
    steps = zip(*(_steps_of(worker_id, fleet) for worker_id in worker_ids), strict=True)
    waits = [cpu_wait(fleet, batch) for batch in batches] if len(fleet.cpu_waits) else [0] * count
    own = (descriptions, arrived_ns, covered_to_ns, *steps, dropped, dummy_steps, waits)
    found = np.zeros((len(COLUMNS), count), np.uint64)
    for column, entries in enumerate(own):
        found[column] = np.fromiter(entries, np.uint64, count)
    counts = np.fromiter(chain.from_iterable(map(_OF_LOAD, loads)), np.uint64, count * len(LOAD_FIELDS))
    found[len(own) :] = counts.reshape(count, len(LOAD_FIELDS)).T
    return found


class Descriptions:
    """The numbers of sent descriptions, which differ between all incarnations of an instance."""

    def __init__(self, began_ns: int) -> None:
        self._sent: dict[str, tuple[Timeline | None, int, int]] = {}
        """Each worker's timeline with its revision and the number of the description."""
        self._next = began_ns
        self._turn = 0

    def number(self, worker_id: str, timeline: Timeline | None) -> int:
        """Return the number of a worker's present description."""
        revision = -1 if timeline is None else timeline.revision
        known = self._sent.get(worker_id)
        if known is None or known[0] is not timeline or known[1] != revision:
            self._next += 1
            known = self._sent[worker_id] = timeline, revision, self._next
        return known[2]

    def to_describe(self, reports: Sequence[Report], before: int, *, everybody: bool) -> list[Report]:
        """Return the reports whose descriptions must be sent: all of them, or the new ones and the next few in turn.

        `before` is the value of `last` before these reports were numbered. GPU readings are sent once, with their
        report.
        """
        self._turn += 1
        turn = self._turn % DESCRIBED_IN
        return [
            each
            for place, each in enumerate(reports)
            if everybody or each.description > before or place % DESCRIBED_IN == turn or each.batch.gpu_readings
        ]

    @property
    def last(self) -> int:
        """The last number that was assigned."""
        return self._next

    def forget_all_but(self, worker_ids: AbstractSet[str]) -> None:
        if len(self._sent) > len(worker_ids):
            self._sent = {name: sent for name, sent in self._sent.items() if name in worker_ids}


def column_messages(
    reports: Sequence[Report], to_describe: Sequence[Report], windows: Sequence[WrittenWindow], fleet: FleetTelemetry
) -> Iterator[SharedWindows]:
    """Yield at least one message, with columns of all reports and the descriptions in `to_describe`."""
    described = {each.worker_id: each for each in to_describe}
    for part, first in enumerate(range(0, max(len(reports), 1), MAX_WORKERS_A_RECORD)):
        own = reports[first : first + MAX_WORKERS_A_RECORD]
        ids = [each.worker_id for each in own]
        places = {worker_id: place for place, worker_id in enumerate(ids)}
        wanted = [each for worker_id in ids if (each := described.get(worker_id)) is not None]
        cells = [found for window in windows if (found := _columns(window, places)) is not None]
        records = max(-(-len(wanted) // MAX_DESCRIBED), -(-len(cells) // MAX_WINDOWS_A_RECORD), 1)
        for number in range(records):
            # The loads follow in the last record, when all descriptions are known.
            loads = shared_loads(ids, _columns_of(own, fleet) if number == records - 1 else None, part)
            loads.windows.extend(cells[number * MAX_WINDOWS_A_RECORD : (number + 1) * MAX_WINDOWS_A_RECORD])
            sent = wanted[number * MAX_DESCRIBED : (number + 1) * MAX_DESCRIBED]
            workers = [shared_worker(each.batch, each.arrived_ns, fleet, each.description) for each in sent]
            yield SharedWindows(workers=workers, loads=loads)


def _columns(window: WrittenWindow, places: dict[str, int]) -> SharedCells | None:
    workers = window.workers.among(places)
    if not workers:
        return None
    times = workers.times_ns.astype("<u4").T
    encode = b"" if workers.encode_ns is None else workers.encode_ns.astype("<u4").tobytes()
    found = np.fromiter(map(places.__getitem__, workers.worker_ids), "<u4", len(workers))
    everybody = len(found) == len(places) and (found == np.arange(len(found))).all()
    return SharedCells(
        start_unix_ns=window.start_ns,
        workers=b"" if everybody else found.tobytes(),
        roles=workers.roles.tobytes(),
        encode_ns=encode,
        **dict(zip(_TIMES, (each.tobytes() for each in times), strict=True)),
    )


def messages(workers: Sequence[SharedWorker], windows: Sequence[WrittenWindow]) -> Iterator[SharedWindows]:
    """Yield as many messages as needed, at least one. The caller fills in the sender."""
    for first in range(0, max(len(workers), 1), MAX_WORKERS_A_RECORD):
        part = workers[first : first + MAX_WORKERS_A_RECORD]
        places = {worker.newest.worker_id: place for place, worker in enumerate(part)}
        shared = [each for each in (_shared(window, places) for window in windows) if each.workers]
        for start in range(0, max(len(shared), 1), MAX_WINDOWS_A_RECORD):
            yield SharedWindows(workers=part, windows=shared[start : start + MAX_WINDOWS_A_RECORD])


def _shared(window: WrittenWindow, places: dict[str, int]) -> SharedWindow:
    workers = window.workers.among(places)
    covered_ns, prefill_ns, decode_ns, kv_wait_ns = workers.times_ns.T.tolist()
    return SharedWindow(
        start_unix_ns=window.start_ns,
        workers=[places[worker_id] for worker_id in workers.worker_ids],
        covered_ns=covered_ns,
        prefill_ns=prefill_ns,
        decode_ns=decode_ns,
        kv_wait_ns=kv_wait_ns,
        roles=workers.roles.tolist(),
    )


def cells_of(window: SharedWindow, workers: Sequence[SharedWorker], window_ns: int) -> Cells:
    """Return a window's time of each worker. Raise ValueError for impossible values."""
    times = (window.covered_ns, window.prefill_ns, window.decode_ns, window.kv_wait_ns)
    columns = [np.fromiter(column, np.int64, len(column)) for column in (window.workers, *times, window.roles)]
    if window.start_unix_ns % window_ns:
        raise ValueError("no window begins there")
    return _checked([worker.newest.worker_id for worker in workers], columns[0], columns[1:5], columns[5], window_ns)


def cells_of_columns(window: SharedCells, worker_ids: Sequence[str], window_ns: int) -> Cells:
    """Return a window's time of each worker. Raise ValueError for impossible values."""
    if window.start_unix_ns % window_ns:
        raise ValueError("no window begins there")
    columns = [np.frombuffer(column, "<u4").astype(np.int64) for column in _OF_CELLS(window)]
    roles = np.frombuffer(window.roles, np.uint8).astype(np.int64)
    places = np.frombuffer(window.workers, "<u4").astype(np.int64) if window.workers else np.arange(len(worker_ids))
    # Older instances send none.
    encode = np.frombuffer(window.encode_ns, "<u4").astype(np.int64) if window.encode_ns else None
    return _checked(worker_ids, places, columns, roles, window_ns, encode_ns=encode)


def _checked(
    worker_ids: Sequence[str],
    places: Ints,
    times_ns: Sequence[Ints],
    roles: Ints,
    window_ns: int,
    *,
    encode_ns: Ints | None = None,
) -> Cells:
    further = () if encode_ns is None else (encode_ns,)
    if {len(column) for column in (*times_ns, roles, *further)} != {len(places)} or (places >= len(worker_ids)).any():
        raise ValueError("columns of different lengths, or of workers that are not named")
    times = np.stack(times_ns, axis=1)
    covered, spent = times[:, COVERED], times[:, [PREFILL, DECODE, KV_WAIT]].sum(axis=1)
    if not (np.isin(roles % PROVISIONAL, _ROLES) & (roles < 2 * PROVISIONAL)).all():
        raise ValueError("roles that do not exist")
    if ((spent > covered) | (covered > window_ns)).any():
        raise ValueError("more time than a window has")
    if encode_ns is not None and (encode_ns > times[:, PREFILL]).any():
        raise ValueError("more encode time than prefill time")
    return Cells([worker_ids[place] for place in places.tolist()], times, roles.astype(np.uint8), encode_ns)
