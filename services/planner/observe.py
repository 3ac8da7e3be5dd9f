"""A registered worker with its telemetry, as it is shown. Pure."""

from dataclasses import dataclass

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load, Worker
from services.planner.inputs.fleet_view import COVERED, FleetView


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """`load` is None while its present incarnation has reported nothing."""

    worker: Worker
    load: Load | None
    coverage: float
    """Share of the window that its telemetry covers, 0..1."""


def observed_workers(view: FleetView, end_ns: int) -> list[ObservedWorker]:
    """Every registered worker, over the window that ends at `end_ns`."""
    covered_ns = view.times_ns(end_ns)[:, COVERED].tolist()
    return [
        ObservedWorker(worker, view.load(place), covered_ns[place] / view.window_ns)
        for place, worker in enumerate(view.roster.workers)
    ]
