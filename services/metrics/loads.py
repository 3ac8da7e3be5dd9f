"""Publication of workers' loads for planners, with each whole round of the stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ModelTarget
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.telemetry.fleet import FleetTelemetry, WrittenWindow
from libs.telemetry.fleet_loads import MAX_WINDOWS, LoadTeller

MAX_UNSENT: Final = 32
"""The most records that may wait for the broker before sending stops, as loads would arrive too old."""


class LoadPublisher:
    """The publisher of loads; windows written between two messages go with the next one."""

    def __init__(
        self,
        teller: LoadTeller,
        publish: Callable[[FleetLoads], None],
        unsent: Callable[[], int] = lambda: 0,
        tpot_ns: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Create a publisher; `unsent` counts records that wait for the broker, `tpot_ns` returns requests' usual
        targets by model.
        """
        self._teller = teller
        self._publish = publish
        self._unsent = unsent
        self._tpot_ns = tpot_ns
        self._written: list[WrittenWindow] = []
        self.works = False
        """Whether the last message held anything that runs, waits or was computed, so that planners want the next one
        soon.
        """

    def keep(self, written: Sequence[WrittenWindow]) -> None:
        """Add written windows of own workers to the next message."""
        self._written = [*self._written, *written][-2 * MAX_WINDOWS :]

    def tell(self, fleet: FleetTelemetry, now_ns: int) -> None:
        """Publish everything since the last call."""
        written, self._written = self._written, []
        if self._unsent() > MAX_UNSENT:
            return
        reported = self._teller.message(fleet, written, now_ns)
        self.works = reported is not None and reported.works
        if reported is not None:
            targets = self._tpot_ns().items()
            reported.message.targets.extend(ModelTarget(model=model, tpot_ns=each) for model, each in targets)
            self._publish(reported.message)
