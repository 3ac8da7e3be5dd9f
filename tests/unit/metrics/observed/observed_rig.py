"""A metrics service over fake servers in virtual time."""

from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from libs.bus.port import BusStats, Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import Topic
from libs.observe.fleet import ObservedTarget
from libs.policy.verdict.state import VerdictLimits
from libs.telemetry.columns import prefill_shares
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.observed.run import ObservedFleet, PodServers
from services.metrics.observed.server import ServerState
from services.metrics.observed.traffic import ObservedTraffic
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import ClusterStatus, status_now
from tests.observe_rig import FakeVllm, Load

BEGAN_NS = 1_800_000_000 * 10**9
SECOND_NS = 10**9
LAG_NS = 700_000_000
BUSY = Load(decoding=24, prompts_per_s=1)


class _Bus:
    """A bus that delivers at once to the service's own handlers."""

    def __init__(self) -> None:
        self.takers: list[object] = []
        self.batches: list[StepBatch] = []
        self.now_ns = BEGAN_NS

    def publish(self, topic: Topic, value: Message) -> None:
        if isinstance(value, StepBatch):
            self.batches.append(value)
        for take in self.takers:
            take(Record(topic, "", value, 0, 0), self.now_ns)  # type: ignore[operator]

    def stats(self) -> BusStats:
        return BusStats(0, 0, 0)


class Observed:
    """A metrics service over fake servers, whose clock a test moves."""

    def __init__(self, roles: Mapping[str, str], tpot_ms: float = 100.0, pods: PodServers | None = None) -> None:
        self.bus = _Bus()
        self.fakes = {name: FakeVllm(now_s=lambda: self.bus.now_ns / 1e9) for name in roles}
        targets = [ObservedTarget(f"http://{name}:1", name, role) for name, role in roles.items()]
        traffic = ObservedTraffic(ttft_limit_ns=5 * SECOND_NS, tpot_ns=round(tpot_ms * 1e6))
        self.fleet = ObservedFleet(targets, self.bus, self, traffic, every_ms=500, pods=pods)  # type: ignore[arg-type]
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()), observes=True)
        self.verdicts = VerdictEvaluator(
            self.state, VerdictLimits(), ttft_limit_ns=5 * SECOND_NS, tpot_ns=round(tpot_ms * 1e6), lag_ns=LAG_NS,
            observed=self.fleet,
        )  # fmt: skip
        self.alerts = AlertEvaluator(self.state, MetricsSettings().alert_limits(), lag_ns=LAG_NS)
        self.bus.takers = [self.state.take, self.verdicts.take]
        self.away: set[str] = set()

    def now_ns(self) -> int:
        return self.bus.now_ns

    def set_role(self, name: str, role: str) -> None:
        """Change a server's role, as a newly read list does."""
        server = self.fleet.server(name)
        server.target = replace(server.target, role=role)

    async def run(self, seconds: float) -> ClusterStatus:
        """Scrape all servers twice a second, and return the status at the end."""
        for _ in range(round(2 * seconds)):
            self.bus.now_ns += SECOND_NS // 2
            for name, fake in self.fakes.items():
                server = self.fleet.server(name)
                if name in self.away:
                    self.fleet.failed(server, ServerState.AWAY, "connect", "away (refused)")
                else:
                    self.fleet.take(server, fake.body or fake.exposition().encode())
            self.fleet.publish_queues()
            self.state.history.advance(self.bus.now_ns - LAG_NS)
            await self.verdicts.look(self.bus.now_ns)
            await self.alerts.look(self.bus.now_ns)
        return status_now(self.state, self.verdicts, self.alerts.book, self.bus.now_ns)


def suite(loads: Mapping[str, Load], roles: Mapping[str, str], tpot_ms: float = 100.0) -> Observed:
    observed = Observed(roles, tpot_ms)
    for name, load in loads.items():
        observed.fakes[name].set(load)
    return observed


PAIR = {"p0": "prefill", "d0": "decode", "d1": "decode"}
