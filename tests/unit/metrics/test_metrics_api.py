"""Tests of the metrics service's HTTP answers, over its real app and state."""

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from libs.bus.port import Record
from libs.contracts import metric_names
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_REJECTED,
    DummySteps,
    Interval,
    KvTransfer,
)
from libs.contracts.topics import DECISIONS, REQUESTS, STEPS
from libs.policy.alerts.store import AlertStore
from libs.telemetry.columns import prefill_shares
from libs.telemetry.rollups import PROVISIONAL
from libs.testing.wait import ManualClock
from libs.testing.workers.telemetry import MS, at, step, step_batch, write_windows
from services.metrics.http.routes import make_api
from services.metrics.prometheus import LiveCollector, OccupancyCollector
from services.metrics.requests import MAX_MODELS, OTHER_MODEL, RequestMetrics
from services.metrics.state import MetricsState
from services.metrics.stream import Hub
from tests.unit.metrics.requests_rig import finished

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
LAG_NS = 400 * MS
LIVE_LAG_NS = 100 * MS


class Metrics:
    """A metrics service without its broker: records go straight in."""

    def __init__(self):
        self.clock = ManualClock(at(1400))
        self.registry = CollectorRegistry()
        self.state = MetricsState(prefill_shares, RequestMetrics(self.registry))
        self.registry.register(
            OccupancyCollector(
                self.state.fleet, self.state.rollups, self.state.members, decisions=self.state.decisions,
                end_ns=lambda: self.clock.now_ns() - LAG_NS, window_ns=1000 * MS,
            )
        )  # fmt: skip
        self.hub = Hub()
        app = make_api(
            self.state, self.hub, AlertStore(), self.clock, self.registry, lag_ns=LAG_NS, live_lag_ns=LIVE_LAG_NS
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://metrics")

    def take(self, topic, value):
        self.state.take(Record(topic, "key", value, 0, 0), self.clock.now_ns())
        write_windows(self.state.history, 0, (self.clock.now_ns() - LIVE_LAG_NS - at(0)) / MS)

    async def samples(self):
        answer = await self.http.get("/metrics")
        families = text_string_to_metric_families(answer.text)
        return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.fixture
async def metrics():
    service = Metrics()
    async with service.http:
        yield service


async def test_occupancy_has_every_field_and_its_window_ends_a_lag_before_now(metrics):
    load = Load(running=1, waiting=2, waiting_prefill_tokens=30)
    metrics.take(STEPS, step_batch(1, (0, 1400), [step(500, 750, decode=1), step(1000, 1400, prefill=8)], load=load))
    answer = await metrics.http.get("/v1/occupancy", params={"window": "1s"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["as_of_unix_ns"] == at(1000)
    shares = {"coverage": 1.0, "prefill": 0.0, "decode": 0.25, "kv_wait": 0.0, "idle": 0.75, "ratio": 0.0}
    assert {**body, **shares, "window_ms": 1000, "gpus": 1} == body
    depths = {"running": 1, "waiting": 2, "waiting_prefill_tokens": 30}
    (worker,) = body["workers"]
    named = {"id": "decode-0", "node": "node-a", "model": "sim", "role": "decode"}
    assert {**worker, **shares, **depths, **named, "gpus": 1} == worker
    assert [model["model"] for model in body["models"]] == ["sim"]


async def age_ms(metrics, **query):
    return (await metrics.http.get("/v1/occupancy", params=query)).json()["age_ms"]


async def test_the_age_is_the_time_since_half_of_the_workers_last_reported(metrics):
    assert await age_ms(metrics) is None

    def tell(worker, number):
        metrics.take(STEPS, step_batch(number, (100 * number, 100 * number + 100), worker=worker))

    for worker in ("decode-0", "decode-1", "decode-2"):
        tell(worker, 12)  # until 1300 ms, and now it is 1400
    assert await age_ms(metrics) == 100
    metrics.clock.advance_ms(3_600)
    tell("decode-0", 48)
    assert await age_ms(metrics) == 3_700  # of most nothing newer is known
    tell("decode-1", 48)
    assert await age_ms(metrics) == 100  # that the third is silent makes the others' data no older
    assert await age_ms(metrics, end_unix_ms=at(1_000) // MS) is None


async def test_prometheus_has_the_age_while_there_are_workers(metrics):
    age_ns = lambda: metrics.state.age_ns(metrics.clock.now_ns())  # noqa: E731
    metrics.registry.register(LiveCollector(metrics.hub, metrics.state.history, age_ns))
    assert (metric_names.TELEMETRY_AGE_SECONDS,) not in await metrics.samples()
    metrics.take(STEPS, step_batch(11, (1100, 1200)))
    assert (await metrics.samples())[metric_names.TELEMETRY_AGE_SECONDS,] == 0.2


@pytest.mark.parametrize("in_order", [False, True])
async def test_half_a_cluster_that_dies_lowers_the_gauge_for_minutes(metrics, in_order):
    dying = step_batch(1, (0, 1000), worker="dying")
    dying.last = in_order
    metrics.take(STEPS, dying)
    low_s = 0
    for number in range(80):
        metrics.clock.advance_ms(5000)
        metrics.take(STEPS, step_batch(number, (5000 * number, 5000 * (number + 1) + 1400), worker="living"))
        gauge = (await metrics.samples())[(metric_names.CLUSTER_COVERAGE_RATIO,)]
        answer = (await metrics.http.get("/v1/occupancy", params={"window": "1s"})).json()
        assert answer["coverage"] == gauge == (1.0 if in_order or number >= 59 else 0.5)
        low_s += 5 * (gauge < 1.0)
    assert low_s == 0 if in_order else low_s > 240


async def test_without_workers_coverage_is_not_low(metrics):
    assert (metric_names.CLUSTER_COVERAGE_RATIO,) not in await metrics.samples()
    assert (await metrics.samples())[(metric_names.CLUSTER_GPUS,)] == 0


async def test_an_invalid_window_is_a_400_that_names_the_parameter_and_the_allowed_values(metrics):
    for path in ("/v1/occupancy", "/v1/requests/summary"):
        answer = await metrics.http.get(path, params={"window": "soon"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == ("window", "invalid_request_error")
        assert "from 100ms to 10m" in error["message"]


async def test_readiness_says_whether_figures_are_live(metrics):
    answer = await metrics.http.get("/readyz")
    assert (answer.status_code, "nothing has arrived" in answer.json()["reason"]) == (503, True)
    metrics.take(STEPS, step_batch(1, (0, 100)))
    assert (await metrics.http.get("/readyz")).json() == {"status": "ready"}
    metrics.clock.advance_ms(3500)
    answer = await metrics.http.get("/readyz")
    assert (answer.status_code, "for 3.5 s" in answer.json()["reason"]) == (503, True)
    for path in ("/healthz", "/health"):
        assert (await metrics.http.get(path)).json() == {"status": "ok"}
    assert len((await metrics.http.get("/v1/occupancy", params={"window": "10s"})).json()["workers"]) == 1


async def test_request_summary_counts_outcomes_and_gives_percentiles_by_model(metrics):
    for number in range(10):
        metrics.take(REQUESTS, finished(f"r{number}", ttft_ms=10 * (number + 1)))
    metrics.take(REQUESTS, finished("gone", model="other", outcome=OUTCOME_CLIENT_GONE, tokens=1, decode_ms=0))
    metrics.take(REQUESTS, finished("bad", outcome=OUTCOME_REJECTED, ttft_ms=0, tokens=0, decode_ms=0))
    body = (await metrics.http.get("/v1/requests/summary", params={"window": "5s"})).json()
    assert body["complete"] is True
    assert body["total"]["requests"] == 12
    assert body["total"]["outcomes"] == {"client_gone": 1, "ok": 10, "rejected": 1}
    other, sim = body["models"]
    assert other["summary"]["tpot_s"] == {"count": 0, "p50": None, "p90": None, "p99": None}
    assert sim["summary"]["ttft_s"] == {"count": 10, "p50": 0.05, "p90": 0.09, "p99": 0.1}
    assert sim["summary"]["tpot_s"]["p50"] == 0.02
    assert (sim["summary"]["output_tokens"], sim["summary"]["cached_tokens"]) == (110, 176)


async def test_an_event_delivered_twice_counts_once_and_choices_of_one_request_separately(metrics):
    metrics.take(REQUESTS, finished("r1"))
    metrics.take(REQUESTS, finished("r1"))
    metrics.take(REQUESTS, finished("r1", ttft_ms=120))
    body = (await metrics.http.get("/v1/requests/summary")).json()
    assert body["total"]["requests"] == 2
    assert (await metrics.samples())["fulcrum_requests_total", ("model", "sim"), ("outcome", "ok")] == 2


async def test_requests_of_a_worker_are_those_it_took_part_in_newest_first(metrics):
    for number, workers in enumerate((("p0", "d0"), ("p0", "d1"), ("d0", "d0"), ("", ""))):
        event = finished(f"r{number}")
        event.prefill_worker, event.decode_worker = workers
        metrics.take(REQUESTS, event)

    async def reported(**query):
        return [each["id"] for each in (await metrics.http.get("/v1/requests", params=query)).json()]

    assert await reported(worker="d0") == ["r2", "r0"]
    assert await reported(worker="p0", limit=1) == ["r1"]
    assert await reported(worker="nobody") == []
    (first, _) = (await metrics.http.get("/v1/requests", params={"worker": "p0"})).json()
    assert (first["decode_worker"], first["ttft_ns"], first["outcome"]) == ("d1", 100 * MS, "ok")
    assert (await metrics.http.get("/v1/requests", params={"worker": "p0", "limit": 0})).status_code == 400


async def test_the_steps_behind_a_figure_add_up_to_it(metrics):
    metrics.take(STEPS, step_batch(1, (0, 1400), [step(100, 250, decode=5), step(500, 750, prefill=8)]))
    query = {"window": "500ms", "end_unix_ms": at(700) // MS}
    answer = (await metrics.http.get("/v1/steps", params={"worker": "decode-0", **query})).json()
    (worker,) = (await metrics.http.get("/v1/occupancy", params=query)).json()["workers"]
    assert answer["gpu_ns"] == worker["gpu_ns"]
    assert sum(each["prefill_ns"] for each in answer["steps"]) == worker["gpu_ns"]["prefill"] == 200 * MS
    assert [(each["kind"], each["decode_sequences"]) for each in answer["steps"]] == [("decode", 5), ("prefill", 0)]
    for status, code, more in ((404, "worker_not_found", {"worker": "x"}), (410, "no_longer_kept", {"end_unix_ms": 1})):
        refused = await metrics.http.get("/v1/steps", params={"worker": "decode-0", **query, **more})
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


async def test_prometheus_shows_phases_requests_telemetry_and_decisions(metrics):
    metrics.take(STEPS, step_batch(4, (0, 1000), [step(0, 250, decode=1), step(250, 750, prefill=8)]))
    load = Load(preemptions=3, recomputed_tokens=70, pool_faults=1, kv_pulls=4, refused_kv_pulls=2)
    last = step_batch(6, (1200, 1300), dropped_batches=1, load=load)
    last.kv_transfers.extend(
        (KvTransfer(bytes=5), KvTransfer(bytes=7, shared_memory=True), KvTransfer(bytes=8, shared_memory=True))
    )
    metrics.take(STEPS, last)
    metrics.take(STEPS, last)  # what comes again counts once
    metrics.take(REQUESTS, finished())
    metrics.take(DECISIONS, Decision(action=ACTION_KEEP))
    samples = await metrics.samples()
    worker = (("model", "sim"), ("node", "node-a"), ("phase", "decode"), ("role", "decode"), ("worker", "decode-0"))
    assert samples["fulcrum_worker_phase_ratio", *worker] == 0.25
    assert samples["fulcrum_cluster_phase_ratio", ("phase", "prefill")] == 0.5
    assert samples[("fulcrum_cluster_prefill_decode_ratio",)] == 2.0
    assert samples[("fulcrum_cluster_coverage_ratio",)] == 1.0
    assert samples["fulcrum_worker_telemetry_lost_batches", ("worker", "decode-0")] == 1
    assert samples["fulcrum_worker_telemetry_dropped_batches", ("worker", "decode-0")] == 1
    assert samples["fulcrum_worker_preemptions_total", ("worker", "decode-0")] == 3
    assert samples["fulcrum_worker_recomputed_tokens_total", ("worker", "decode-0")] == 70
    assert samples["fulcrum_worker_pool_faults", ("worker", "decode-0")] == 1
    assert samples["fulcrum_worker_kv_pulls", ("worker", "decode-0")] == 4
    assert samples["fulcrum_worker_kv_pulls_refused_total", ("worker", "decode-0")] == 2
    assert samples["fulcrum_telemetry_batches_total", ("result", "counted")] == 2
    assert samples["fulcrum_kv_transfer_bytes_total", ("way", "network")] == 5
    assert samples["fulcrum_kv_transfer_bytes_total", ("way", "shared_memory")] == 15
    assert samples["fulcrum_request_time_to_first_token_seconds_sum", ("model", "sim")] == 0.1
    assert samples["fulcrum_decisions_seen_total", ("action", "keep")] == 1


async def test_waits_for_a_cpu_are_a_gauge_of_workers_that_report_them(metrics):
    waits = step_batch(1, (0, 1400), worker="waits")
    waits.sched_delay_ns = 1_400 * MS
    metrics.take(STEPS, waits)
    metrics.take(STEPS, step_batch(1, (0, 1400), worker="says-nothing"))
    samples = await metrics.samples()
    assert [key for key in samples if key[0] == "fulcrum_worker_cpu_wait_ratio"] == [
        ("fulcrum_worker_cpu_wait_ratio", ("worker", "waits"))
    ]
    assert 0.9 < samples["fulcrum_worker_cpu_wait_ratio", ("worker", "waits")] < 1


async def test_a_group_is_a_scope_and_its_ranks_report_their_dummy_steps(metrics):
    for rank, dummy_ms in enumerate((300, 0)):
        batch = step_batch(1, (0, 1400), [step(800, 1200, decode=1)], worker=f"w-{rank}", gpus=2, model="org/moe")
        batch.group = "10.0.0.1:29550"
        spans = [Interval(start_unix_ns=at(400), end_unix_ns=at(400 + dummy_ms))] * bool(dummy_ms)
        batch.dummy_steps.CopyFrom(DummySteps(steps=7 * rank + 1, spans=spans))
        metrics.state.take(Record(STEPS, batch.worker_id, batch, 0, 0), metrics.clock.now_ns())
    metrics.take(STEPS, step_batch(1, (0, 1400), worker="alone"))
    body = (await metrics.http.get("/v1/occupancy", params={"window": "1s"})).json()
    (group,) = body["groups"]
    assert (group["scope"], group["ranks"], group["gpus"]) == ("group:org/moe/10.0.0.1:29550", ["w-0", "w-1"], 4)
    assert (group["dummy_gpu_ns"], group["dummy_steps"], group["dummy"]) == (600 * MS, 9, 0.15)
    assert (group["due_gpu_ns"], group["coverage"]) == (4_000 * MS, 1.0)
    query = {"window": "1s", "span": "1s", "scope": group["scope"]}
    history = (await metrics.http.get("/v1/occupancy/history", params=query)).json()
    assert max(history["gpus"]) == 4
    efficiency = (await metrics.http.get("/v1/occupancy/efficiency", params={"scope": group["scope"]})).json()
    assert efficiency["scope"] == group["scope"]
    refused = (await metrics.http.get("/v1/occupancy/history", params=query | {"scope": "group:moe"})).json()
    assert "known: org/moe/10.0.0.1:29550" in refused["error"]["message"]
    samples = await metrics.samples()
    steps = {key: value for key, value in samples.items() if key[0] == "fulcrum_worker_dummy_steps_total"}
    assert sorted(steps.values()) == [1, 8]  # of ranks alone
    assert sorted(value for key, value in samples.items() if key[0] == "fulcrum_worker_dummy_ratio") == [0, 0.3]


async def test_every_exported_metric_is_named_in_the_one_module(metrics):
    metrics.take(STEPS, step_batch(1, (0, 1000), [step(0, 250, decode=1), step(250, 750, prefill=8)]))
    metrics.take(REQUESTS, finished())
    text = (await metrics.http.get("/metrics")).text
    shown = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    named = {value for name, value in vars(metric_names).items() if name.isupper()}
    assert {name for name in shown if not name.endswith("_created")} <= named


async def test_model_labels_are_bounded_whatever_clients_request(metrics):
    for number in range(MAX_MODELS + 5):
        metrics.take(REQUESTS, finished(f"r{number}", model=f"made-up-{number}", outcome=OUTCOME_REJECTED))
    samples = await metrics.samples()
    assert samples["fulcrum_requests_total", ("model", OTHER_MODEL), ("outcome", "rejected")] == 5


@pytest.mark.parametrize("now_ms", [61_300, 63_700, 119_900, 120_000])
async def test_an_unfinished_window_is_provisional_and_charged_with_its_elapsed_time(metrics, now_ms):
    """`now_ms` after the origin, which lies 20 s into a minute."""
    metrics.clock.advance_ms((at(now_ms) + LIVE_LAG_NS - metrics.clock.now_ns()) / MS)
    covers = [(low, min(low + 60_000, now_ms)) for low in range(0, now_ms, 60_000)]
    for sequence, (low, high) in enumerate(covers, start=1):
        metrics.take(STEPS, step_batch(sequence, (low, high), gpus=2))
    for window, length_ms in (("1s", 1_000), ("10s", 10_000), ("60s", 60_000)):
        query = {"window": window, "span": window}
        body = (await metrics.http.get("/v1/occupancy/history", params=query)).json()
        over_ms = at(now_ms) // MS - body["starts_unix_ms"][-1]
        assert 0 < over_ms <= length_ms
        assert (body["coverage"], body["gpus"]) == ([1.0], [2])
        assert body["provisional"] == [over_ms < length_ms]
        packed = (await metrics.http.get("/v1/occupancy/windows", params=query)).content
        length = int.from_bytes(packed[:4], "little")
        assert json.loads(packed[4 : 4 + length])["told_to_unix_ms"] == at(now_ms) // MS
        assert (packed[-1] >= PROVISIONAL) == (over_ms < length_ms)


async def test_history_windows_and_events_are_served_and_errors_list_the_allowed_values(metrics):
    metrics.take(STEPS, step_batch(1, (0, 1400), [step(500, 750, decode=1)]))
    for now_ms in (100, 1400):
        metrics.state.history.advance(at(now_ms))
    answer = await metrics.http.get("/v1/occupancy/history", params={"window": "100ms", "span": "1s"})
    body = answer.json()
    assert body["starts_unix_ms"][-1] == at(1200) // MS
    assert sum(body["gpu_ns"]["decode"]) == 250 * MS
    packed = await metrics.http.get("/v1/occupancy/windows", params={"span": "1s"})
    assert packed.headers["content-type"] == "application/octet-stream"
    assert (await metrics.http.get("/v1/events")).json() == []
    for path, param, value in (
        ("/v1/occupancy/history", "scope", "gpu"),
        ("/v1/occupancy/history", "window", "5s"),
        ("/v1/occupancy/history", "span", "9m"),
        ("/v1/occupancy/windows", "span", "x"),
    ):
        refused = await metrics.http.get(path, params={"window": "100ms", param: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_occupancy_of_an_earlier_instant_is_the_sum_of_the_windows_before_it(metrics):
    metrics.take(STEPS, step_batch(1, (0, 1400), [step(500, 750, decode=1)]))
    end_unix_ms = at(700) // MS
    answer = await metrics.http.get("/v1/occupancy", params={"window": "500ms", "end_unix_ms": end_unix_ms})
    assert (answer.json()["as_of_unix_ns"], answer.json()["gpu_ns"]["decode"]) == (at(700), 200 * MS)


async def test_the_page_has_a_strict_content_security_policy(metrics):
    page = await metrics.http.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    missing = await metrics.http.get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
