"""Tests of `/v1/status`, its gauges and its alerts, over the real app and state."""

import re

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts import metric_names
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, Assignment, Load, ModelTarget
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_ROLE_MOVED,
    MODE_AUTO,
    Decision,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_OK,
    GatewayQueues,
    Interval,
    ModelQueue,
    RequestEvent,
)
from libs.contracts.roles import NO_REASON
from libs.contracts.topics import DECISIONS, QUEUES, REQUESTS, STEPS
from libs.perfmodel.learner import FittedModel, KindFit
from libs.perfmodel.wire import step_time_message
from libs.policy.alerts.rules import Name
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.state import VerdictLimits
from libs.telemetry.columns import prefill_shares
from libs.testing.wait import ManualClock
from libs.testing.workers.telemetry import MS, at, step, step_batch, write_windows
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.prometheus import VerdictCollector
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import cluster_status, status_router
from services.metrics.status.score import promise_score

RAN = KindFit(steps=100)
MODEL = StepTimeModel(8e6, 6e4, 0.0, 15e6, 3e5, 25.0, interference=1.0)
LIVE_LAG_NS = 50 * MS


class Cluster:
    """Two prefill and four decode workers whose telemetry and queues come in tenths of a second."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self.verdicts = VerdictEvaluator(
            self.state, VerdictLimits(), ttft_limit_ns=5_000 * MS, tpot_ns=50 * MS, lag_ns=LIVE_LAG_NS
        )
        self.registry.register(VerdictCollector(self.verdicts))
        settings = MetricsSettings(id="m", alert_for_ms=1_000, alert_clear_ms=1_000)
        self.alerts = AlertEvaluator(self.state, settings.alert_limits(), lag_ns=LIVE_LAG_NS)
        self.alerts.judged = self.verdicts.judged
        self.tenth = 0
        self.arrived = 0
        self.moved: set[str] = set()
        """Workers moved to prefill by another actor."""
        self.on_queues = lambda queues, now_ns: None
        """A consumer that receives gateways' queues too."""
        self.denied = 0
        self.frozen = frozenset()
        """Workers that are frozen, and report nothing."""
        self.sent = [0] * 6
        self.since = {}
        """The time at which each of them stopped, in ms."""

    def _take(self, topic, value):
        now_ns = at(100 * self.tenth)
        record = Record(topic, "key", value, 0, 0)
        self.state.take(record, now_ns)
        self.verdicts.take(record, now_ns)

    async def run(
        self, tenths, *, running=4, waiting_tokens=0, late=False, come=0, awaiting_ready=0, starved=False, batch=0,
        refused=0, awaited=None, cpu_wait=None, encodes=False,
    ):  # fmt: skip
        """Run decode workers with that many sequences each, and prompt tokens waiting at the gateway and arriving."""
        for _ in range(tenths):
            start, self.tenth = 100 * self.tenth, self.tenth + 1
            self.arrived += come
            for number in range(6):
                cover = (start, start + 100)
                if f"gpu-{number}" in self.frozen:
                    self.since.setdefault(f"gpu-{number}", start)
                    continue
                role = "prefill" if number < 2 or f"gpu-{number}" in self.moved else "decode"
                load = Load(running=running if role == "decode" else 1, free_kv_blocks=900)
                if role == "decode" and awaiting_ready:
                    load.awaiting_kv = load.awaiting_ready_kv = awaiting_ready
                    load.ready_kv_since_unix_ns = at(start - 1_500)
                ran = [] if starved and role == "decode" else [step(start + 10, start + 40, decode=running or 1)]
                if (stopped := self.since.pop(f"gpu-{number}", None)) is not None:  # its step took all that time
                    ran, cover = [step(stopped, start + 40, decode=running or 1)], (stopped, start + 100)
                if encodes and role == "prefill":
                    ran.append(step(start + 40, start + 60)._replace(prefill_sequences=1, encoded_images=1))
                self.sent[number] += 1
                sent = step_batch(self.sent[number], cover, ran, worker=f"gpu-{number}", role=role, load=load)
                if cpu_wait is not None:
                    sent.sched_delay_ns = round(cpu_wait * 100 * MS)
                if starved and role == "decode":
                    sent.starved.append(Interval(start_unix_ns=at(start), end_unix_ns=at(start + 50)))
                sent.kv_blocks, sent.block_size_tokens, sent.chunk_tokens, sent.max_sequences = 1_000, 16, 512, 64
                sent.step_time.CopyFrom(step_time_message(FittedModel(MODEL, RAN, RAN, RAN)))
                self._take(STEPS, sent)
            queue = ModelQueue(model="sim", arrived_tokens=self.arrived, batch_bound=batch)
            if waiting_tokens:
                queue.prefill_requests, queue.prefill_tokens = 9, waiting_tokens
                queue.hopeful_tokens = 0 if late else waiting_tokens
            if awaited is not None:
                queue.awaited.add(mean_ms=awaited[0], requests=awaited[1])
            reported_ns = at(100 * self.tenth)
            self.denied += refused
            queues = GatewayQueues(gateway_id="g", incarnation=1, told_unix_ns=reported_ns, queues=[queue])
            queues.posts = self.denied + self.denied // 2
            if self.denied:
                queues.refused.add(status=403, code="permission_denied", count=self.denied)
                queues.refused.add(status=429, code="queue_full", count=self.denied // 2)
            self._take(QUEUES, queues)
            self.on_queues(queues, reported_ns)
            write_windows(self.state.history, 0, 100 * self.tenth - 50)
            await self.alerts.look(reported_ns)
            await self.verdicts.look(reported_ns)

    def status(self, *, age_ms=80):
        now_ns = at(100 * self.tenth)
        return cluster_status(
            self.verdicts.seen, self.verdicts.planner.status(now_ns), self.verdicts.traffic.traffic(now_ns),
            now_ns=now_ns, age_ms=age_ms, not_live=None, waiting={"sim": 9}, alerts_firing=0,
        )  # fmt: skip

    def fired(self):
        return [(each.name, each.reason) for each in self.alerts.book.firing()]


@pytest.fixture
def cluster():
    return Cluster()


async def test_a_frozen_worker_is_named_first_within_three_seconds_and_is_not_slow_later(
    cluster,
):
    def lives():
        return {each.id: each.life for each in cluster.status().workers}

    await cluster.run(20)
    assert set(lives().values()) == {"running"}
    cluster.frozen = {"gpu-3"}
    await cluster.run(19)
    assert cluster.status().verdict.code == "balanced"
    await cluster.run(11)
    verdict = cluster.status().verdict
    assert (verdict.code, verdict.causes[0].workers, verdict.action) == ("silent_worker", ["gpu-3"], None)
    assert verdict.sentence.startswith("Silent: gpu-3 has reported nothing for 3.0 s; 1 of 4 decode workers does not")
    assert lives() == {f"gpu-{n}": "silent" if n == 3 else "running" for n in range(6)}
    model = cluster.status().models[0]
    assert (model.prefill.workers, model.decode.workers) == (2, 3)
    await cluster.run(30)
    assert cluster.status().verdict.code == "silent_worker"
    cluster.frozen = frozenset()
    codes = []
    for _ in range(60):
        await cluster.run(1)
        codes.append(cluster.status().verdict.code)
        if len(codes) == 5:
            assert lives()["gpu-3"] == "back"
    assert set(codes[2:]) == {"balanced"}
    assert lives()["gpu-3"] == "running"
    assert cluster.status().models[0].decode.workers == 4


async def test_a_silent_worker_precedes_the_shortage_that_it_causes(cluster):
    await cluster.run(10)
    cluster.frozen = {"gpu-0"}
    await cluster.run(40, waiting_tokens=200_000, come=4_000)
    codes = [each.code for each in cluster.status().verdict.causes]
    assert codes[0] == "silent_worker" and len(codes) == 2


async def test_silence_is_named_if_too_few_workers_report_to_judge_the_rest(cluster):
    await cluster.run(10)
    cluster.frozen = {f"gpu-{number}" for number in range(1, 6)}
    await cluster.run(30)
    status = cluster.status()
    assert not status.models[0].known
    assert status.verdict.code == "silent_worker"
    assert "1 of 2 prefill workers" in status.verdict.sentence or "4 of 4 decode workers" in status.verdict.sentence


async def test_no_worker_is_named_silent_while_all_are(cluster):
    await cluster.run(10)
    cluster.frozen = {f"gpu-{number}" for number in range(6)}
    await cluster.run(40)
    assert [each.code for each in cluster.status().verdict.causes] == []
    assert {each.life for each in cluster.status().workers} == {"running"}


async def test_a_flood_of_prompts_is_named_with_the_command_that_relieves_it_and_fires_one_alert(cluster):
    await cluster.run(10)
    assert cluster.status().verdict.code == "balanced"
    await cluster.run(25, waiting_tokens=200_000, come=4_000)
    status = cluster.status()
    model = status.models[0]
    assert (status.verdict.code, model.verdict) == ("prefill_bound", "prefill_bound")
    assert model.prefill.pressure > 1 > model.cluster_pressure
    assert model.prefill.waiting_prompt_tokens == 200_000
    assert status.verdict.action.command == f"fulcrum role {' '.join(status.verdict.action.workers)} prefill"
    assert status.verdict.action.pressure_then < model.prefill.pressure
    await cluster.run(15, waiting_tokens=300_000, come=4_000)
    fired = cluster.fired()
    assert [name for name, _ in fired] == [Name.IMBALANCE]
    assert fired[0][1].startswith("Prefill-bound: pressure ")
    action = cluster.status().verdict.action
    assert cluster.alerts.book.firing()[0].command == action.command
    await cluster.run(40)
    alert = cluster.alerts.book.firing()[0]
    assert alert.clearing and not alert.command, "an ended cause has no command"


async def test_a_backlog_beyond_the_target_is_no_balance_even_if_all_of_it_is_late(cluster):
    await cluster.run(25, waiting_tokens=20_000, late=True, come=100)
    verdict = cluster.status().verdict
    assert verdict.code == "balanced", "less than a second of work"
    assert verdict.sentence.endswith(" A pressure of 1 would just meet the targets: TTFT 5 s, TPOT 50 ms.")
    await cluster.run(25, waiting_tokens=200_000, late=True, come=100)
    status = cluster.status()
    assert status.verdict.code == "prefill_bound" and status.verdict.action.command
    assert "200k prompt tokens wait, 7.6 s of work against a TTFT target of 5 s" in status.verdict.sentence
    await cluster.run(25, waiting_tokens=800_000, late=True, come=100)
    verdict = cluster.status().verdict
    assert verdict.code == "too_small", "no roles of six workers compute it within 5 s"
    assert "800k prompt tokens wait, 30 s of work against a TTFT target of 5 s" in verdict.sentence
    await cluster.run(60, come=100)
    assert cluster.status().verdict.code == "balanced"


async def test_decodes_are_judged_by_the_planners_target_so_that_both_agree(cluster):
    await cluster.run(10)
    own = cluster.status().models[0].decode.tpot_target_ms
    decision = Decision(decided_unix_ns=at(900), targets=[ModelTarget(model="sim", tpot_ns=20_000_000)])
    cluster._take(DECISIONS, decision)
    await cluster.run(10)
    assert cluster.status().models[0].decode.tpot_target_ms == 20 != own
    await cluster.run(60)
    assert cluster.status().models[0].decode.tpot_target_ms == own, "it no longer reports"


async def test_full_kv_of_prefill_workers_does_not_count_for_decode_workers(cluster):
    await cluster.run(10)  # each of the six workers holds 100 of its 1,000 blocks
    assert cluster.status().models[0].decode.kv_used == pytest.approx(0.1)


async def test_lines_of_a_batch_job_add_no_pressure(cluster):
    await cluster.run(30, running=60, batch=240)
    status = cluster.status()
    assert (status.verdict.code, status.models[0].decode.pressure) == ("balanced", 0)
    await cluster.run(30, running=60)
    assert cluster.status().models[0].decode.pressure > 0.8


async def test_encoding_images_is_shown_as_a_part_of_busy_time(cluster):
    await cluster.run(30)
    assert (cluster.status().models[0].prefill.encode, cluster.status().models[0].decode.encode) == (0, 0)
    await cluster.run(30, encodes=True)
    model = cluster.status().models[0]
    assert model.prefill.busy == pytest.approx(0.5, abs=0.03)
    assert model.prefill.encode == pytest.approx(0.2, abs=0.02)
    assert model.decode.encode == 0


async def test_encoding_images_leaves_less_time_for_prompts_and_the_verdict_names_it(cluster):
    await cluster.run(30, waiting_tokens=20_000)
    before = cluster.status()
    assert "images" not in before.verdict.sentence
    await cluster.run(30, waiting_tokens=20_000, encodes=True)
    after = cluster.status()
    assert after.models[0].prefill.pressure > 1.5 * before.models[0].prefill.pressure
    assert "; images take 100% of prefill's time" in after.verdict.sentence


async def test_waiting_for_prompts_still_in_prefill_is_starvation_and_not_kv_wait(cluster):
    await cluster.run(30, running=1, starved=True)
    decode = cluster.status().models[0].decode
    assert decode.starved == pytest.approx(0.5, abs=0.03)
    assert decode.kv_wait == 0
    assert cluster.status().verdict.code == "balanced"


async def test_ready_kv_that_is_always_in_transfer_is_a_slow_link(cluster):
    await cluster.run(10)
    await cluster.run(30, running=2, awaiting_ready=3)
    status = cluster.status()
    assert status.verdict.code == "slow_link"
    assert status.verdict.causes[0].workers == ["gpu-2", "gpu-3", "gpu-4", "gpu-5"]
    await cluster.run(15, running=2, awaiting_ready=3)
    assert [name for name, _ in cluster.fired()] == [Name.KV_TRANSFER_BOUND]


async def test_late_kv_while_workers_wait_for_a_cpu_is_a_lack_of_cores_and_not_a_slow_link(cluster):
    await cluster.run(10, cpu_wait=0.02)
    await cluster.run(45, running=2, awaiting_ready=3, cpu_wait=0.4)
    verdict = cluster.status().verdict
    assert (verdict.code, [each.code for each in verdict.causes]) == ("short_of_cpu", ["short_of_cpu"])
    assert "wait for a CPU up to 40% of the time" in verdict.sentence
    assert [name for name, _ in cluster.fired()] == [Name.SHORT_OF_CPU]
    await cluster.run(60, running=2, awaiting_ready=3, cpu_wait=0.02)
    assert cluster.status().verdict.code == "slow_link", "its cores are idle"


async def test_old_figures_are_never_shown_as_current(cluster):
    await cluster.run(30, waiting_tokens=200_000, come=4_000)
    status = cluster.status(age_ms=7_000)
    assert (status.live, status.verdict.code, status.verdict.action) == (False, "unknown", None)
    assert status.not_live_because == "telemetry is 7.0 s old"


async def test_pressures_and_the_verdict_are_gauges(cluster):
    await cluster.run(30, waiting_tokens=200_000, come=4_000)
    labels = {"model": "sim", "phase": "prefill"}
    assert cluster.registry.get_sample_value(metric_names.PRESSURE, labels) > 1
    firing = {
        code: cluster.registry.get_sample_value(metric_names.VERDICT, {"model": "sim", "code": code})
        for code in ("prefill_bound", "balanced", "too_small")
    }
    assert firing == {"prefill_bound": 1, "balanced": 0, "too_small": 0}


async def test_beside_an_acting_planner_the_sentence_has_its_last_move_and_the_reason_in_place_of_advice(cluster):
    await cluster.run(10)
    await cluster.run(25, waiting_tokens=300_000, come=4_000)
    assert "Moving" in cluster.status().verdict.sentence
    auto = {"planner_id": "p", "decided_unix_ns": at(100 * cluster.tenth), "mode": MODE_AUTO}
    moved = "p moved gpu-1 to decode: decode pressure 1.9 on 4 decode workers; moving 1 prefill worker leaves 0.9"
    cluster._take(DECISIONS, Decision(action=ACTION_KEEP, **auto))
    cluster._take(DECISIONS, Decision(action=ACTION_ROLE_MOVED, reason=moved, actor="p", worker_id="gpu-1",
                                      assignment=Assignment(role=ROLE_MIXED), **auto))  # fmt: skip
    await cluster.run(10, waiting_tokens=300_000, come=4_000)
    verdict = cluster.status().verdict
    assert (verdict.code, verdict.action) == ("prefill_bound", None)
    assert "Moving" not in verdict.sentence and "leaves" not in verdict.sentence
    assert verdict.sentence.endswith(
        "p moved gpu-1 to decode 1 s ago; its reason then: decode pressure 1.9 on 4 decode workers."
    )
    assert [each.now for each in cluster.alerts.book.firing()] == [verdict.causes[0].sentence]


@pytest.mark.parametrize(
    ("given", "shown"), [(NO_REASON, ""), ("more prompts at noon", " with the reason: more prompts at noon")]
)
async def test_a_move_by_a_person_is_shown_with_its_reason_if_one_was_given(cluster, given, shown):
    await cluster.run(10)
    auto = {"planner_id": "p", "decided_unix_ns": at(100 * cluster.tenth), "mode": MODE_AUTO}
    cluster._take(DECISIONS, Decision(action=ACTION_KEEP, **auto))
    moved = {"worker_id": "gpu-1", "assignment": Assignment(role=ROLE_MIXED), "actor": "anna"}
    why = f"anna moved gpu-1 to decode: {given}"
    cluster._take(DECISIONS, Decision(action=ACTION_ROLE_MOVED, reason=why, **moved, **auto))
    await cluster.run(25, waiting_tokens=300_000, come=4_000)
    sentence = cluster.status().verdict.sentence
    assert re.search(rf" anna moved gpu-1 to decode \d+ s ago{shown}\.$", sentence), sentence


async def test_the_end_of_an_imbalance_ends_its_alert_and_verdict(cluster):
    await cluster.run(10)
    await cluster.run(40, waiting_tokens=300_000, come=4_000)
    assert cluster.fired()
    await cluster.run(60)
    assert (cluster.fired(), cluster.status().verdict.code) == ([], "balanced")


async def test_advice_that_is_followed_is_scored(cluster):
    await cluster.run(10)
    await cluster.run(25, waiting_tokens=200_000, come=4_000)
    action = cluster.status().verdict.action
    cluster.moved |= set(action.workers)
    await cluster.run(30, come=1_000)
    score = promise_score(cluster.verdicts.promises)
    assert (score.of, score.promises[0].id, score.promises[0].command) == (1, action.id, action.command)
    assert score.promises[0].kept == (action.pressure_least <= score.promises[0].came <= action.pressure_most)
    assert [(each.code, each.of) for each in score.by_cause] == [("prefill_bound", 1)]
    backlog = next(each for each in score.outcomes if each.figure == "backlog")
    assert (backlog.least, backlog.most) == (action.backlog_least_s, action.backlog_most_s)
    assert backlog.kept == (backlog.least <= backlog.came <= backlog.most)
    assert {each.figure: each.of for each in score.by_figure} == {"pressure": 1, "backlog": 1}


async def test_ttft_of_requests_that_arrive_after_the_backlog_is_scored(cluster):
    await cluster.run(10)
    await cluster.run(25, waiting_tokens=200_000, come=4_000)
    action = cluster.status().verdict.action
    cluster.moved |= set(action.workers)
    await cluster.run(30, come=1_000)
    for number in range(20):
        arrival_ns = at(100 * cluster.tenth + number)
        event = RequestEvent(model="sim", arrival_unix_ns=arrival_ns, ttft_ns=(100 + number) * MS, outcome=OUTCOME_OK)
        cluster._take(REQUESTS, event)
        event.service_class = "batch"
        event.ttft_ns = 60_000 * MS
        cluster._take(REQUESTS, event)
    await cluster.run(300, come=1_000)
    (ttft,) = [each for each in promise_score(cluster.verdicts.promises).outcomes if each.figure == "ttft"]
    assert (ttft.came, ttft.least, ttft.most) == (118.0, action.ttft_p95_least_ms, action.ttft_p95_most_ms)


async def answered(cluster):
    app = FastAPI()
    clock = ManualClock(at(100 * cluster.tenth))
    app.include_router(status_router(cluster.state, cluster.verdicts, cluster.alerts.book, clock))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m") as http:
        return (await http.get("/v1/status")).json()


async def test_a_flood_of_refusals_is_shown_within_two_seconds_is_not_idleness_and_fires_an_alert(cluster):
    await cluster.run(20)
    assert (await answered(cluster))["traffic"]["refused"] == []
    await cluster.run(20, refused=2)
    status = await answered(cluster)
    assert status["traffic"]["rejected_per_s"] == pytest.approx(20, rel=0.1)
    assert status["traffic"]["refused"] == [
        {"status": 403, "code": "permission_denied", "per_s": pytest.approx(20, rel=0.1)},
        {"status": 429, "code": "queue_full", "per_s": pytest.approx(10, rel=0.1)},
    ]
    assert status["traffic"]["requests_per_s"] == 0, "none of them became a request with an event"
    assert status["verdict"]["code"] == status["models"][0]["verdict"] == "refused"
    assert status["verdict"]["sentence"].startswith("Requests are refused: 40 of 60 requests in the last ")
    firing = cluster.registry.get_sample_value(metric_names.VERDICT, {"model": "sim", "code": "refused"})
    calm = cluster.registry.get_sample_value(metric_names.VERDICT, {"model": "sim", "code": "balanced"})
    assert (firing, calm) == (1, 0)
    await cluster.run(20, refused=2)
    assert [name for name, _ in cluster.fired()] == [Name.REQUESTS_REFUSED]
    await cluster.run(70)
    status = await answered(cluster)
    assert (status["verdict"]["code"], status["traffic"]["rejected_per_s"]) == ("balanced", 0)
    assert cluster.fired() == []


async def test_waiting_requests_count_in_the_time_to_first_token_while_none_has_ended(cluster):
    await cluster.run(20, awaited=(28_000, 92))
    traffic = (await answered(cluster))["traffic"]
    assert (traffic["awaited"], traffic["ttft_p50_ms"], traffic["ttft_p95_ms"]) == (92, 28_000, 28_000)
    await cluster.run(5)
    traffic = (await answered(cluster))["traffic"]
    assert (traffic["awaited"], traffic["ttft_p50_ms"]) == (0, None)
