"""The demand of all observed servers: those that are scraped, Dynamo's workers, and engines with the plugin alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_name
from libs.contracts.step_row import step_rows
from libs.demand.wire import Deltas
from libs.observe.demand import GIVE_UP_NS, FleetDemand, KnownWork, StepCounter, count_steps
from libs.observe.fleet import MOST_SERVERS
from libs.runtime.clock import Clock


@dataclass(slots=True)
class _UnlistedEngine:
    """An engine that reports its steps and is on no list."""

    model: str
    received_ns: int
    incarnation: int
    counter: StepCounter = field(default_factory=StepCounter)


class ObservedDemand:
    """The demand of one fleet, in bins that a keeper of demand takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fleet: FleetDemand | None = None
        self._reporters: dict[str, _UnlistedEngine] = {}

    def begin(self, bin_ns: int) -> None:
        """Count from now on, in bins of this length."""
        self._fleet = FleetDemand(bin_ns, self._clock.now_ns())

    def enter(self, server: str, model: str, role: str, stretch: KnownWork | None) -> None:
        """Enter a server's demand over a stretch of time; `stretch` is None if the demand is unknown."""
        if self._fleet is not None and stretch is not None:
            self._fleet.enter(server, model, role, stretch)

    def report(self, batch: StepBatch) -> None:
        """Enter the steps of an engine whose /metrics is not scraped."""
        known = self._reporters.get(batch.worker_id)
        if known is None or known.incarnation != batch.incarnation:
            if known is None and len(self._reporters) >= MOST_SERVERS:
                return
            known = self._reporters[batch.worker_id] = _UnlistedEngine(batch.assignment.model, 0, batch.incarnation)
        known.received_ns = self._clock.now_ns()
        role = role_name(batch.assignment)
        count_steps(known.counter, step_rows(batch.steps), role, batch.chunk_tokens)
        stretch = known.counter.take(
            batch.covered_from_unix_ns, batch.covered_to_unix_ns, running=batch.load.running, waiting=batch.load.waiting
        )
        self.enter(batch.worker_id, batch.assignment.model, role, stretch)

    def take_deltas(self, listed: Mapping[str, str]) -> Deltas:
        """Return the finished bins; `listed` has the models of all listed servers."""
        if self._fleet is None:
            return {}
        now_ns = self._clock.now_ns()
        for name in [name for name, each in self._reporters.items() if now_ns > each.received_ns + GIVE_UP_NS]:
            del self._reporters[name]
        self._fleet.expect({**{name: each.model for name, each in self._reporters.items()}, **listed}, now_ns)
        return self._fleet.take_deltas(now_ns)
