"""What each alert fires on and what it says, over real snapshots."""

from collections import deque

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    GatewayQueues,
    ModelQueue,
    RequestEvent,
)
from libs.contracts.topics import QUEUES, REQUESTS, STEPS
from libs.policy.alerts.burn import WINDOWS_S, burn_conditions, duration
from libs.policy.alerts.pools import advice, amount
from libs.policy.alerts.rules import ON_TELEMETRY, Condition, Name, make_rules
from libs.policy.alerts.snapshot import Burn, PhasePool, RequestCount, Snapshot, WorkerReport
from libs.policy.alerts.state_machine import AlertStateMachine, Transition
from libs.policy.alerts.store import AlertStore
from libs.policy.alerts.watch import every_ns
from libs.policy.alerts.worker_silence import Hearing
from libs.policy.grade import Grade
from libs.telemetry.worker.split import prefill_shares
from libs.testing.wait import at_once
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.alerts.collect import take_snapshot
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.prometheus import RequestMetrics
from services.metrics.requests.log import RequestLog
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState

SETTINGS = MetricsSettings(alert_for_ms=1_000, alert_clear_ms=2_000, alert_queue_tokens=1_000)


def gateway(**waiting):
    """What a gateway tells, a queue of model "sim"."""
    return GatewayQueues(gateway_id="gw", queues=[ModelQueue(model="sim", **waiting)] if waiting else [])


class Cluster:
    """The service's state and watch over workers that send a batch every 100 ms, all in virtual time."""

    def __init__(self, settings=SETTINGS):
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self.desk = AlertEvaluator(self.state, settings.alert_limits(), lag_ns=0)
        self.now_ms = 0
        self.sequences = {}
        self.under_way = deque()
        """(when it comes, record) of what the reader has not come to."""
        self.told = []
        self.desk.observers.append(self.told.extend)

    def run(self, seconds, *workers, gateways=(), behind_ms=0):
        """Each worker is (id, role, busy share, load) and what else `step_batch` takes; returns what changed. The
        reader comes to telemetry so late as is said."""
        before = len(self.told)
        for _ in range(round(seconds * 10)):
            start_ms, self.now_ms = self.now_ms, self.now_ms + 100
            for worker_id, role, busy, load, *more in workers:
                number = self.sequences[worker_id] = self.sequences.get(worker_id, -1) + 1
                kind = {"prefill": 8} if role == "prefill" else {"decode": 1}
                steps = [step(start_ms, start_ms + 100 * busy, **kind)] if busy else []
                batch = step_batch(
                    number, (start_ms, self.now_ms), steps, worker=worker_id, role=role, load=Load(**load)
                )
                for key, value in (more[0] if more else {}).items():
                    if key == "kv_waits":
                        batch.kv_waits.extend(value(start_ms))
                    else:
                        setattr(batch, key, value)
                self.under_way.append((self.now_ms + behind_ms, Record(STEPS, worker_id, batch, 0, 0)))
            if not behind_ms:  # it has caught up
                self.under_way = deque((self.now_ms, record) for _, record in self.under_way)
            while self.under_way and self.under_way[0][0] <= self.now_ms:
                self.state.take(self.under_way.popleft()[1], at(self.now_ms))
            for message in gateways:
                message.told_unix_ns = at(self.now_ms)
                self.state.take(Record(QUEUES, message.gateway_id, message, 0, 0), at(self.now_ms))
            self.state.history.advance(at(self.now_ms))
            at_once(self.desk.look(at(self.now_ms)))
        return [(alert.name, alert.state, alert.labels) for alert in self.told[before:]]

    @property
    def reasons(self):
        return {alert.name: alert.reason for alert in self.desk.book.firing()}


def prefill(busy, waiting=0, tokens=0, worker="prefill-0"):
    return (worker, "prefill", busy, {"running": int(busy > 0), "waiting": waiting, "waiting_prefill_tokens": tokens})


def decode(busy, worker="decode-0", **load):
    return (worker, "decode", busy, load)


def test_a_busy_phase_with_work_waiting_beside_an_idle_one_is_an_imbalance_until_it_is_over():
    cluster = Cluster()
    starved = prefill(0.97, 3, 1200), decode(0.12), decode(0.12, "decode-1"), decode(0.12, "decode-2")
    labels = {"model": "sim", "phase": "prefill"}
    assert cluster.run(4, *starved) == [("FulcrumImbalance", "firing", labels)]
    assert cluster.reasons["FulcrumImbalance"] == (
        "prefill 97% busy with 900 prompt tokens queued, decode 12%: moving 1 of 3 decode workers gives prefill 100% "
        "more and leaves decode 18% busy"
    )
    assert cluster.run(6, prefill(0.5), *starved[1:]) == [("FulcrumImbalance", "resolved", labels)]
    assert cluster.told[-1].ended_because.startswith("prefill 50% busy with 0 prompt tokens queued")


def test_decode_can_be_the_starved_one():
    cluster = Cluster()
    labels = {"model": "sim", "phase": "decode"}
    changed = cluster.run(4, prefill(0.05), decode(1.0, running=64, waiting=5))
    assert changed == [("FulcrumImbalance", "firing", labels)]
    assert cluster.reasons["FulcrumImbalance"].endswith(
        "5 sequences queued, prefill 5%: its only prefill worker cannot move; as mixed it would take prompts too"
    )


def test_a_pool_with_every_place_taken_is_starved_though_the_queue_is_at_the_gateways():
    cluster = Cluster()
    full = (*decode(1.0, running=8), {"max_sequences": 8})
    assert cluster.run(4, prefill(0.1), full)[0][2]["phase"] == "decode"
    assert cluster.reasons["FulcrumImbalance"].startswith("decode 100% busy with all 8 places taken, prefill 10%")


@pytest.mark.parametrize(
    "workers",
    [
        (prefill(1.0), decode(0.1)),
        (prefill(1.0, 3, 900), decode(0.9)),
        (prefill(0.5, 3, 900), decode(0.1)),
        (decode(1.0, waiting=9),),
    ],
    ids=["busy without a queue", "both busy", "room left", "one phase only"],
)
def test_what_is_healthy_is_no_imbalance(workers):
    assert Cluster().run(5, *workers) == []


@pytest.mark.parametrize(("workers", "count"), [(2, 1), (4, 3), (10, 4)])
def test_advice_evens_the_pools_out_and_leaves_a_worker(workers, count):
    starved = PhasePool("m", "prefill", 2, 2, 100, 100, 0, 50, 0, 0)
    other = PhasePool("m", "decode", workers, workers, 100, 0 if workers < 10 else 20, 0, 0, 0, 0)
    assert f"moving {count} of {workers} decode workers" in advice(starved, other)


def test_a_queue_that_grows_is_told_and_one_that_only_stands_is_not():
    cluster = Cluster()
    for second in range(40):
        changed = cluster.run(1, prefill(1.0, 9, 500 * second), decode(0.9))
        if changed:
            break
    assert changed == [("FulcrumQueueGrowing", "firing", {"model": "sim", "phase": "prefill"})]
    assert "a minute" in cluster.reasons["FulcrumQueueGrowing"]
    standing = prefill(1.0, 9, 500 * second)
    assert cluster.run(45, standing, decode(0.9))[-1][1] == "resolved"


@pytest.mark.parametrize(
    ("phase", "queue"),
    [
        ("prefill", lambda second: {"prefill_requests": second, "prefill_tokens": 500 * second}),
        ("decode", lambda second: {"decode_requests": 8 * second}),
    ],
)
def test_a_queue_that_grows_at_gateways_is_told_though_credits_bound_what_workers_hold(phase, queue):
    cluster = Cluster()
    workers = prefill(1.0, 3, 600), decode(0.9)
    assert cluster.run(20, *workers, gateways=[gateway()]) == []
    for second in range(1, 40):
        changed = cluster.run(1, *workers, gateways=[gateway(**queue(second))])
        if changed:
            break
    assert changed == [("FulcrumQueueGrowing", "firing", {"model": "sim", "phase": phase})]


def test_while_telemetry_is_away_a_queue_neither_grows_nor_shrinks():
    cluster = Cluster()
    workers = prefill(1.0, 3, 600), decode(0.9)
    for second in range(40):
        waiting = gateway(prefill_requests=second, prefill_tokens=500 * second)
        if changed := cluster.run(1, *workers, gateways=[waiting]):
            break
    assert changed[0][0] == "FulcrumQueueGrowing"
    assert "FulcrumQueueGrowing" not in {name for name, *_ in cluster.run(120)}  # nobody is heard
    cluster.run(5, *workers, gateways=[waiting])
    assert "FulcrumQueueGrowing" not in {name for name, *_ in cluster.run(50, *workers)}  # gateways are not
    assert "FulcrumQueueGrowing" in cluster.reasons


def test_time_lost_to_kv_transfers_is_told():
    cluster = Cluster()

    def waits(start_ms):
        return step_batch(0, (start_ms, start_ms + 100), waits_ms=[(start_ms + 50, start_ms + 90)]).kv_waits

    changed = cluster.run(4, prefill(0.5), (*decode(0.5, running=1), {"kv_waits": waits}))
    assert changed == [("FulcrumKvTransferBound", "firing", {"model": "sim"})]
    assert cluster.reasons["FulcrumKvTransferBound"] == "decode workers wait for KV blocks 40% of the time, 50% busy"


def test_a_worker_whose_kv_blocks_are_nearly_all_held_is_told():
    cluster = Cluster()
    full = (*decode(0.5, running=1, free_kv_blocks=3), {"kv_blocks": 100})
    labels = {"model": "sim", "node": "node-a", "worker": "decode-0"}
    assert cluster.run(3, full) == [("FulcrumKvCacheFull", "firing", labels)]
    assert cluster.reasons["FulcrumKvCacheFull"] == "97% of its KV blocks are held by sequences"
    half = (*decode(0.5, running=1, free_kv_blocks=50), {"kv_blocks": 100})
    assert cluster.run(4, half) == [("FulcrumKvCacheFull", "resolved", labels)]


def test_a_worker_with_work_of_which_no_step_ends_is_stuck_and_one_at_rest_is_not():
    cluster = Cluster()
    resting = decode(0)
    assert cluster.run(15, resting) == []
    labels = {"model": "sim", "node": "node-a", "worker": "decode-0"}
    assert cluster.run(9, decode(0, running=2)) == []
    assert cluster.run(2, decode(0, running=2)) == [("FulcrumWorkerStuck", "firing", labels)]
    assert cluster.told[-1].severity == "critical"
    assert cluster.run(4, decode(0.5, running=2)) == [("FulcrumWorkerStuck", "resolved", labels)]


def test_a_worker_that_falls_silent_is_stale_and_not_stuck_and_one_that_leaves_is_neither():
    cluster = Cluster()
    both = decode(0.5, "decode-0", running=1), decode(0.5, "decode-1", running=1)
    cluster.run(2, *both)
    labels = {"model": "sim", "node": "node-a", "worker": "decode-1"}
    assert cluster.run(20, both[0]) == [("FulcrumTelemetryStale", "firing", labels)]
    assert cluster.reasons["FulcrumTelemetryStale"] == "no telemetry for 3.0 s"
    assert cluster.run(4, *both) == [("FulcrumTelemetryStale", "resolved", labels)]
    cluster.run(0.1, both[0], (*both[1], {"last": True}))
    assert cluster.run(70, both[0]) == []


def test_a_worker_that_stays_silent_is_none_of_its_pool_and_does_not_raise_what_a_queue_may_hold():
    cluster = Cluster()
    cluster.run(1, prefill(0.97, 3, 1200), prefill(0.97, 3, 1200, "prefill-1"), decode(0.1))
    cluster.run(62, prefill(0.97), decode(0.1))
    snapshot = take_snapshot(
        cluster.state.fleet,
        cluster.state.rollups,
        cluster.state.gateways,
        cluster.state.burns,
        at(cluster.now_ms),
        lag_ns=0,
        window_ns=10**9,
    )
    assert {(pool.phase, pool.workers) for pool in snapshot.pools} == {("prefill", 1), ("decode", 1)}
    assert {worker.id for worker in snapshot.workers} == {"prefill-0", "prefill-1", "decode-0"}


def test_when_nobody_is_heard_one_alert_tells_it_and_lasts_until_somebody_is():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(20)]
    cluster.run(2, *many)
    assert cluster.run(100) == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    assert "any of 20 workers" in cluster.reasons["FulcrumTelemetryStale"]
    assert cluster.run(4, *many) == [("FulcrumTelemetryStale", "resolved", {"scope": "cluster"})]


def test_workers_that_find_the_broker_one_after_the_other_are_not_told_of_and_one_that_does_not_is():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(31)]
    cluster.run(2, *many)
    assert cluster.run(10) == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    told = []
    for back in range(1, 31):  # one each 100 ms: the last of them after 3 s
        told += cluster.run(0.1, *many[:back])
    told += cluster.run(2, *many[:30])
    assert told == [("FulcrumTelemetryStale", "resolved", {"scope": "cluster"})]
    assert [labels["worker"] for _, _, labels in cluster.run(3, *many[:30])] == ["decode-30"]


def test_what_was_told_of_a_worker_before_nobody_was_heard_goes_on_until_it_is_heard():
    cluster = Cluster()
    both = decode(0.5, "decode-0", running=1), decode(0.5, "decode-1", running=1)
    cluster.run(2, *both)
    assert cluster.run(4, both[0])[0][2]["worker"] == "decode-1"
    changed = cluster.run(10) + cluster.run(8, both[0])
    assert {labels.get("worker") for _, _, labels in changed} == {None}
    assert cluster.run(4, *both) == [
        ("FulcrumTelemetryStale", "resolved", {"model": "sim", "node": "node-a", "worker": "decode-1"})
    ]


def test_a_reader_that_is_behind_raises_one_alert_for_all_its_workers():
    cluster = Cluster()
    many = [decode(0.9, f"decode-{number}", running=1) for number in range(6)] + [prefill(0.97, 3, 1200)]
    cluster.run(2, *many)
    told = cluster.run(40, *many, behind_ms=12_000)
    assert told == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    assert cluster.desk.book.held_back == ON_TELEMETRY
    assert cluster.reasons["FulcrumTelemetryStale"].endswith("alerts that stand on it are held back")


def test_alerts_that_fired_before_neither_end_nor_fire_anew_on_old_telemetry():
    cluster = Cluster()
    starved = [prefill(0.99, 5, 4_000), decode(0.05), decode(0.05, "decode-1")]
    calm = [prefill(0.2), decode(0.2), decode(0.2, "decode-1")]
    assert [name for name, *_ in cluster.run(20, *starved)] == ["FulcrumImbalance"]
    told = cluster.run(40, *calm, behind_ms=8_000)
    assert {(name, state) for name, state, _ in told} == {("FulcrumTelemetryStale", "firing")}
    over = cluster.run(30, *calm)
    assert cluster.desk.book.held_back == ()
    assert {(name, state) for name, state, _ in over} == {
        ("FulcrumImbalance", "resolved"),
        ("FulcrumTelemetryStale", "resolved"),
    }


def test_when_most_workers_go_at_once_one_alert_counts_them():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(8)]
    cluster.run(2, *many)
    assert cluster.run(10, *many[:3]) == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    assert "5 of 8 workers are silent" in cluster.reasons["FulcrumTelemetryStale"]


def test_when_few_workers_go_at_once_each_is_named():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(8)]
    cluster.run(2, *many)
    assert [labels.get("worker") for *_, labels in cluster.run(10, *many[:6])] == ["decode-6", "decode-7"]


def test_workers_of_a_reader_that_has_gone_get_time_to_be_taken_over():
    limits = SETTINGS.alert_limits()
    hearing = Hearing(limits)

    def own_silent_s(second, silent_s):
        workers = [
            WorkerReport(name, "n", "m", silent_ns, False, 1, 0, reader, None)
            for name, silent_ns, reader in (("own", 0, ""), ("theirs", silent_s * 10**9, "other"))
        ]
        hearing.note(Snapshot(second * 10**9, [], workers, [], 0))
        return hearing.own_silent_ns(workers[1], second * 10**9) / 1e9

    assert [own_silent_s(second, second) for second in (1, 2, 4, 6)] == [1, 0, 1, 3]


def test_a_worker_that_falls_silent_with_full_kv_is_neither_told_of_nor_over():
    cluster = Cluster(SETTINGS.model_copy(update={"alert_for_ms": 3_000}))
    full = (*decode(0.5, running=1, free_kv_blocks=3), {"kv_blocks": 100})
    other = decode(0.5, "decode-1", running=1)
    cluster.run(0.4, full, other)
    assert {name for name, *_ in cluster.run(20, other)} == {"FulcrumTelemetryStale"}
    cluster.run(5, full, other)
    assert "FulcrumKvCacheFull" in cluster.reasons
    assert "FulcrumKvCacheFull" not in {name for name, *_ in cluster.run(20, other)}


def finished(number, *, ttft_ms=10, tpot_ms=1, **more):
    fields = {
        "request_id": str(number), "model": "m", "arrival_unix_ns": ORIGIN_NS, "output_tokens": 11,
        "ttft_ns": ttft_ms * MS, "decode_ns": 10 * tpot_ms * MS, "outcome": OUTCOME_OK,
        "ttft_deadline_unix_ns": ORIGIN_NS + 100 * MS, "tpot_target_us": 2_000,
    }  # fmt: skip
    return RequestEvent(**{**fields, **more})


@pytest.mark.parametrize(
    ("event", "kept"),
    [
        (finished(0), {"ttft": False, "tpot": False}),
        (finished(0, ttft_ms=101), {"ttft": True, "tpot": False}),
        (finished(0, tpot_ms=3), {"ttft": False, "tpot": True}),
        (finished(0, outcome=OUTCOME_FAILED, ttft_ms=0, output_tokens=0), {"ttft": True}),
        (finished(0, outcome=OUTCOME_REJECTED, error_code="queue_full", ttft_ms=0, output_tokens=0), {"ttft": True}),
        (finished(0, outcome=OUTCOME_REJECTED, error_code="invalid_request", ttft_ms=0, output_tokens=0), {}),
        (finished(0, outcome=OUTCOME_CLIENT_GONE, ttft_ms=0, output_tokens=0), {}),
        (finished(0, ttft_deadline_unix_ns=0, tpot_target_us=0), {}),
    ],
)
def test_a_request_is_judged_by_its_own_targets(event, kept):
    judged = RequestLog().add(event, ORIGIN_NS)
    missed = {"ttft": judged.ttft_missed, "tpot": judged.tpot_missed}
    assert {level: bad for level, bad in missed.items() if bad is not None} == kept


def test_a_budget_that_burns_fast_over_both_windows_is_told_and_is_over_when_it_stops():
    cluster = Cluster()

    def requests(count, **more):
        for number in range(count):
            cluster.state.take(
                Record(REQUESTS, "k", finished(f"{cluster.now_ms}-{number}", **more), 0, 0), at(cluster.now_ms)
            )

    labels = {"model": "m", "slo": "ttft", "severity": "critical"}
    requests(1)
    cluster.now_ms += 3_600_000
    requests(15, ttft_ms=500)
    assert cluster.run(1) == []
    requests(15, ttft_ms=500)
    assert cluster.run(1) == [("FulcrumSloBurn", "firing", labels)]
    assert cluster.reasons["FulcrumSloBurn"] == (
        "30 of 30 requests in 1 h missed TTFT: 100.0x what 99.00% allows, 100.0x in 5 min"
    )
    assert cluster.told[-1].severity == "critical"
    cluster.now_ms += 10_000_000
    cluster.run(1)
    requests(5000)
    assert ("FulcrumSloBurn", "resolved", labels) in cluster.run(3)
    assert cluster.reasons == {}


def burn_of(age_s, bad_shares):
    """100 requests in each window, of which so many are bad."""
    return Burn("m", "ttft", {window: RequestCount(100, bad_shares[duration(window)]) for window in WINDOWS_S}, age_s)


def test_a_warning_that_fires_hides_nothing_critical_and_fires_on_when_that_is_over():
    machine, limits = AlertStateMachine(make_rules(SETTINGS.alert_limits())), SETTINGS.alert_limits()
    slow = {"3 d": 2, "6 h": 2, "30 min": 2, "1 h": 2, "5 min": 2}
    fast = {**slow, "1 h": 30, "5 min": 60}

    def fires(second, shares, firing):
        for change in machine.step(second * 10**9, burn_conditions([burn_of(10**6, shares)], limits)):
            (firing.discard if change.ended_ns else firing.add)(change.severity)
        return firing

    firing = set()
    assert fires(1, slow, firing) == {"warning"}
    assert fires(2, fast, firing) == {"warning", "critical"}
    assert fires(3, slow, firing) == {"warning", "critical"}
    assert fires(6, slow, firing) == {"warning"}


@pytest.mark.parametrize(
    ("age_s", "severities"), [(60, []), (400, []), (600, ["critical"]), (4 * 86_400, ["critical"])]
)
def test_what_has_only_begun_is_not_judged_by_windows_it_has_not_seen(age_s, severities):
    all_bad = burn_of(age_s, {duration(window): 100 for window in WINDOWS_S})
    fired = [each.severity for each in burn_conditions([all_bad], SETTINGS.alert_limits()) if each.grade is Grade.FIRE]
    assert fired == severities


def test_one_miss_in_the_first_requests_after_a_restart_is_no_burn():
    cluster = Cluster()
    for number in range(20):
        event = finished(number, ttft_ms=500 if number == 7 else 10)
        cluster.state.take(Record(REQUESTS, "k", event, 0, 0), at(cluster.now_ms))
    assert cluster.run(5) == []


def test_amounts_read_well():
    assert [amount(number) for number in (0, 7, 999, 1_234, 41_200, 2_300_000)] == [
        "0",
        "7",
        "999",
        "1.2k",
        "41k",
        "2.3M",
    ]


@pytest.mark.parametrize("name", ["alert_webhooks", "traces_url", "public_url"])
@pytest.mark.parametrize(
    "url", ["http://alertmanager:9o93/x", "http://[::1/x", "http://", "http:///x", "http://x:99999/", "http://x y/"]
)
def test_an_address_that_nothing_can_be_posted_to_is_refused_at_the_start(name, url):
    with pytest.raises(ValidationError):
        MetricsSettings(**{name: url})


def test_the_address_that_is_wrong_is_named_among_several():
    both = "http://one:9093/api/v2/alerts, http://two:9o93/"
    with pytest.raises(ValidationError, match="'http://two:9o93/' is no address"):
        MetricsSettings(alert_webhooks=both)
    assert MetricsSettings(alert_webhooks=both.replace("o", "0")).webhooks()[1] == "http://tw0:9093/"


@pytest.mark.parametrize(("workers", "every_ms"), [(0, 200), (500, 200), (501, 400), (3000, 1200)])
def test_the_more_workers_there_are_the_longer_it_is_to_the_next_look(workers, every_ms):
    assert every_ns(workers) == every_ms * MS


def test_thresholds_that_do_not_stand_apart_are_refused():
    with pytest.raises(ValueError, match=r"FULCRUM_METRICS_ALERT_IDLE_CLEAR=0\.7 must be below"):
        MetricsSettings(alert_idle_clear=0.7)


def test_an_alert_whose_cause_is_gone_says_that_it_is_clearing_until_it_is_over():
    store, labels = AlertStore(), (("model", "m"),)
    store.enter([Transition(Name.TOO_SMALL, labels, "critical", "presses 1.8", 1, None)])
    for grade, reason, clearing in ((Grade.FIRE, "presses 2.1", False), (Grade.CLEAR, "presses 0.4", True)):
        store.follow([Condition(Name.TOO_SMALL, labels, grade, reason)])
        assert [(each.reason, each.now, each.clearing) for each in store.firing()] == [
            ("presses 1.8", reason, clearing)
        ]
    over = store.enter([Transition(Name.TOO_SMALL, labels, "critical", "presses 0.4", 1, 2)])
    assert not over[0].clearing
