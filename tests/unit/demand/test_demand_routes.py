"""Tests of demand and forecasts over REST, from a gateway's records to answers."""

from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.capacity.inputs import input_from_json
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue, StepBatch
from libs.contracts.topics import DEMAND, QUEUES, STEPS
from libs.demand.counts import Counts, DemandKey
from libs.demand.report import make_outlook
from libs.demand.wire import BinDelta, plan_of, totals_message
from libs.keys.gate import ChangeGuard
from libs.perfmodel.learner import FittedModel
from libs.perfmodel.wire import step_time_message
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import DemandHistory
from libs.policy.step_time import StepTimeModel
from libs.runtime.web import make_web_app
from libs.telemetry.columns import prefill_shares
from libs.testing.wait import ManualClock
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.demand.keeping import DemandKeeper
from services.metrics.demand.run import IMPORTED, BroughtHistory, DemandService, brought_rows, open_demand
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState

MINUTE_NS = 60_000_000_000
KEY = DemandKey("m", "online", "acme")


class Rig:
    """A demand part with its routes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.plans: list[CapacityPlan] = []
        """The plans as planners would receive them."""
        settings = MetricsSettings(token="secret")
        registry = CollectorRegistry()
        state = MetricsState(prefill_shares, RequestMetrics(registry))
        desk = AlertEvaluator(state, settings.alert_limits(), lag_ns=0)
        self.demand: DemandService = open_demand(
            None,
            settings,
            state,
            desk,
            self.clock,
            guard=ChangeGuard(None, self.clock, token="secret"),
            publish=self.plans.append,
        )
        self.app = make_web_app("test", "", not_ready=lambda: None, metrics=registry)
        for router in self.demand.routers():
            self.app.include_router(router)

    @property
    def keeper(self) -> DemandKeeper:
        return self.demand.keeper

    def report(self, at_ns: int, **counts: int) -> None:
        """A gateway's record."""
        began_ns = 1_795_000_000 * 10**9
        message = totals_message(("g", began_ns), at_ns, {KEY: Counts(**counts)})
        self.keeper.take(Record(DEMAND, "g", message, 0, 0), at_ns)

    async def get(self, path: str, **params: str) -> httpx.Response:
        """Send a GET."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
            return await client.get(path, params=params)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_reported_demand_is_returned_exactly_by_the_minute(rig: Rig) -> None:
    now_ns = rig.clock.now_ns()
    start_ns = 1_795_000_000 * 10**9 // MINUTE_NS * MINUTE_NS
    rig.clock.advance_ms((start_ns + 30 * MINUTE_NS - now_ns) / 1e6)
    for minute in range(1, 30):
        rig.report(
            start_ns + minute * MINUTE_NS, requests=minute * 10, known_requests=minute * 10, prompt_tokens=minute
        )
    found = (await rig.get("/v1/demand", span="1h", model="m")).json()
    assert sum(found["series"][0]["requests"]) == 290
    assert found["series"][0]["tenant"] == "acme"
    assert sum(found["heard"]) >= 28


async def test_without_any_demand_a_forecast_names_a_remedy(rig: Rig) -> None:
    answer = await rig.get("/v1/forecast")
    assert answer.status_code == 400
    assert "fulcrum forecast import" in answer.json()["error"]["message"]


async def test_a_record_from_a_clock_far_ahead_is_dropped(rig: Rig) -> None:
    future = totals_message(("g", 1), rig.clock.now_ns() + 10**15, {KEY: Counts(requests=5)})
    rig.keeper.take(Record(DEMAND, "g", future, 0, 0), rig.clock.now_ns())
    assert (await rig.get("/v1/demand")).json()["series"] == []


async def test_history_is_imported_only_with_the_token_and_enables_a_forecast(rig: Rig) -> None:
    now_s = rig.clock.now_ns() / 1e9
    body: dict[str, Any] = {
        "model": "m", "start_unix_s": now_s - 86_400, "step_s": 600,
        **{name: [10.0] * 144 for name in ("requests_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")},
    }  # fmt: skip
    transport = httpx.ASGITransport(rig.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        assert (await client.post("/v1/demand", json=body)).status_code == 401
        taken = await client.post("/v1/demand", json=body, headers={"authorization": "Bearer secret"})
    assert taken.json()["taken"] >= 1439
    found = (await rig.get("/v1/forecast", horizon="6h")).json()
    assert found["little_history"]
    assert found["series"]["requests"]["p50"][0] == pytest.approx(10, rel=0.05)
    assert len(found["starts_unix_s"]) == 24


async def _fill(rig: Rig, rates: dict[str, float]) -> None:
    """Give the suite a day of drawn arrivals, in requests a second by model."""
    rng, now = np.random.default_rng(1), rig.keeper.now_bin
    rows: dict[int, dict[DemandKey, Counts]] = {}
    for number in range(now - 1440, now):
        drawn = {model: int(rng.poisson(60 * rate)) for model, rate in rates.items()}
        rows[number] = {
            DemandKey(model, "online", "acme"): Counts(each, each, 300 * each, 0, 90 * each, each)
            for model, each in drawn.items()
        }
    await rig.keeper.fill(rows)


async def test_medians_of_models_add_up_to_the_fleets_and_equal_each_models_own_forecast(rig: Rig) -> None:
    rates = {"m": 1.0, **{f"m{at}": 0.2 * at for at in range(1, 8)}}
    await _fill(rig, rates)
    parts = (await rig.get("/v1/forecast", horizon="2h", by="model")).json()["parts"]
    assert parts["each"].keys() == {"m7", "m6", "m5", "m", "m4", "other"}
    for series, total in parts["total"].items():
        medians = [each[series] for each in parts["each"].values()]
        assert [sum(at) for at in zip(*medians, strict=True)] == total
        assert min(map(min, medians)) >= 0
    for model in rates:
        found = (await rig.get("/v1/forecast", horizon="2h", model=model)).json()
        if model in parts["each"]:
            assert found["series"]["decode"]["p50"] == parts["each"][model]["decode"]
        else:
            together = parts["each"]["other"]["requests"]
            assert all(own <= most for own, most in zip(found["series"]["requests"]["p50"], together, strict=True))


async def test_medians_of_tenants_and_classes_add_up_to_the_models(rig: Rig) -> None:
    start_ns = 1_795_000_000 * 10**9 // MINUTE_NS * MINUTE_NS
    rig.clock.advance_ms((start_ns + 60 * MINUTE_NS - rig.clock.now_ns()) / 1e6)
    keys = [DemandKey("m", each, tenant) for each in ("online", "urgent") for tenant in ("acme", "beta")]
    for minute in range(1, 60):
        counts = {key: Counts(minute * at, minute * at, 7 * minute, 0, 3 * minute) for at, key in enumerate(keys, 1)}
        message = totals_message(("g", 1_795_000_000 * 10**9), start_ns + minute * MINUTE_NS, counts)
        rig.keeper.take(Record(DEMAND, "g", message, 0, 0), start_ns + minute * MINUTE_NS)
    for by, names in (("tenant", {"acme", "beta"}), ("class", {"online", "urgent"})):
        found = (await rig.get("/v1/forecast", horizon="10m", by=by)).json()
        assert found["parts"]["each"].keys() == names
        for series, total in found["parts"]["total"].items():
            assert total == found["series"][series]["p50"]
            assert [sum(at) for at in zip(*(e[series] for e in found["parts"]["each"].values()), strict=True)] == total


async def test_bins_in_which_a_model_is_unknown_do_not_count_as_zero_demand(rig: Rig) -> None:
    await _fill(rig, {"m": 1.0, "other-model": 1.0})
    start = rig.keeper.now_bin
    rig.clock.advance_ms(180 * MINUTE_NS / 1e6)
    known = {DemandKey("other-model", "online", "acme"): Counts(60, 60, 18_000, 0, 5_400, 60)}
    deltas = {start + at: BinDelta(dict(known), MINUTE_NS, frozenset({"m"})) for at in range(180)}
    rig.keeper.add(deltas)
    found = (await rig.get("/v1/forecast", horizon="1h", by="model")).json()["parts"]
    for median in (found["each"]["m"]["requests"], found["each"]["other-model"]["requests"]):
        assert np.mean(median) == pytest.approx(1.0, abs=0.3)
    assert np.mean(found["total"]["requests"]) == pytest.approx(2.0, abs=0.6)


async def test_a_plan_for_the_only_model_makes_its_own_forecast(rig: Rig) -> None:
    await _fill(rig, {"m": 1.0})
    assert (await rig.get("/v1/capacity/input", model="m", horizon="2h")).json()["outlook"] is None


async def test_a_plans_input_has_the_time_of_encoding_the_images_that_arrive(rig: Rig) -> None:
    await _fill(rig, {"m": 1.0})
    batch = StepBatch(
        worker_id="w", gpus=1, kv_blocks=1000, load=Load(images_used=50, image_encode_ns=50 * 200_000_000)
    )
    batch.assignment.model = "m"
    batch.step_time.CopyFrom(
        step_time_message(FittedModel(StepTimeModel(8e6, 6e4, 0.0, 15e6, 3e5, 25.0, interference=1.0)))
    )
    queue = ModelQueue(model="m", arrived_tokens=6000, arrived_images=10)
    for topic, value in ((STEPS, batch), (QUEUES, GatewayQueues(gateway_id="g", queues=[queue]))):
        rig.demand.kinds.take(Record(topic, "key", value, 0, 0), rig.clock.now_ns())
    workers = (await rig.get("/v1/capacity/input", model="m", horizon="2h")).json()["workers"]
    assert workers["encode_token_ns"] == pytest.approx(200_000_000 * 10 / 6000)


async def test_a_plans_input_uses_the_forecast_that_is_consistent_with_other_models(rig: Rig) -> None:
    await _fill(rig, {"m": 1.0, "other-model": 2.0})
    found = (await rig.get("/v1/forecast", horizon="2h", model="m")).json()
    row = (await rig.get("/v1/capacity/input", model="m", horizon="2h")).json()
    outlook = input_from_json(row).outlook
    assert outlook is not None
    assert outlook.quantiles["decode"][:, LEVELS.index(0.5)].tolist() == found["series"]["decode"]["p50"]


@pytest.mark.parametrize("rate, days, little", [(10.0, 1, True), (10.0, 3, False), (0.0, 3, True)])
def test_history_under_two_days_or_without_arrivals_is_flagged_as_little(rate: float, days: int, little: bool) -> None:
    counts = np.full(days * 144, rate)
    outlook = make_outlook(DemandHistory(600.0, 0.0, counts, counts, counts), 3600.0)
    assert outlook.little_history == little


def test_imported_rates_add_up_to_the_total_in_whole_numbers() -> None:
    history = BroughtHistory(
        model="m", start_unix_s=600, step_s=600, requests_per_s=[0.333, None, 1.0],
        prefill_tokens_per_s=[10.1, 5.0, 0.0], decode_tokens_per_s=[1.0, 2.0, 3.0],
    )  # fmt: skip
    rows = brought_rows(history, MINUTE_NS)
    key = DemandKey("m", IMPORTED, IMPORTED)
    assert sorted(rows) == [*range(10, 20), *range(30, 40)]
    assert sum(row[key].requests for row in rows.values()) in (799, 800)
    assert sum(row[key].prompt_tokens for row in rows.values()) in (6059, 6060)


@pytest.mark.parametrize("span", ["", "h", "²h", "-1h", "0h", "1y", "99999999999h", "1.2.3h"])
async def test_an_invalid_span_is_refused_with_a_message(rig: Rig, span: str) -> None:
    for path, name in (("/v1/demand", "span"), ("/v1/forecast", "horizon"), ("/v1/capacity", "horizon")):
        answer = await rig.get(path, **{name: span})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def test_a_finished_plan_is_sent_to_planners_as_numbers_of_workers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus_each = {
        "surely": [2, 4], "p50": [2, 6], "p95": [4, 8], "gpus": [4, 8], "short": [0.0, 0.9], "there": 4, "most": 8,
    }  # fmt: skip
    row = {
        "model": "m", "gpus_per_worker": 2, "confidence": 0.95, "spare_workers": 0, "step_s": 900.0,
        "starts_unix_s": [1000.0, 1900.0], "pools": {"prefill": two_gpus_each, "decode": two_gpus_each},
        "shortages": [{"phase": "decode", "at_unix_s": 1900.0, "gpus": 2, "sure": 0.9}],
    }  # fmt: skip
    capacity = rig.demand.capacity

    async def planned(*_query: Any, **_how: Any) -> dict[str, Any]:
        return row

    monkeypatch.setattr(capacity, "plan", planned)
    rig.report(rig.clock.now_ns(), requests=1)
    rig.clock.advance_ms(120_000)
    rig.report(rig.clock.now_ns(), requests=10)
    await capacity.look()
    (sent,) = rig.plans
    assert (sent.model, sent.made_unix_ns) == ("m", rig.clock.now_ns())
    plan = plan_of(sent)
    assert [each.planned for each in plan.pools["decode"]] == [2, 4]
    assert plan.starts_s == (1000.0, 1900.0) and plan.there == {"prefill": 2, "decode": 2}
    assert (await rig.get("/v1/capacity/plans")).json() == [row]


async def test_a_plan_without_demand_names_a_remedy(rig: Rig) -> None:
    for path in ("/v1/capacity", "/v1/capacity/input"):
        assert "fulcrum forecast import" in (await rig.get(path)).json()["error"]["message"]
    assert (await rig.get("/v1/capacity/plans")).json() == []
