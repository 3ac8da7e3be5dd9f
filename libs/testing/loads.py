"""Loads as a metrics service would tell them, made of workers' telemetry at once."""

from collections.abc import Iterable

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads, StepBatch
from libs.telemetry.fleet import Fleet
from libs.telemetry.fleet_loads import WINDOW_NS, LoadTeller
from libs.telemetry.history import WrittenWindow
from libs.telemetry.worker.split import prefill_shares

SPAN_NS = 3_000_000_000
"""How far back each message has windows."""


class Telling:
    """A metrics service without its history: what workers tell goes in, what planners hear comes out."""

    def __init__(self, metrics_id: str = "metrics") -> None:
        self.fleet = Fleet(prefill_shares)
        self._teller = LoadTeller(metrics_id, incarnation=1)

    def loads(self, batches: Iterable[StepBatch], now_ns: int) -> FleetLoads:
        """What is sent at `now_ns`, after these batches have come."""
        for batch in batches:
            self.fleet.add(batch, now_ns)
        ids = self.fleet.directory.listing(now_ns).own_ids
        end_ns = now_ns // WINDOW_NS * WINDOW_NS
        written = [
            WrittenWindow(start_ns, self.fleet.cells(ids, start_ns, start_ns + WINDOW_NS), revised=False)
            for start_ns in range(end_ns - SPAN_NS, end_ns, WINDOW_NS)
        ]
        reported = self._teller.message(self.fleet, written, now_ns)
        return reported.message if reported is not None else FleetLoads(metrics_id="metrics", told_unix_ns=now_ns)
