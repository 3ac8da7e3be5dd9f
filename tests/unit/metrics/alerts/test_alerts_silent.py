"""Tests of alerts about silent workers."""

from libs.policy.alerts.rules import ON_TELEMETRY, Snapshot, WorkerReport
from libs.policy.alerts.watch import CommonSilence
from libs.testing.workers.telemetry import at
from services.metrics.alerts.evaluator import take_snapshot
from tests.unit.metrics.alerts.alerts_rig import SETTINGS, Cluster, decode, prefill


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


def test_a_worker_that_stays_silent_does_not_count_in_its_pool_or_its_queue_bound():
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


def test_one_alert_fires_while_every_worker_is_silent_and_lasts_until_one_returns():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(20)]
    cluster.run(2, *many)
    assert cluster.run(100) == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    assert "any of 20 workers" in cluster.reasons["FulcrumTelemetryStale"]
    assert cluster.run(4, *many) == [("FulcrumTelemetryStale", "resolved", {"scope": "cluster"})]


def test_workers_that_return_one_after_another_fire_no_alert_and_one_that_does_not_return_does():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(31)]
    cluster.run(2, *many)
    assert cluster.run(10) == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    reported = []
    for back in range(1, 31):  # one each 100 ms: the last of them after 3 s
        reported += cluster.run(0.1, *many[:back])
    reported += cluster.run(2, *many[:30])
    assert reported == [("FulcrumTelemetryStale", "resolved", {"scope": "cluster"})]
    assert [labels["worker"] for _, _, labels in cluster.run(3, *many[:30])] == ["decode-30"]


def test_alerts_of_a_worker_continue_through_a_silence_of_all_until_it_returns():
    cluster = Cluster()
    both = decode(0.5, "decode-0", running=1), decode(0.5, "decode-1", running=1)
    cluster.run(2, *both)
    assert cluster.run(4, both[0])[0][2]["worker"] == "decode-1"
    changed = cluster.run(10) + cluster.run(8, both[0])
    assert {labels.get("worker") for _, _, labels in changed} == {None}
    assert cluster.run(4, *both) == [
        ("FulcrumTelemetryStale", "resolved", {"model": "sim", "node": "node-a", "worker": "decode-1"})
    ]


def test_a_reader_that_is_behind_fires_one_alert_for_all_its_workers():
    cluster = Cluster()
    many = [decode(0.9, f"decode-{number}", running=1) for number in range(6)] + [prefill(0.97, 3, 1200)]
    cluster.run(2, *many)
    reported = cluster.run(40, *many, behind_ms=12_000)
    assert reported == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    assert cluster.desk.book.held_back == ON_TELEMETRY
    assert cluster.reasons["FulcrumTelemetryStale"].endswith("alerts that depend on it are held back")


def test_earlier_alerts_neither_end_nor_fire_again_on_old_telemetry():
    cluster = Cluster()
    starved = [prefill(0.99, 5, 4_000), decode(0.05), decode(0.05, "decode-1")]
    calm = [prefill(0.2), decode(0.2), decode(0.2, "decode-1")]
    assert [name for name, *_ in cluster.run(20, *starved)] == ["FulcrumImbalance"]
    reported = cluster.run(40, *calm, behind_ms=8_000)
    assert {(name, state) for name, state, _ in reported} == {("FulcrumTelemetryStale", "firing")}
    over = cluster.run(30, *calm)
    assert cluster.desk.book.held_back == ()
    assert {(name, state) for name, state, _ in over} == {
        ("FulcrumImbalance", "resolved"),
        ("FulcrumTelemetryStale", "resolved"),
    }


def test_one_alert_counts_the_workers_when_most_leave_at_once():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(8)]
    cluster.run(2, *many)
    assert cluster.run(10, *many[:3]) == [("FulcrumTelemetryStale", "firing", {"scope": "cluster"})]
    assert "5 of 8 workers are silent" in cluster.reasons["FulcrumTelemetryStale"]


def test_each_worker_is_named_when_few_leave_at_once():
    cluster = Cluster()
    many = [decode(0.5, f"decode-{number}", running=1) for number in range(8)]
    cluster.run(2, *many)
    assert [labels.get("worker") for *_, labels in cluster.run(10, *many[:6])] == ["decode-6", "decode-7"]


def test_workers_of_a_reader_that_has_gone_get_time_to_be_taken_over():
    limits = SETTINGS.alert_limits()
    silence = CommonSilence(limits)

    def own_silent_s(second, silent_s):
        workers = [
            WorkerReport(name, "n", "m", silent_ns, False, 1, 0, reader, None)
            for name, silent_ns, reader in (("own", 0, ""), ("theirs", silent_s * 10**9, "other"))
        ]
        silence.note(Snapshot(second * 10**9, [], workers, [], 0))
        return silence.own_silent_ns(workers[1], second * 10**9) / 1e9

    assert [own_silent_s(second, second) for second in (1, 2, 4, 6)] == [1, 0, 1, 3]


def test_a_worker_that_falls_silent_with_full_kv_neither_fires_nor_ends_an_alert():
    cluster = Cluster(SETTINGS.model_copy(update={"alert_for_ms": 3_000}))
    full = (*decode(0.5, running=1, free_kv_blocks=3), {"kv_blocks": 100})
    other = decode(0.5, "decode-1", running=1)
    cluster.run(0.4, full, other)
    assert {name for name, *_ in cluster.run(20, other)} == {"FulcrumTelemetryStale"}
    cluster.run(5, full, other)
    assert "FulcrumKvCacheFull" in cluster.reasons
    assert "FulcrumKvCacheFull" not in {name for name, *_ in cluster.run(20, other)}
