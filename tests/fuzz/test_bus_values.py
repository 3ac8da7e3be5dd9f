"""Fuzz tests of values on the bus: metrics and planner accept or skip them, and keep answering."""

import asyncio
import math
from typing import Any

import httpx
import numpy as np
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.bus.codec import SCHEMA_HEADER, decode
from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepColumns
from libs.contracts.step_row import COLUMN_NAMES, StepRow, step_columns
from libs.contracts.topics import ALL, CAPACITY, DECISIONS, LOADS, QUEUES, REQUESTS, SILENCES, STEPS, WINDOWS, Topic
from libs.keys.gate import ChangeGuard
from libs.policy.capacity import wishes
from libs.policy.reading import Shares
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet_loads import COLUMNS
from libs.testing.messages import messages, spoiled
from libs.testing.suites.suite import RunningSuite
from libs.testing.wait import ManualClock, at_once
from libs.testing.workers.hosts import RecordingBus
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.run import open_alerts
from services.metrics.alerts.silences import silence_of
from services.metrics.http.routes import make_api as make_metrics_api
from services.metrics.prometheus import OccupancyCollector
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.sharing import Sharing
from services.metrics.state import MetricsState
from services.metrics.stream import TICK_NS, Hub, TickWriter, tick
from services.planner.fleet_view import ReceivedPlans
from services.planner.http.admin import Admin, ModeApi
from services.planner.http.api import PlannerCollector
from services.planner.http.api import make_api as make_planner_api
from services.planner.http.limits_api import LimitsApi
from services.planner.state import Identity, PlannerState
from services.planner.store import RedisPlannerStore

NOW_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000
METRICS_PATHS = (
    "/v1/occupancy", "/v1/occupancy?window=100ms", "/v1/occupancy?window=10m", "/v1/requests/summary?window=10m",
    "/v1/requests?worker=decode-0", "/v1/alerts", "/metrics", "/readyz",
)  # fmt: skip
PLANNER_PATHS = ("/v1/workers", "/v1/decisions", "/v1/mode", "/metrics", "/readyz")
NO_REDIS = "redis://127.0.0.1:1/0"

near = st.integers(-10 * SECOND_NS, 100 * SECOND_NS).map(lambda offset: NOW_NS + offset)
edge = st.sampled_from([0, 1, 7, 2**31, 2**32, 2**62, 2**63, 2**64 - 1])
step = st.builds(StepRow, near, near | st.just(0), *[edge] * (len(COLUMN_NAMES) - 2))


@st.composite
def steps(draw: st.DrawFn) -> StepColumns:
    """Columns of steps, of which one may be spoiled."""
    columns = step_columns(draw(st.lists(step, max_size=4)))
    if draw(st.booleans()):
        name = draw(st.sampled_from(COLUMN_NAMES))
        column = getattr(columns, name)
        setattr(columns, name, draw(st.sampled_from([b"", column[:-1], column[:-8], column + bytes(8), 2 * column])))
    return columns


column = st.lists(st.sampled_from([0, 1, 2, NOW_NS, 2**63, 2**64 - 1]), min_size=2, max_size=2).map(
    lambda values: np.array(values, "<u8").tobytes()
)
known = {
    **{
        f"fulcrum.telemetry.v1.FleetLoads.{name}": st.one_of(column, column, st.binary(max_size=24)) for name in COLUMNS
    },
    "worker_ids": st.sampled_from(["a", "b"]),
    "fulcrum.telemetry.v1.StepBatch.steps": steps(),
    "fulcrum.telemetry.v1.Interval.start_unix_ns": near,
    "fulcrum.telemetry.v1.Interval.end_unix_ns": near,
    "fulcrum.telemetry.v1.KvTransfer.start_unix_ns": near,
    "fulcrum.telemetry.v1.KvTransfer.end_unix_ns": near,
    "worker_id": st.sampled_from(["a", "b"]),
    "incarnation": st.integers(1, 2),
    "sequence": st.integers(1, 6),
    "covered_from_unix_ns": near,
    "covered_to_unix_ns": near,
    "arrival_unix_ns": near,
    "told_unix_ns": near,
    "last_step_end_unix_ns": st.one_of(near, st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])),
    "metrics_id": st.sampled_from(["metrics", "other"]),
    "model": st.sampled_from(["sim", "other"]),
    "made_unix_ns": near,
    "changed_unix_ns": near,
    "until_unix_ns": near,
    "fulcrum.demand.v1.CapacityPlan.start_unix_s": st.floats(),
    "fulcrum.demand.v1.CapacityPlan.step_s": st.floats(),
}
values = {topic: st.tuples(st.just(topic), spoiled(messages(topic.value, known))) for topic in ALL}
of_any_topic = st.one_of(*values.values())
of_metrics_topics = st.one_of(
    *(values[topic] for topic in (STEPS, REQUESTS, DECISIONS, QUEUES, WINDOWS, WINDOWS, SILENCES))
)


def schema(topic: Topic) -> list[tuple[str, bytes]]:
    return [(SCHEMA_HEADER, topic.value.DESCRIPTOR.full_name.encode())]


def records(found: list[tuple[Topic, bytes]]) -> list[Record]:
    decoded = ((topic, decode(topic, value, schema(topic))) for topic, value in found)
    return [Record(topic, "", value, 0, 0) for topic, value in decoded if not isinstance(value, str)]


def answers(client: TestClient, paths: tuple[str, ...]) -> None:
    for path in paths:
        response = client.get(path)
        assert response.status_code == 200 or (path == "/readyz" and response.status_code == 503), response.text
        assert "Traceback" not in response.text


def test_metrics_accepts_or_skips_any_values(fuzz: Any) -> None:
    @fuzz.settings(2)
    @given(found=st.lists(of_metrics_topics, max_size=12), shared=st.booleans())
    def holds(found: list[tuple[Topic, bytes]], shared: bool) -> None:
        clock, registry = ManualClock(NOW_NS), CollectorRegistry()
        sharing = Sharing(Shares("metrics"), lambda _: None, began_ns=NOW_NS)
        state = MetricsState(prefill_shares, RequestMetrics(registry), sharing if shared else None)
        collector = OccupancyCollector(
            state.fleet, state.rollups, state.members,
            decisions=state.decisions, end_ns=clock.now_ns, window_ns=2 * SECOND_NS,
        )  # fmt: skip
        registry.register(collector)
        hub, writer = Hub(), TickWriter(window_ns=TICK_NS, settled_ns=0)
        desk = AlertEvaluator(state, MetricsSettings(alert_for_ms=0, slo_requests=1).alert_limits(), lag_ns=0)
        alerts = open_alerts(
            MetricsSettings(),
            RecordingBus(),
            desk,
            clock,
            began_ns=NOW_NS,
            make_client=None,
            guard=ChangeGuard(None, clock, token=""),
        )
        registry.register(alerts.collector)
        client = TestClient(
            make_metrics_api(state, hub, desk.book, clock, registry, lag_ns=0, live_lag_ns=0, more=[alerts.router])
        )
        for record in records(found):
            if record.topic is SILENCES:
                alerts.silencer.book.take(silence_of(record.value), clock.now_ns())  # type: ignore[arg-type]
            state.take(record, clock.now_ns())
            clock.advance_ms(100)
            tick(state, hub, writer, at_once(desk.look(clock.now_ns())), clock.now_ns(), lag_ns=0)
        fuzz.counts["bus values into metrics"] += len(found)
        answers(client, METRICS_PATHS)
        for worker in client.get("/v1/occupancy?window=10m").json()["workers"]:
            parts = worker["gpu_ns"]
            assert parts["prefill"] + parts["decode"] + parts["kv_wait"] + parts["idle"] == parts["covered"]
            assert math.isfinite(worker["coverage"]) and 0 <= worker["coverage"] <= 1

    holds()


def test_the_planner_accepts_or_skips_any_values(fuzz: Any) -> None:
    @fuzz.settings(2)
    @given(
        found=st.lists(of_any_topic, max_size=8), workers=st.lists(messages(Worker, known | {"id": known["worker_id"]}))
    )
    def holds(found: list[tuple[Topic, bytes]], workers: list[Worker]) -> None:
        clock = ManualClock(NOW_NS)
        identity = Identity("planner", NOW_NS, MODE_AUTO)
        state = PlannerState(identity, lag_ns=0, window_ns=2 * SECOND_NS, kept_decisions=8)
        registry, plans = CollectorRegistry(), ReceivedPlans(clock)
        registry.register(PlannerCollector(state, clock))
        modes = ModeApi(Admin(state, RedisPlannerStore(NO_REDIS, "fuzz"), RecordingBus(), clock, token=""))
        limits = LimitsApi(Admin(state, None, RecordingBus(), clock, token=""))
        client = TestClient(make_planner_api(state, clock, registry, modes, limits))
        state.take_workers(workers, clock.now_ns())
        for record in records(found):
            if record.topic is LOADS:
                state.take_loads(record.value, clock.now_ns())  # type: ignore[arg-type]
            elif record.topic is QUEUES:
                state.take_queues(record.value, clock.now_ns())  # type: ignore[arg-type]
            elif record.topic is CAPACITY:
                plans.take(record.value)  # type: ignore[arg-type]
                assert all(count >= 0 for count in wishes(plans, "sim", clock.now_ns() / 1e9, 30.0).values())
            clock.advance_ms(50)
            for order in state.decide(clock.now_ns()).orders:
                state.done(order, None, clock.now_ns())
        fuzz.counts["bus values into planner"] += len(found)
        answers(client, PLANNER_PATHS)

    holds()


async def test_services_survive_any_values_from_the_broker(live_suite: RunningSuite, fuzz: Any) -> None:
    """All at once into the running services; a good event behind them shows that they have been read."""
    drawn: list[tuple[Topic, bytes]] = []

    @fuzz.settings(4)
    @given(found=of_any_topic)
    def collect(found: tuple[Topic, bytes]) -> None:
        drawn.append(found)

    collect()
    cluster = live_suite.ready["cluster"]
    marker = REQUESTS.value(request_id="marker", model="marker", arrival_unix_ns=1)
    await _publish(live_suite, [(t.name(cluster), v, schema(t)) for t, v in drawn])
    async with httpx.AsyncClient(timeout=10) as client, asyncio.timeout(30):
        while True:
            marker.arrival_unix_ns += 1  # a repeated event would be counted once
            await _publish(live_suite, [(REQUESTS.name(cluster), marker.SerializeToString(), schema(REQUESTS))])
            text = (await client.get(f"{live_suite.ready['metrics']}/metrics")).text
            if 'model="marker"' in text:
                break
            await asyncio.sleep(0.1)
        fuzz.counts["bus values through the broker"] += len(drawn)
        for service, paths in (("metrics", METRICS_PATHS), ("planner", PLANNER_PATHS)):
            for path in paths:
                response = await client.get(live_suite.ready[service] + path)
                assert response.status_code == 200, f"{path}: {response.text}"


async def _publish(suite: RunningSuite, found: list[tuple[str, bytes, list[tuple[str, bytes]]]]) -> None:
    from libs.bus.clients import open_producer

    async with open_producer(suite.ready["kafka"], "fuzz") as producer:
        for topic, value, headers in found:
            await producer.send_and_wait(topic, value, key=b"k", headers=headers)
