"""Entry of a gap's telemetry into the service's state. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.members import member_of
from libs.telemetry.worker.batch_columns import PrefillShares
from libs.telemetry.worker.timeline import BatchOutcome
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
    """Enter the part `own` of `batches`, the ordered batches of a chunk with its margins.

    Yields after each part of the work, for the event loop to take a turn. Run it to its end, once. Batches enter
    the live timelines as far as those reach back. Windows are computed by a separate fleet, which also holds
    workers' earlier incarnations and does not drop them for lack of room.
    """
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
