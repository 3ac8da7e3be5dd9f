"""The message that a metrics service publishes about its workers ten times a second. Pure.

It holds the workers' loads, the windows that were written and, in turn, their step times. The planner bases decisions
on it without reading any steps.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads, LoadWindow, StepBatch, WorkerStepTime
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import WrittenWindow
from libs.telemetry.nodes import CPU_WAIT_UNITS
from libs.telemetry.rollups import DECODE, PREFILL

WINDOW_NS: Final = 100_000_000
"""The length of the windows in a message."""
MAX_WINDOWS: Final = 40
"""The maximum number of windows of one message. The newest are sent, since old revisions do not affect decisions."""
STEP_TIMES: Final = 100
"""The maximum number of step times of one message; those of more workers are sent in turn."""
MOST_COUNTED: Final = 2**49
"""The bound on any count that a worker reports. Sums over all workers then fit 64 bits."""
ENTRY_BYTES: Final = 8
COLUMNS: Final = (
    "incarnations",
    "covered_to_unix_ns",
    "epochs",
    "roles",
    "budget_tokens",
    "running",
    "waiting",
    "waiting_prefill_tokens",
    "awaiting_kv",
    "free_kv_blocks",
    "preemptions",
    "recomputed_tokens",
    "pool_faults",
    "images_used",
    "image_encode_ns",
    "waiting_encode_ns",
    "cpu_waits",
)
"""Fields of a message with one entry for each worker: 64-bit integers, little-endian."""
IMAGE_COLUMNS: Final = ("images_used", "image_encode_ns", "waiting_encode_ns")
"""Columns that are left out if all entries are zeros, for example without vision models."""
_OPTIONAL: Final = frozenset({"cpu_waits", *IMAGE_COLUMNS})
"""Columns that older metrics services leave out; read as zeros."""
_COUNTED_FROM: Final = COLUMNS.index("roles")
# attrgetter reads protobuf fields in C, several times faster than one by one. The order is that of `COLUMNS`.
_OF_BATCH: Final = attrgetter("incarnation", "covered_to_unix_ns", "assignment", "load")
_OF_ASSIGNMENT: Final = attrgetter("epoch", "role", "budget_tokens")
_OF_LOAD: Final = attrgetter(
    "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks", "preemptions",
    "recomputed_tokens", "pool_faults", "images_used", "image_encode_ns", "waiting_encode_ns",
)  # fmt: skip


class LoadMessage(NamedTuple):
    """A message, and whether it contains running, waiting or finished work."""

    message: FleetLoads
    works: bool


class LoadMessageBuilder:
    """The builder of one metrics service's load messages."""

    def __init__(self, metrics_id: str, incarnation: int) -> None:
        self._metrics_id = metrics_id
        self._incarnation = incarnation
        self._turn = 0
        """The index of the worker whose step time is sent next."""

    def message(self, fleet: FleetTelemetry, written: Sequence[WrittenWindow], now_ns: int) -> LoadMessage | None:
        """Build the message about the workers that this process reads; None without workers."""
        timelines = fleet.directory.timelines
        ids, newest = [], []
        for name in fleet.directory.listing(now_ns).own_ids:
            timeline = timelines.get(name)
            if timeline is not None and timeline.newest is not None:
                ids.append(name)
                newest.append(timeline.newest)
        if not ids:
            return None
        message = FleetLoads(
            metrics_id=self._metrics_id, incarnation=self._incarnation, told_unix_ns=now_ns, worker_ids=ids
        )
        reported = np.array([(*_row(batch), cpu_wait(fleet, batch)) for batch in newest], np.uint64)
        for name, column in zip(COLUMNS, reported.T, strict=True):
            if name not in IMAGE_COLUMNS or column.any():
                setattr(message, name, column.astype("<u8").tobytes())
        indices = {name: index for index, name in enumerate(ids)}
        windows = sorted(written, key=lambda window: window.start_ns)[-MAX_WINDOWS:]
        message.windows.extend(found for window in windows if (found := _window(window, ids, indices)) is not None)
        message.step_times.extend(self._step_times(newest))
        waits = reported[:, COLUMNS.index("running") : COLUMNS.index("free_kv_blocks")].any()
        ran = any(window.workers.times_ns[:, [PREFILL, DECODE]].any() for window in windows)
        return LoadMessage(message, bool(waits or ran))

    def _step_times(self, newest: Sequence[StepBatch]) -> Iterable[WorkerStepTime]:
        count = min(len(newest), STEP_TIMES)
        first = self._turn % len(newest)
        self._turn = first + count
        for number in range(first, first + count):
            index = number % len(newest)
            if newest[index].HasField("step_time"):
                yield WorkerStepTime(worker=index, step_time=newest[index].step_time)


def columns_of(message: FleetLoads, workers: int) -> NDArray[np.uint64]:
    """Return a message's columns as [columns, workers] in the order of `COLUMNS`.

    Raise ValueError for a column of another length.
    """
    absent = np.zeros(workers, np.uint64)
    columns = {name: getattr(message, name) for name in COLUMNS}
    found = np.array(
        [absent if name in _OPTIONAL and not column else _column(column, workers) for name, column in columns.items()],
        np.uint64,
    )
    np.minimum(found[_COUNTED_FROM:], np.uint64(MOST_COUNTED), out=found[_COUNTED_FROM:])
    return found


def window_of(window: LoadWindow, workers: int) -> tuple[int, NDArray[np.int64], NDArray[np.int32]]:
    """Return a window's start, the indices of its workers, and [workers, 3] covered, prefill and decode time in ns.

    Raise ValueError for a window that is out of bounds.
    """
    indices: NDArray[np.int64] = np.arange(workers, dtype=np.int64)
    if window.workers:
        numbers = _column(window.workers, len(window.workers) // ENTRY_BYTES)
        if (numbers >= np.uint64(workers)).any():
            raise ValueError("a window of workers that are not named")
        indices = numbers.astype(np.int64)
    columns = (window.covered_ns, window.prefill_ns, window.decode_ns)
    times = np.array([_column(each, len(indices)) for each in columns], np.uint64)
    if window.start_unix_ns % WINDOW_NS or (times > np.uint64(WINDOW_NS)).any():
        raise ValueError("no such window")
    return window.start_unix_ns, indices, times.T.astype(np.int32)


def _row(batch: StepBatch) -> tuple[int, ...]:
    incarnation, covered_to_ns, assignment, load = _OF_BATCH(batch)
    return incarnation, covered_to_ns, *_OF_ASSIGNMENT(assignment), *_OF_LOAD(load)


def cpu_wait(fleet: FleetTelemetry, batch: StepBatch) -> int:
    """Return a worker's share of time spent waiting for a CPU, in a message's units; 0 if unknown."""
    share = fleet.cpu_waits.share(batch.worker_id, batch.covered_to_unix_ns)
    return 0 if share is None else round(share * CPU_WAIT_UNITS) + 1


def _window(window: WrittenWindow, ids: Sequence[str], indices: dict[str, int]) -> LoadWindow | None:
    cells = window.workers
    message = LoadWindow(start_unix_ns=window.start_ns)
    if list(cells.worker_ids) != ids:
        cells = cells.among(indices)
        if not cells:
            return None
        message.workers = _bytes(np.array([indices[name] for name in cells.worker_ids], np.uint64))
    covered, prefill, decode, _ = cells.times_ns.T
    message.covered_ns, message.prefill_ns, message.decode_ns = _bytes(covered), _bytes(prefill), _bytes(decode)
    return message


def _column(data: bytes, entries: int) -> NDArray[np.uint64]:
    if len(data) != entries * ENTRY_BYTES:
        raise ValueError("columns of different lengths")
    return np.frombuffer(data, "<u8")


def _bytes(values: NDArray[Any]) -> bytes:
    return values.astype("<u8").tobytes()
