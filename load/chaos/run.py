"""The run of one seed: a cluster, its clients and its faults, from the first request until everything is at rest."""

import asyncio
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent
from libs.contracts.topics import DECISIONS, REQUESTS
from load.chaos.clients import ClientCall, Outcome, check, draw, send
from load.chaos.cluster import CLUSTER, Cluster, Stores
from load.chaos.faults import CONTROL_WEIGHTS, WEIGHTS, Fault, FaultInjector, draw_schedule
from load.chaos.invariants import (
    METRICS,
    PLANNER,
    QUIET_S,
    missed_decisions,
    missed_time,
    unreported,
    unsettled,
    wrong_sums,
)
from load.chaos.loop import Node, SimLoop, current_node, replayable
from load.chaos.net import Log, Net

START_S = 3.0
_EVENTS = REQUESTS.name(CLUSTER)
# The virtual seconds after which a request counts as hanging.
ANSWER_S = 150.0
# The upper bound of the time to come to rest after all answers. Streams reconnect and leases end in it.
REST_S = 60.0
FIRST_ROLES = {"w0": "prefill", "w1": "prefill", "w2": "decode", "w3": "decode", "w4": "mixed"}
GATEWAYS = ("g0", "g1")


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run: the numbers of processes, requests and faults."""

    requests: int = 300
    per_s: float = 40.0
    fault_every_s: float = 0.25
    control_fault_every_s: float = 1.5

    @property
    def duration_s(self) -> float:
        """The seconds from the first request to the last."""
        return self.requests / self.per_s


@dataclass
class Result:
    seed: int
    digest: int = 0
    events: int = 0
    virtual_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reroutes: int = 0
    decisions: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The number of requests that got an answer or an error."""
        return sum(self.outcomes.values())


def run_seed(seed: int, plan: Plan, on_line: Callable[[str], None] | None = None) -> Result:
    """Run one seed. The same seed, plan and code give the same result, including the digest."""
    result = Result(seed)
    with replayable(seed) as loop:
        if on_line is not None:
            _log_to(on_line, loop)
        try:
            world = _World(loop, seed, plan, result, on_line)
            loop.set_exception_handler(world.unhandled)
            try:
                loop.run_until_complete(world.run())
            except Exception as error:  # a run that cannot continue is a finding
                result.wrong.append(f"the run ended with {error!r}")
            world.close()
        finally:
            loop.close()
    return result


class _World:
    def __init__(
        self, loop: SimLoop, seed: int, plan: Plan, result: Result, on_line: Callable[[str], None] | None
    ) -> None:
        self.loop, self.plan, self.result = loop, plan, result
        self.log = Log(loop, on_line)
        self.net = Net(loop, Random(f"{seed} network"), self.log)
        self.stores = Stores(loop, Random(f"{seed} stores"))
        self.cluster = Cluster(loop, self.net, self.stores, result.wrong)
        self.client = Node("client")
        self.asks = Random(f"{seed} requests")
        self.schedule = _draw(seed, plan)
        self.faults = FaultInjector(self.cluster, self.client, len(FIRST_ROLES))
        self.outcomes: list[Outcome] = []
        loop.add(self.client)

    async def run(self) -> None:
        for name in GATEWAYS:
            self.cluster.start_gateway(name)
        for name, role in FIRST_ROLES.items():
            self.cluster.start_worker(name, role)
        self.cluster.start_planner(PLANNER)
        self.cluster.start_metrics(METRICS)
        await asyncio.sleep(START_S)
        faults = self.loop.create_task(self.faults.run(self.schedule))
        requests = [self.loop.spawn(self.client, self._request(number)) for number in range(self.plan.requests)]
        adding_up = self.loop.create_task(self._add_up())
        _, hanging = await asyncio.wait(requests, timeout=ANSWER_S)
        for task in hanging:
            self.result.wrong.append("a request hangs")
            task.cancel()
        await faults
        adding_up.cancel()
        for task in requests:
            if task not in hanging and (error := task.exception()) is not None:
                self.result.wrong.append(f"a client failed: {error!r}")
        await self._rest()
        await self._quiet()
        self._check_events()
        await self._leave()
        result = self.result
        result.wrong += self.net.faults
        result.faults = self.faults.done
        result.digest, result.events, result.virtual_s = self.log.digest, self.log.events, self.loop.time()

    def unhandled(self, _loop: Any, context: dict[str, Any]) -> None:
        """Record an exception that no task awaited."""
        self.result.wrong.append(f"unhandled: {context['message']} {context.get('exception')!r}")

    def close(self) -> None:
        """End silently the tasks that dead processes and a failed run left."""
        wrong = list(self.result.wrong)
        self.cluster.bury(self.client)
        self.result.wrong = wrong

    # ------------------------------------------------------------ clients

    async def _request(self, number: int) -> None:
        ask = draw(number, self.asks)
        await asyncio.sleep(number / self.plan.per_s)
        outcome = await self._ask(ask)
        self.outcomes.append(outcome)
        self.result.outcomes[outcome.kind] += 1
        said = f"request {number} at {outcome.gateway}: {outcome.kind} {len(outcome.body)}"
        self.log.add(said, loud=outcome.kind not in ("ok", "left"))
        for fault in check(outcome):
            self.log.add(f"WRONG: request {number}: {fault}", loud=True)
            self.result.wrong.append(f"request {number} ({ask}): {fault}")

    async def _ask(self, ask: ClientCall) -> Outcome:
        """Send a request to one gateway, or to another if that is down, as a load balancer would."""
        while True:
            for name in sorted(GATEWAYS, key=lambda name: name != GATEWAYS[ask.number % len(GATEWAYS)]):
                process = self.cluster.processes.get(name)
                if process is not None and process.up and not process.node.frozen:
                    outcome = await send(self.net, self.client, name, ask)
                    if outcome is not None:
                        return outcome
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------ rest

    async def _rest(self) -> None:
        """Undo all faults, and wait until all counters have their values at rest."""
        self.stores.heal()
        self.net.slow_s.clear()
        for name in list(self.cluster.processes):
            self.cluster.thaw(name)
        deadline_s = self.loop.time() + REST_S
        while left := [*unsettled(self.cluster), *unreported(self.cluster)]:
            await asyncio.sleep(0.25)
            if self.loop.time() > deadline_s:
                break
        self.result.wrong += [f"at rest: {text}" for text in left]

    async def _quiet(self) -> None:
        """Check that planner and metrics lack nothing some time after the last fault."""
        await asyncio.sleep(QUIET_S)
        self.log.add(f"broker {self.stores.digest():08x}")
        self.result.decisions = len(self.stores.records(DECISIONS))
        for wrong in (*missed_decisions(self.cluster), *missed_time(self.cluster), *wrong_sums(self.cluster)):
            self.result.wrong.append(f"at rest: {wrong}")

    async def _add_up(self) -> None:
        """Check the sums of metrics once a second, during faults too."""
        while True:
            await asyncio.sleep(1.0)
            self.result.wrong += wrong_sums(self.cluster)

    def _check_events(self) -> None:
        """Check that each choice of each answered request has exactly one event."""
        lost = {RequestEvent.FromString(each.value).request_id for each in self.cluster.lost if each.topic == _EVENTS}
        events: dict[str, list[RequestEvent]] = {}
        for value in self.stores.records(REQUESTS):
            assert isinstance(value, RequestEvent)
            found = events.setdefault(value.request_id, [])
            if value not in found:  # an unconfirmed value was sent again
                found.append(value)
                self.result.reroutes += value.reroutes
        for outcome in self.outcomes:
            if outcome.kind != "ok":
                continue
            ask = outcome.ask
            for index in range(ask.n):
                request_id = f"request-{ask.number}" + (f"-{index}" if ask.n > 1 else "")
                found = events.get(request_id, [])
                if not found and request_id in lost:  # lost with a gateway that was killed while the broker was away
                    continue
                if [event.outcome for event in found] != [OUTCOME_OK]:
                    self.result.wrong.append(f"{request_id}: events {[event.outcome for event in found]}")
                elif found[0].output_tokens != ask.expected_tokens(index):
                    self.result.wrong.append(f"{request_id}: its event says {found[0].output_tokens} tokens")

    async def _leave(self) -> None:
        """Stop everything as SIGTERM does, and check that nothing is left."""
        for name in list(self.cluster.processes):
            self.cluster.stop(name)
        mains = [process.main for process in self.cluster.processes.values() if process.main is not None]
        if mains:
            _, left = await asyncio.wait(mains, timeout=60)
            self.result.wrong += [f"{task} does not stop" for task in left]
        if self.net.calls:
            self.result.wrong.append(
                f"{len(self.net.calls)} calls are left open: {[str(c) for c in self.net.calls][:5]}"
            )


def _draw(seed: int, plan: Plan) -> list[Fault]:
    """Draw the faults.

    Those of planner and metrics have their own seed, so that they do not change the other faults.
    """
    drawn = [
        *draw_schedule(WEIGHTS, Random(f"{seed} faults"), duration_s=plan.duration_s, every_s=plan.fault_every_s),
        *draw_schedule(
            CONTROL_WEIGHTS, Random(f"{seed} control"), duration_s=plan.duration_s, every_s=plan.control_fault_every_s
        ),
    ]
    return sorted(drawn, key=lambda fault: fault.at_s)


def _log_to(on_line: Callable[[str], None], loop: SimLoop) -> None:
    """Send the services' own log to `on_line`."""

    def write(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        words = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        on_line(f"{loop.time():.6f}   {current_node()}: {event['event']} {words}")
        raise structlog.DropEvent

    structlog.configure(processors=[write], cache_logger_on_first_use=False)
