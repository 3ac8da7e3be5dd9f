"""Wire format of the windows and workers that instances exchange. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWindow, SharedWindows, SharedWorker, StepBatch
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import WrittenWindow
from libs.telemetry.windows.cells import PROVISIONAL, ROLE_NUMBERS
from libs.telemetry.windows.rollups import Written
from libs.telemetry.worker.phase_time import PhaseTime

MAX_WORKERS_A_RECORD: Final = 1_000
"""The most workers in a record, about 200 kB; Kafka takes records of 1 MB."""
MAX_WINDOWS_A_RECORD: Final = 20
"""The most windows in a record, 400 kB with that many workers."""
_ROLES: Final = frozenset(ROLE_NUMBERS.values())


def shared_worker(batch: StepBatch, arrived_ns: int, fleet: FleetTelemetry) -> SharedWorker:
    """Describe a worker by its newest batch, with what later batches do not repeat."""
    start_ns, share = fleet.running_step(batch.worker_id) or (0, 0)
    worker = SharedWorker(
        newest=batch,
        arrived_unix_ns=arrived_ns,
        last_step_end_unix_ns=fleet.last_step_end_ns(batch.worker_id),
        lost_batches=fleet.directory.lost_batches(batch.worker_id),
        running_step_unix_ns=start_ns,
        running_step_share=share,
    )
    for field in ("steps", "kv_waits", "starved", "kv_transfers"):
        worker.newest.ClearField(field)
    if worker.newest.HasField("dummy_steps"):  # clearing a field of an absent message would make it present
        worker.newest.dummy_steps.ClearField("spans")
    return worker


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


def written(window: SharedWindow, workers: Sequence[SharedWorker], window_ns: int) -> Iterable[Written]:
    """Yield the window of each worker. Raise ValueError for impossible values."""
    if window.start_unix_ns % window_ns:
        raise ValueError("no window begins there")
    times = zip(window.covered_ns, window.prefill_ns, window.decode_ns, window.kv_wait_ns, strict=True)
    for place, (covered, prefill, decode, kv_wait), marked in zip(window.workers, times, window.roles, strict=True):
        role = marked % PROVISIONAL
        if place >= len(workers) or role not in _ROLES or not prefill + decode + kv_wait <= covered <= window_ns:
            raise ValueError("windows that cannot be")
        time = PhaseTime(covered, prefill, decode, kv_wait, marked // PROVISIONAL == 1)
        yield Written(workers[place].newest.worker_id, time, role)
