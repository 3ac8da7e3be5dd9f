"""Tests of what each alert fires on and its text, over real snapshots."""

import socket

import pytest
from pydantic import ValidationError

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    GatewayQueues,
    ModelQueue,
)
from libs.policy.alerts.rules import Condition, Name, PhasePool, Snapshot
from libs.policy.alerts.store import AlertStore, Transition
from libs.policy.alerts.watch import advice, amount, cause_conditions, every_ns
from libs.policy.verdict.causes import Cause, CauseCode
from libs.policy.verdict.state import Grade
from libs.testing.workers.telemetry import MS, step_batch
from services.metrics.run import reachable
from services.metrics.settings import MetricsSettings
from tests.unit.metrics.alerts.alerts_rig import Cluster, decode, prefill


def gateway(**waiting):
    """A gateway's report of a queue for model "sim"."""
    return GatewayQueues(gateway_id="gw", queues=[ModelQueue(model="sim", **waiting)] if waiting else [])


def test_a_busy_phase_with_a_queue_beside_an_idle_one_is_an_imbalance_until_it_ends():
    cluster = Cluster()
    starved = prefill(0.97, 3, 1200), decode(0.12), decode(0.12, "decode-1"), decode(0.12, "decode-2")
    labels = {"model": "sim", "phase": "prefill"}
    assert cluster.run(4, *starved) == [("FulcrumImbalance", "firing", labels)]
    assert cluster.reasons["FulcrumImbalance"] == (
        "prefill 97% busy with 900 prompt tokens queued, decode 12%: moving 1 of 3 decode workers gives prefill 100% "
        "more and leaves decode 18% busy"
    )
    assert cluster.run(6, prefill(0.5), *starved[1:]) == [("FulcrumImbalance", "resolved", labels)]
    assert cluster.published[-1].ended_because.startswith("prefill 50% busy with 0 prompt tokens queued")


def test_decode_can_be_the_starved_phase():
    cluster = Cluster()
    labels = {"model": "sim", "phase": "decode"}
    changed = cluster.run(4, prefill(0.05), decode(1.0, running=64, waiting=5))
    assert changed == [("FulcrumImbalance", "firing", labels)]
    assert cluster.reasons["FulcrumImbalance"].endswith(
        "5 sequences queued, prefill 5%: its only prefill worker cannot move; as mixed it would take prompts too"
    )


def test_a_pool_with_every_slot_taken_is_starved_even_if_the_queue_is_at_the_gateways():
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
def test_a_healthy_cluster_has_no_imbalance(workers):
    assert Cluster().run(5, *workers) == []


@pytest.mark.parametrize(("workers", "count"), [(2, 1), (4, 3), (10, 4)])
def test_advice_evens_out_the_pools_and_leaves_a_worker_in_each(workers, count):
    starved = PhasePool("m", "prefill", 2, 2, 100, 100, 0, 50, 0, 0)
    other = PhasePool("m", "decode", workers, workers, 100, 0 if workers < 10 else 20, 0, 0, 0, 0)
    assert f"moving {count} of {workers} decode workers" in advice(starved, other)


def test_a_growing_queue_fires_an_alert_and_a_standing_one_does_not():
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
def test_a_queue_that_grows_at_gateways_fires_an_alert_even_if_credits_bound_the_workers_queues(phase, queue):
    cluster = Cluster()
    workers = prefill(1.0, 3, 600), decode(0.9)
    assert cluster.run(20, *workers, gateways=[gateway()]) == []
    for second in range(1, 40):
        changed = cluster.run(1, *workers, gateways=[gateway(**queue(second))])
        if changed:
            break
    assert changed == [("FulcrumQueueGrowing", "firing", {"model": "sim", "phase": phase})]


def test_a_queue_neither_grows_nor_shrinks_while_telemetry_is_missing():
    cluster = Cluster()
    workers = prefill(1.0, 3, 600), decode(0.9)
    for second in range(40):
        waiting = gateway(prefill_requests=second, prefill_tokens=500 * second)
        if changed := cluster.run(1, *workers, gateways=[waiting]):
            break
    assert changed[0][0] == "FulcrumQueueGrowing"
    assert "FulcrumQueueGrowing" not in {name for name, *_ in cluster.run(120)}  # no gateway reports
    cluster.run(5, *workers, gateways=[waiting])
    assert "FulcrumQueueGrowing" not in {name for name, *_ in cluster.run(50, *workers)}  # gateways are not
    assert "FulcrumQueueGrowing" in cluster.reasons


def test_time_lost_to_kv_transfers_fires_an_alert():
    cluster = Cluster()

    def waits(start_ms):
        return step_batch(0, (start_ms, start_ms + 100), waits_ms=[(start_ms + 50, start_ms + 90)]).kv_waits

    changed = cluster.run(4, prefill(0.5), (*decode(0.5, running=1), {"kv_waits": waits}))
    assert changed == [("FulcrumKvTransferBound", "firing", {"model": "sim"})]
    assert cluster.reasons["FulcrumKvTransferBound"] == "decode workers wait for KV blocks 40% of the time, 50% busy"


def test_a_worker_with_nearly_all_kv_blocks_held_fires_an_alert():
    cluster = Cluster()
    full = (*decode(0.5, running=1, free_kv_blocks=3), {"kv_blocks": 100})
    labels = {"model": "sim", "node": "node-a", "worker": "decode-0"}
    assert cluster.run(3, full) == [("FulcrumKvCacheFull", "firing", labels)]
    assert cluster.reasons["FulcrumKvCacheFull"] == "97% of its KV blocks are held by sequences"
    half = (*decode(0.5, running=1, free_kv_blocks=50), {"kv_blocks": 100})
    assert cluster.run(4, half) == [("FulcrumKvCacheFull", "resolved", labels)]


def test_a_worker_with_work_whose_steps_do_not_end_is_stuck_and_an_idle_one_is_not():
    cluster = Cluster()
    resting = decode(0)
    assert cluster.run(15, resting) == []
    labels = {"model": "sim", "node": "node-a", "worker": "decode-0"}
    assert cluster.run(9, decode(0, running=2)) == []
    assert cluster.run(2, decode(0, running=2)) == [("FulcrumWorkerStuck", "firing", labels)]
    assert cluster.published[-1].severity == "critical"
    assert cluster.run(4, decode(0.5, running=2)) == [("FulcrumWorkerStuck", "resolved", labels)]


def test_amounts_are_formatted_for_people():
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
def test_an_unusable_webhook_address_is_refused_at_the_start(name, url):
    with pytest.raises(ValidationError):
        MetricsSettings(**{name: url})


def test_the_invalid_address_is_named_among_several():
    both = "http://one:9093/api/v2/alerts, http://two:9o93/"
    with pytest.raises(ValidationError, match="'http://two:9o93/' is no address"):
        MetricsSettings(alert_webhooks=both)
    assert MetricsSettings(alert_webhooks=both.replace("o", "0")).webhooks()[1] == "http://tw0:9093/"


@pytest.mark.parametrize(("workers", "every_ms"), [(0, 200), (500, 200), (501, 400), (3000, 1200)])
def test_alerts_are_evaluated_less_often_with_more_workers(workers, every_ms):
    assert every_ns(workers) == every_ms * MS


def test_thresholds_that_overlap_are_refused():
    with pytest.raises(ValueError, match=r"FULCRUM_METRICS_ALERT_IDLE_CLEAR=0\.7 must be below"):
        MetricsSettings(alert_idle_clear=0.7)


def test_a_cause_that_eases_neither_fires_nor_ends_an_alert():
    grades = {}
    for grade in (Grade.FIRE, Grade.HOLD, Grade.CLEAR):
        cause = Cause(CauseCode.PREFILL_BOUND, "m", "prefill-bound", grade=grade)
        snapshot = Snapshot(1, [], [], [], 0, causes=[cause], judged=frozenset({"m"}))
        found = {each.labels: each.grade for each in cause_conditions(snapshot, ()) if each.name is Name.IMBALANCE}
        grades[grade] = found[("model", "m"), ("phase", "prefill")]
        assert found[("model", "m"), ("phase", "decode")] is Grade.CLEAR
    assert grades == {Grade.FIRE: Grade.FIRE, Grade.HOLD: Grade.HOLD, Grade.CLEAR: Grade.HOLD}


def test_an_alert_whose_cause_is_gone_is_shown_as_clearing_until_it_ends():
    store, labels = AlertStore(), (("model", "m"),)
    (fired,) = store.enter([Transition(Name.TOO_SMALL, labels, "critical", "presses 1.8", 1, None, "do this")])
    assert fired.called == "presses 1.8 Run: do this"
    for grade, reason, clearing in ((Grade.FIRE, "presses 2.1", False), (Grade.CLEAR, "presses 0.4", True)):
        store.follow([Condition(Name.TOO_SMALL, labels, grade, reason, command="" if clearing else "do that")])
        assert [each.command for each in store.firing()] == ["" if clearing else "do that"]
        assert [(each.reason, each.now, each.clearing) for each in store.firing()] == [
            ("presses 1.8", reason, clearing)
        ]
    over = store.enter([Transition(Name.TOO_SMALL, labels, "critical", "presses 0.4", 1, 2)])
    assert not over[0].clearing and not over[0].command


def test_links_in_alerts_use_a_reachable_address() -> None:
    own = socket.gethostname()
    for host, expected in (("0.0.0.0", own), ("[::]", own), ("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]")):
        assert reachable(f"http://{host}:8002") == f"http://{expected}:8002"
