"""Tests of the planner without its stores: the pure core, the snapshot, and HTTP answers over the real app."""

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from libs.contracts import metric_names
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_DRAINING,
    Load,
    RoleChange,
)
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_ROLE_MOVED,
    ACTION_SET_MODE,
    MODE_ADVISORY,
    MODE_OFF,
)
from libs.policy.planner.limits import is_due, is_news
from libs.runtime.web import make_web_app
from libs.testing.wait import ManualClock
from libs.testing.workers.hosts import RecordingBus
from libs.testing.workers.telemetry import MS, Telling, at, step, step_batch
from services.planner.http.admin import Admin, ModeApi
from services.planner.http.api import PlannerCollector, make_api
from services.planner.http.limits_api import LimitsApi
from services.planner.kept import StoredPlannerSettings
from services.planner.models.api import no_catalogue
from services.planner.state import Identity, PlannerState
from services.planner.store import RedisPlannerStore
from tests.unit.planner.snapshot_rig import WINDOW_MS, busy_batch, worker


@pytest.mark.parametrize(
    ("at_rest", "since_s", "due"), [(False, 0.0, True), (True, 0.2, False), (True, 0.85, False), (True, 0.95, True)]
)
def test_the_planner_decides_every_period_and_once_a_second_while_the_cluster_is_idle(at_rest, since_s, due):
    assert is_due(at_rest=at_rest, since_s=since_s, period_s=0.2) is due


@pytest.mark.parametrize(("same", "since_ms", "news"), [(True, 899, False), (True, 1_000, True), (False, 0, True)])
def test_a_decision_without_changes_is_published_when_its_reasons_change_and_once_a_second(same, since_ms, news):
    assert is_news(same_reasons=same, since_ns=since_ms * MS) is news


def test_without_workers_the_decision_changes_nothing_and_says_why(planner):
    (kept,) = planner.state.decide(at(0)).decisions
    assert (kept.action, kept.reason_code, kept.reason) == (
        ACTION_KEEP, "no_workers", "no workers are registered",
    )  # fmt: skip


class Keeper:
    """A Redis that is there or is not."""

    def __init__(self):
        self.mode = self.limits = None
        self.away = False

    async def keep(self, mode):
        self.mode = None if self.away else mode
        return not self.away

    async def keep_limits(self, written):
        self.limits = None if self.away else written
        return not self.away


class Planner:
    """A planner without its stores, whose data are entered directly."""

    def __init__(self, kept_decisions=5):
        self.clock = ManualClock(at(0))
        self.state = PlannerState(
            Identity("planner-0", at(0), MODE_ADVISORY),
            lag_ns=0,
            window_ns=WINDOW_MS * MS,
            kept_decisions=kept_decisions,
        )
        self.telling = Telling()
        registry = CollectorRegistry()
        registry.register(PlannerCollector(self.state, self.clock))
        self.bus = RecordingBus()
        self.keeper = Keeper()
        modes = ModeApi(Admin(self.state, self.keeper, self.bus, self.clock, token="secret"))
        limits = LimitsApi(Admin(self.state, self.keeper, self.bus, self.clock, token="secret"))
        app = make_api(self.state, self.clock, registry, modes, limits)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://planner")

    def hear(self, batch, now_ns):
        """Receive a worker's report by way of a metrics service."""
        self.state.take_loads(self.telling.loads([batch], now_ns), now_ns)


@pytest.fixture
async def planner():
    service = Planner()
    async with service.http:
        yield service


async def test_without_a_catalogue_its_routes_name_the_command_that_enables_one():
    app = make_web_app("test", "", not_ready=lambda: None, metrics=CollectorRegistry())
    app.include_router(no_catalogue())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://planner") as http:
        answers = [
            await http.get("/v1/models"),
            await http.put("/v1/models/a/b", json={}),
            await http.delete("/v1/models/a"),
        ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert all("`fulcrum up --pool 2 --model A --model B`" in answer.text for answer in answers)


async def test_workers_are_returned_with_words_and_their_latest_queue_depths(planner):
    planner.clock.advance_ms(WINDOW_MS)
    busy, silent = worker("m", "mixed", gpus=0), worker("p", "prefill", state=WORKER_STATE_DRAINING)
    planner.state.take_workers([busy, silent], planner.clock.now_ns())
    planner.hear(
        busy_batch(busy, 500, load=Load(running=3, waiting=2, preemptions=1, recomputed_tokens=9)),
        planner.clock.now_ns(),
    )
    mixed, prefill = (await planner.http.get("/v1/workers")).json()
    assert mixed == {
        "id": "m",
        "pid": 42,
        "node": "node-a",
        "role": "mixed",
        "budget_tokens": 64,
        "engine": "sim",
        "model": "sim",
        "device": "sim:h100",
        "gpus": 1,
        "epoch": 3,
        "started_unix_ns": 1,
        "moves": 2,
        "moved_unix_ns": 0,
        "moved_by": "",
        "moved_because": "",
        "state": "ready",
        "unpaired": "",
        "running": 3,
        "waiting": 2,
        "preemptions": 1,
        "recomputed_tokens": 9,
        "pool_faults": 0,
        "address": "127.0.0.1:1",
        "group": "",
        "coverage": 1.0,
        "cpu_wait": None,
        "life": "running",
        "life_since_unix_ms": 0,
    }
    assert (prefill["role"], prefill["state"], prefill["running"], prefill["coverage"]) == (
        "prefill",
        "draining",
        None,
        0,
    )


async def lives(planner):
    listed = (await planner.http.get("/v1/workers")).json()
    return {each["id"]: (each["life"], each["life_since_unix_ms"]) for each in listed}


async def test_a_worker_that_does_not_report_beside_others_is_listed_as_silent_then_as_back(planner):
    frozen, other = worker("p", "prefill"), worker("d", "decode")
    planner.state.take_workers([frozen, other], planner.clock.now_ns())
    began_ms = planner.clock.now_ns() // MS

    def hear(each):
        now_ms = planner.clock.now_ns() // MS - began_ms
        sent = step_batch(now_ms // 500, (now_ms - 500, now_ms), [], worker=each.id, incarnation=1)
        planner.hear(sent, planner.clock.now_ns())

    for _ in range(3):
        planner.clock.advance_ms(500)
        hear(frozen)
        hear(other)
    assert {each[0] for each in (await lives(planner)).values()} == {"running"}
    for _ in range(5):
        planner.clock.advance_ms(500)
        hear(other)
    assert (await lives(planner))["p"] == ("silent", began_ms + 1_500)
    assert (await lives(planner))["d"][0] == "running"
    planner.state.take_workers([other], planner.clock.now_ns())  # its lease runs out meanwhile
    planner.state.take_workers([frozen, other], planner.clock.now_ns())
    assert (await lives(planner))["p"][0] == "silent"
    planner.clock.advance_ms(500)
    hear(frozen)
    assert (await lives(planner))["p"] == ("back", began_ms + 4_500)


async def test_a_restarted_worker_is_restarting_until_it_reports(planner):
    first, other = worker("p", "prefill"), worker("d", "decode")
    planner.state.take_workers([first, other], planner.clock.now_ns())
    planner.clock.advance_ms(500)
    planner.hear(busy_batch(first, 500), planner.clock.now_ns())
    planner.hear(busy_batch(other, 500), planner.clock.now_ns())
    again = worker("p", "prefill")
    again.incarnation = planner.clock.now_ns()
    planner.state.take_workers([again, other], planner.clock.now_ns())
    assert (await lives(planner))["p"] == ("restarting", again.incarnation // MS)


async def test_decisions_are_returned_newest_first_and_bounded(planner):
    planner.clock.advance_ms(WINDOW_MS)
    prefill, decode = worker("p", "prefill"), worker("d", "decode")
    planner.state.take_workers([prefill, decode], planner.clock.now_ns())
    planner.hear(busy_batch(decode, 250), planner.clock.now_ns())
    assert len(planner.state.decide(planner.clock.now_ns()).decisions) == 1
    assert planner.state.decide(planner.clock.now_ns()).decisions == [], "it said so a moment ago"
    for turn in range(7):
        planner.clock.advance_ms(1_000)
        planner.state.set_mode(MODE_OFF if turn % 2 else MODE_ADVISORY, "me", planner.clock.now_ns())
    planner.clock.advance_ms(1_000)
    for _ in range(2):
        planner.clock.advance_ms(1_000)
        planner.state.decide(planner.clock.now_ns())
    answer = (await planner.http.get("/v1/decisions", params={"limit": 3})).json()
    assert [decision["sequence"] for decision in answer] == [10, 8, 7], "of decisions that say the same, the newest"
    assert len((await planner.http.get("/v1/decisions", params={"limit": 1000})).json()) == 5
    newest = answer[0]
    assert (newest["action"], newest["mode"], newest["reason_code"]) == ("keep", "advisory", "unknown")
    assert newest["time"] == "2023-11-14T22:13:31.000Z"
    assert [(pool["role"], pool["busy"]) for pool in newest["pools"]] == [("prefill", None), ("decode", None)]
    by_id = (await planner.http.get(f"/v1/decisions/{newest['id']}")).json()
    assert by_id == (await planner.http.get("/v1/decisions/10")).json() == newest
    missing = await planner.http.get("/v1/decisions/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "decision_not_found")


@pytest.mark.parametrize(
    ("reported_ms", "load", "rests"),
    [
        (0, None, True),
        (100, None, False),
        (0, Load(running=1), False),
        (0, Load(waiting=1), False),
        (None, None, False),
    ],
    ids=["all idle", "a step ran", "a sequence runs", "one waits", "one is not heard"],
)
def test_a_cluster_is_idle_while_every_worker_reports_no_work(planner, reported_ms, load, rests):
    prefill, decode = worker("p", "prefill"), worker("d", "decode")
    planner.state.take_workers([prefill, decode], at(0))
    planner.hear(busy_batch(prefill, 0), at(WINDOW_MS))
    if reported_ms is not None:
        planner.hear(busy_batch(decode, reported_ms, load=load), at(WINDOW_MS))
    assert not planner.state.at_rest  # nothing has been decided yet
    planner.state.decide(at(WINDOW_MS))
    assert planner.state.at_rest is rests


@pytest.mark.parametrize("news", ["work", "role", "worker", "mode"])
def test_news_end_the_idle_state_before_the_next_decision(planner, news):
    prefill, decode = worker("p", "prefill"), worker("d", "decode")
    planner.state.take_workers([prefill, decode], at(0))
    for each in (prefill, decode):
        planner.hear(busy_batch(each, 0), at(WINDOW_MS))
    planner.state.decide(at(WINDOW_MS))
    planner.state.take_workers([prefill, decode], at(WINDOW_MS))
    assert planner.state.at_rest
    if news == "work":
        batch = step_batch(2, (WINDOW_MS, WINDOW_MS + 100), [step(WINDOW_MS, WINDOW_MS + 9, decode=1)], worker="d")
        planner.hear(batch, at(WINDOW_MS + 100))
    elif news == "mode":
        planner.state.set_mode(MODE_ADVISORY, "me", at(WINDOW_MS))
    else:
        other = worker("d", "prefill") if news == "role" else worker("new", "decode")
        planner.state.take_workers([prefill, other], at(WINDOW_MS))
    assert not planner.state.at_rest


async def test_role_moves_are_published_with_actor_and_reason_whoever_made_them(planner):
    now_ns, before = planner.clock.now_ns(), worker("d", "decode")
    assert planner.state.take_workers([before], now_ns) == []
    after = worker("d", "prefill")
    after.assignment.epoch = 5
    after.role_change.CopyFrom(RoleChange(actor="fulcrum role", reason="a spike", unix_ns=now_ns))
    (moved,) = planner.state.take_workers([after, worker("new", "decode")], now_ns)
    assert planner.state.take_workers([after], now_ns) == []
    assert (moved.action, moved.worker_id, moved.assignment.epoch) == (ACTION_ROLE_MOVED, "d", 5)
    assert (moved.actor, moved.worker_incarnation) == ("fulcrum role", 1)
    (answer,) = (await planner.http.get("/v1/decisions")).json()
    assert (answer["action"], answer["worker"], answer["role"], answer["epoch"]) == ("role_moved", "d", "prefill", 5)
    assert answer["reason"] == "fulcrum role moved d to prefill: a spike"
    (listed,) = (await planner.http.get("/v1/workers")).json()
    assert (listed["moves"], listed["moved_unix_ns"], listed["moved_by"]) == (4, now_ns, "fulcrum role")
    restarted = worker("d", "decode", incarnation=2)
    assert planner.state.take_workers([restarted], now_ns) == []


async def test_a_decode_worker_that_the_planner_lends_prompts_is_still_a_decode_worker(planner):
    lent, chosen = worker("d", "mixed"), worker("m", "mixed")
    lent.role_change.CopyFrom(RoleChange(actor="planner-0", unix_ns=at(0)))
    chosen.role_change.CopyFrom(RoleChange(actor="fulcrum role", unix_ns=at(0)))
    planner.state.take_workers([lent, chosen, worker("s", "mixed")], at(0))
    found = {
        each["id"]: (each["role"], each["budget_tokens"]) for each in (await planner.http.get("/v1/workers")).json()
    }
    assert found == {"d": ("decode", 64), "m": ("mixed", 64), "s": ("mixed", 64)}


async def test_the_mode_is_set_with_the_token_published_and_stored(planner):
    assert (await planner.http.get("/v1/mode")).json() == {"mode": "advisory", "kept": True}
    off = {"mode": "off", "actor": "tester"}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert (await planner.http.put("/v1/mode", json=off, headers=headers)).status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert (await planner.http.put("/v1/mode", json={"mode": "on"}, headers=headers)).status_code == 400
    assert planner.bus.published == []
    assert (await planner.http.put("/v1/mode", json=off, headers=headers)).json() == {"mode": "off", "kept": True}
    assert planner.keeper.mode == MODE_OFF
    (moved,) = planner.bus.published
    assert (moved.action, moved.mode, moved.actor) == (ACTION_SET_MODE, MODE_OFF, "token (tester)")
    (answer,) = (await planner.http.get("/v1/decisions")).json()
    assert (answer["action"], answer["mode"], answer["worker"]) == ("set_mode", "off", "")
    planner.keeper.away = True
    answer = (await planner.http.put("/v1/mode", json={"mode": "advisory"}, headers=headers)).json()
    assert answer == {"mode": "advisory", "kept": False}


async def test_the_mode_is_only_set_by_a_json_body(planner):
    token = {"authorization": "Bearer secret"}
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "br"}):
        answer = await planner.http.put("/v1/mode", content=b'{"mode": "off"}', headers={**token, **headers})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert planner.bus.published == []


@pytest.mark.system
async def test_the_mode_survives_a_restart_only_in_redis(redis, cluster):
    first, second = RedisPlannerStore(redis.url, cluster), RedisPlannerStore(redis.url, cluster)
    assert await first.load() == StoredPlannerSettings(None, None)
    assert await first.keep(MODE_OFF) and await first.keep_limits("{}")
    assert await second.load() == StoredPlannerSettings(MODE_OFF, "{}")
    away = RedisPlannerStore("redis://127.0.0.1:1/0", cluster)
    assert (await away.load(), await away.keep(MODE_OFF)) == (None, False)
    for store in (first, second, away):
        await store.close()


async def test_an_invalid_limit_is_a_400_that_names_the_parameter(planner):
    for limit in ("0", "1001", "many"):
        answer = await planner.http.get("/v1/decisions", params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_readiness_names_the_silent_source_and_earlier_knowledge_stays(planner):
    assert "registry has not answered" in (await planner.http.get("/readyz")).json()["reason"]
    registered = worker("d", "decode")
    planner.state.take_workers([registered], planner.clock.now_ns())
    planner.hear(busy_batch(registered, 250), planner.clock.now_ns())
    assert (await planner.http.get("/readyz")).json() == {"status": "ready"}
    planner.clock.advance_ms(4000)
    answer = await planner.http.get("/readyz")
    assert answer.status_code == 503
    assert "registry has been silent for 4.0 s" in answer.json()["reason"]
    assert "no telemetry has come for 4.0 s" in answer.json()["reason"]
    assert [each["id"] for each in (await planner.http.get("/v1/workers")).json()] == ["d"]
    for path in ("/healthz", "/health"):
        assert (await planner.http.get(path)).json() == {"status": "ok"}


async def test_planner_metrics_are_named_in_the_one_module(planner):
    planner.state.take_workers([worker("d", "decode")], planner.clock.now_ns())
    planner.state.decide(planner.clock.now_ns())
    text = (await planner.http.get("/metrics")).text
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples[metric_names.DECISIONS_TOTAL] == 1
    assert samples[metric_names.PLANNER_WORKERS] == 1
    assert set(samples) <= {value for name, value in vars(metric_names).items() if name.isupper()}


async def test_a_worker_with_incompatible_kv_is_named_and_counted(planner):
    workers = [worker("d", "decode"), worker("e", "decode"), worker("p", "prefill")]
    workers[1].capabilities.kv_layout = "sim/block32"
    planner.state.take_workers(workers, planner.clock.now_ns())
    answer = {each["id"]: each["unpaired"] for each in (await planner.http.get("/v1/workers")).json()}
    assert (answer["d"], answer["p"]) == ("", "") and "sim here, nothing there" in answer["e"]
    assert f"{metric_names.PLANNER_UNPAIRED_WORKERS} 1.0" in (await planner.http.get("/metrics")).text
