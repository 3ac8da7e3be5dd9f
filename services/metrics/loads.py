"""Tells planners what this service knows of workers, with each whole round of the stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ModelTarget
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.fleet_loads import MAX_WINDOWS, LoadTeller
from libs.telemetry.history import WrittenWindow

MAX_UNSENT: Final = 32
"""Records that the broker has not taken. With more nothing is sent: it would be old when it came."""


class LoadPublisher:
    """Windows that are written between two messages go with the next one."""

    def __init__(
        self,
        teller: LoadTeller,
        publish: Callable[[FleetLoads], None],
        unsent: Callable[[], int] = lambda: 0,
        tpot_ns: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`unsent` records wait to be taken by the broker. `tpot_ns`: the usual targets of requests, by model."""
        self._teller = teller
        self._publish = publish
        self._unsent = unsent
        self._tpot_ns = tpot_ns
        self._written: list[WrittenWindow] = []
        self.works = False
        """Whether the last message had anything that runs, waits or was computed: then planners want the next one
        soon."""

    def keep(self, written: Sequence[WrittenWindow]) -> None:
        """These were written of own workers."""
        self._written = [*self._written, *written][-2 * MAX_WINDOWS :]

    def tell(self, fleet: FleetTelemetry, now_ns: int) -> None:
        """All that has been written and said since the last call."""
        written, self._written = self._written, []
        if self._unsent() > MAX_UNSENT:
            return
        reported = self._teller.message(fleet, written, now_ns)
        self.works = reported is not None and reported.works
        if reported is not None:
            targets = self._tpot_ns().items()
            reported.message.targets.extend(ModelTarget(model=model, tpot_ns=each) for model, each in targets)
            self._publish(reported.message)
