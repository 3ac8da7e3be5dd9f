"""Tests of what several metrics services send one another, and of what they accept."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from libs.bus.clients import MAX_RECORD_BYTES
from libs.bus.port import TAKEN_OVER_NS
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    DummySteps,
    Interval,
    KvTransfer,
    RequestEvent,
    SharedWindows,
)
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.history import WrittenWindow
from libs.telemetry.rollups import StoredWindow, Written, cells
from libs.telemetry.steps import PhaseTime
from libs.testing.workers.telemetry import MS, at, step, step_batch
from services.metrics.accounting.occupancy import cluster_occupancy
from services.metrics.accounting.series import history, parse_scope, sums
from services.metrics.prometheus import SharingCollector
from services.metrics.shared_records import messages, shared_worker
from services.metrics.sharing import (
    MAX_APART_NS,
    MAX_RECEIVED_CELLS,
    MAX_UNSENT,
    OVERDUE_NS,
    LeftOut,
)
from services.metrics.state import STALE_NS, read_from_ns
from services.metrics.stream import TICK_NS
from tests.unit.metrics.sharing_rig import Instance, column, exchange

S = 1_000 * MS


def test_data_restored_from_a_file_are_not_added_again_when_others_send_them() -> None:
    teller, hearer = Instance("a"), Instance("b")
    second = 5
    hearer.rollups.restore(_kept_second("w", second))
    hearer.state.history.resume(at(1000 * second + 1000))
    exchange(teller, hearer, 1000 * second, 1000 * second + 2000)
    assert hearer.covered_ms(S, 1000 * second, 1000 * second + 1000) == 1000
    assert hearer.covered_ms(S, 1000 * second + 1000, 1000 * second + 2000) == 1000
    assert hearer.sharing.left_out[LeftOut.PAST] == 10


def _kept_second(worker: str, second: int) -> StoredWindow:
    source = Instance("file")
    exchange(source, Instance("none"), 1000 * second, 1000 * second + 1000, worker)
    return next(kept for kept in source.rollups.take_changed(at(60_000)) if kept.window_ns == S)


def test_a_worker_seen_only_in_a_replay_does_not_count_as_alive() -> None:
    dead, hearer = Instance("a"), Instance("b")
    exchange(dead, Instance("none"), 0, 100)
    reported = list(dead.published)
    hearer.hear(reported, 100 + MAX_APART_NS // MS)
    assert hearer.sharing.shares.alive(at(100) + MAX_APART_NS) == ["b"]
    assert hearer.covered_ms(TICK_NS, 0, 100) == 100  # its messages still apply
    hearer.hear(reported, 200)
    assert hearer.sharing.shares.alive(at(200)) == ["a", "b"]


def test_an_instance_that_shares_reads_from_before_its_start() -> None:
    now_ns = at(0)
    assert read_from_ns(None, now_ns, shared=False) == now_ns
    assert read_from_ns(None, now_ns, shared=True) == now_ns - TAKEN_OVER_NS
    assert read_from_ns(at(-60_000), now_ns, shared=True) == at(-60_000)


@pytest.mark.parametrize("ahead_ns", [-4 * S, -500 * MS, 500 * MS, 4 * S])
def test_clocks_of_instances_may_differ_by_seconds(ahead_ns: int) -> None:
    teller, hearer = Instance("a"), Instance("b", ahead_ns=ahead_ns)
    for start in range(0, 10_000, 100):
        batch = step_batch(start // 100, (start, start + 100), worker="own")
        batch.node = "node-b"
        hearer.read(batch, start + 100)
        exchange(teller, hearer, start, start + 100)
    series = hearer.rollups.read(TICK_NS, at(0), at(10_000), ["w"])
    assert int(series.times_ns[:, :, 0].sum()) == 10_000 * MS
    assert hearer.sharing.shares.alive(at(10_000) + ahead_ns) == ["a", "b"]
    offsets_ns = hearer.fleet.clocks.offsets_ns(at(10_000) + ahead_ns)
    assert offsets_ns["node-a"] == offsets_ns["node-b"] == 0


def test_windows_too_far_ahead_are_dropped_and_counted() -> None:
    teller, hearer = Instance("a", ahead_ns=2 * MAX_APART_NS), Instance("b")
    exchange(teller, hearer, 0, 100)
    assert hearer.sharing.left_out[LeftOut.FUTURE] == 1
    assert hearer.sharing.shares.alive(at(100)) == ["b"]  # otherwise no instance would read its worker
    registry = CollectorRegistry()
    registry.register(SharingCollector(hearer.sharing))
    assert b'fulcrum_shared_left_out_total{reason="future"} 1.0' in generate_latest(registry)


def test_an_invalid_clock_does_no_damage() -> None:
    teller, hearer = Instance("a"), Instance("b")
    exchange(teller, hearer, 0, 100)
    (message,) = teller.published
    message.loads.arrived_unix_ns = column(at(10**9))
    hearer.hear([message], 200)
    assert hearer.fleet.latest_arrival_ns == at(200)
    hearer.fleet.clocks.note("node-c", at(1000), at(1050))
    assert abs(hearer.fleet.clocks.offsets_ns(at(1100))["node-a"]) < 200 * MS
    message.loads.covered_to_unix_ns = column(at(10**9))
    hearer.hear([message], 300)
    assert hearer.sharing.left_out == Counter({LeftOut.MALFORMED: 1})


def test_a_clock_of_nonsense_spoils_nothing_here_in_a_record_of_an_older_release() -> None:
    teller, hearer = Instance("a"), Instance("b")
    _meet_older(teller, 0)
    exchange(teller, hearer, 0, 100)
    (message,) = teller.published
    assert not message.HasField("loads")
    message.workers[0].arrived_unix_ns = at(10**9)
    hearer.hear([message], 200)
    assert hearer.fleet.latest_arrival_ns == at(200)
    hearer.fleet.clocks.note("node-c", at(1000), at(1050))
    assert abs(hearer.fleet.clocks.offsets_ns(at(1100))["node-a"]) < 200 * MS
    message.workers[0].newest.covered_to_unix_ns = at(10**9)
    hearer.hear([message], 300)
    assert hearer.sharing.left_out == Counter({LeftOut.MALFORMED: 1})


def _meet_older(instance: Instance, now_ms: float) -> None:
    """Make it hear of an instance that does not understand columns."""
    instance.hear([SharedWindows(metrics_id="older", told_unix_ns=at(now_ms))], now_ms)


def test_a_worker_silent_for_long_is_no_longer_sent() -> None:
    teller = Instance("a")
    teller.live("w", 0, 100)
    silent_ms = LISTED_NS // MS
    assert [len(message.loads.worker_ids) for message in teller.tick(silent_ms)] == [1]
    assert [len(message.loads.worker_ids) for message in teller.tick(silent_ms + 100)] == [0]
    assert teller.fleet.directory.is_own("w")


def test_dummy_steps_are_sent_without_their_spans_and_only_for_workers_that_ran_any() -> None:
    teller, batches = Instance("a"), [step_batch(1, (0, 100), worker=name) for name in ("rank", "plain")]
    span = Interval(start_unix_ns=at(10), end_unix_ns=at(20))
    batches[0].dummy_steps.CopyFrom(DummySteps(steps=7, spans=[span]))
    rank, plain = (shared_worker(batch, at(100), teller.fleet).newest for batch in batches)
    assert (rank.dummy_steps.steps, list(rank.dummy_steps.spans)) == (7, [])
    assert list(batches[0].dummy_steps.spans) == [span]
    assert not plain.HasField("dummy_steps")


def test_records_fit_the_broker_however_much_there_is_to_send() -> None:
    teller = Instance("a")
    names = [f"decode-worker-of-some-length-{number:05}" for number in range(1_200)]
    for name in names:
        teller.live(name, 0, 100)
    workers = [shared_worker(step_batch(1, (0, 100), worker=name), at(100), teller.fleet) for name in names]
    time = PhaseTime(TICK_NS, 30 * MS, 40 * MS, 10 * MS)
    everybody = cells([Written(name, time, 1) for name in names])
    windows = [WrittenWindow(at(100 * n), everybody, False) for n in range(45)]
    reported = list(messages(workers, windows))
    assert max(message.ByteSize() for message in reported) < 0.8 * MAX_RECORD_BYTES
    reported_cells = {(message.workers[place].newest.worker_id, window.start_unix_ns)
             for message in reported for window in message.windows for place in window.workers}  # fmt: skip
    assert len(reported_cells) == len(names) * len(windows)


def test_data_held_back_during_a_broker_outage_are_sent_afterwards() -> None:
    teller, hearer = Instance("a"), Instance("b")
    exchange(teller, hearer, 0, 1_000)
    teller.unsent = MAX_UNSENT + 1
    exchange(teller, hearer, 1_000, 9_000)
    assert teller.published == []
    assert hearer.covered_ms(TICK_NS, 0, 9_000) == 1_000
    teller.unsent = 0
    exchange(teller, hearer, 9_000, 10_000)
    assert hearer.covered_ms(TICK_NS, 0, 10_000) == 10_000
    reported = teller.tick(10_100)
    assert all(len(window.covered_ns) == 4 for message in reported for window in message.loads.windows)
    assert sum(len(message.loads.windows) for message in teller.tick(10_200)) <= 1  # and not told a third time


def test_data_held_back_include_workers_that_others_read_by_then() -> None:
    first, second = Instance("a"), Instance("b")
    first.unsent = MAX_UNSENT + 1
    exchange(first, second, 0, 3_000)
    for start in range(3_000, 6_000, 100):
        exchange(second, first, start, start + 100)
        assert first.tick(start + 100) == []
    assert not first.fleet.directory.is_own("w")
    assert second.covered_ms(TICK_NS, 0, 6_000) == 3_000
    first.unsent = 0
    for now_ms in range(6_100, 6_500, 100):
        second.hear(first.tick(now_ms), now_ms)
    assert second.covered_ms(TICK_NS, 0, 6_000) == 6_000
    facts = second.fleet.directory.facts("w")
    assert second.fleet.directory.is_own("w") and facts is not None and facts.covered_to_unix_ns == at(6_000)
    assert [len(message.workers) for message in first.tick(6_500)] == [0]  # once sent they belong to others


def test_data_held_back_include_workers_that_fell_silent_meanwhile() -> None:
    teller, hearer = Instance("a"), Instance("b")
    teller.unsent = MAX_UNSENT + 1
    exchange(teller, hearer, 0, 1_000)
    silent_ms = 100_000  # windows of 100 ms are kept for little longer
    for now_ms in range(1_100, silent_ms + 200, 100):
        assert teller.tick(now_ms) == []
    teller.unsent = 0
    for now_ms in range(silent_ms + 200, silent_ms + 200 + 100 * 80, 100):
        hearer.hear(teller.tick(now_ms), now_ms)
    assert hearer.covered_ms(TICK_NS, 0, 1_000) == 1_000
    assert [len(message.workers) for message in teller.tick(LISTED_NS // MS + 2_000)] == [0]


def test_data_from_other_instances_do_not_make_figures_live() -> None:
    one, other = Instance("a"), Instance("b")
    exchange(one, other, 0, 1_000)
    assert other.state.not_live(at(1_100)) is None
    silent_ms = 1_100 + STALE_NS // MS
    for instance in (one, other):
        reported = instance.tick(silent_ms)
        one.hear(reported, silent_ms)
        other.hear(reported, silent_ms)
    for instance in (one, other):
        assert "nothing has arrived from the broker for" in str(instance.state.not_live(at(silent_ms)))


def test_an_instance_that_takes_over_a_worker_uses_each_batch_once() -> None:
    first, second, alone = Instance("a"), Instance("b"), Instance("c")
    steps = {100: [step(100, 150, decode=1)], 200: [step(220, None, decode=1)]}
    moved = [KvTransfer(bytes=7)]
    logs = [
        step_batch(number + 2 * (number > 10), (100 * number, 100 * number + 100), steps.get(100 * number, []))
        for number in range(140)
    ]
    for batch in logs:
        batch.kv_transfers.extend(moved)
    for number, batch in enumerate(logs):
        now_ms = 100 * number + 100
        alone.read(batch, now_ms)
        alone.tick(now_ms)
        second.tick(now_ms)
        if number < 120:
            first.read(batch, now_ms)
            second.hear(first.tick(now_ms), now_ms)
    worker = "decode-0"
    for number, batch in enumerate(logs[60:], 60):
        second.read(batch, 14_000)
        facts = second.fleet.directory.facts(worker)
        assert facts is not None and facts.covered_to_unix_ns >= at(12_000), number  # never less than was known
    assert second.fleet.last_step_end_ns(worker) == alone.fleet.last_step_end_ns(worker) == at(150)
    assert second.fleet.directory.lost_batches(worker) == alone.fleet.directory.lost_batches(worker) == 2
    assert second.fleet.kv_bytes["network"] == 7 * 20
    now = second.fleet.phases(worker, at(13_000), at(14_000))
    assert now == alone.fleet.phases(worker, at(13_000), at(14_000))
    assert now.decode_ns == 1_000 * MS and now.provisional
    ended = step_batch(142, (14_000, 14_100), [step(220, 14_050, decode=1)])
    for instance in (second, alone):
        instance.read(ended, 14_100)
        instance.tick(14_100)
    assert second.fleet.phases(worker, at(13_000), at(14_100)) == alone.fleet.phases(worker, at(13_000), at(14_100))
    assert second.covered_ms(S, 0, 14_000) == alone.covered_ms(S, 0, 14_000) == 14_000


def test_an_instance_makes_a_trace_even_while_none_reads_its_worker() -> None:
    one, other = Instance("a"), Instance("b")
    exchange(one, other, 0, 1_000)
    event = RequestEvent(request_id="r", decode_worker="w")
    assert one.sharing.makes_trace(event, one.fleet, at(1_000))
    assert not other.sharing.makes_trace(event, other.fleet, at(1_000))
    assert other.sharing.makes_trace(event, other.fleet, at(3_000))
    nowhere = RequestEvent(request_id="r")
    other.hear(one.tick(3_000), 3_000)
    assert one.sharing.makes_trace(nowhere, one.fleet, at(3_000))
    assert not other.sharing.makes_trace(nowhere, other.fleet, at(3_000))


def test_the_backlog_of_the_stream_is_bounded_in_windows_per_worker() -> None:
    teller, hearer = Instance("a"), Instance("b")
    names = [f"w-{number}" for number in range(1_000)]
    for name in names:
        teller.live(name, 0, 100)
    workers = [shared_worker(step_batch(1, (0, 100), worker=name), at(100), teller.fleet) for name in names]
    count = MAX_RECEIVED_CELLS // len(names) + 2
    written = cells([Written(name, PhaseTime(TICK_NS), 1) for name in names])
    reported = list(messages(workers, [WrittenWindow(at(100 * n), written, False) for n in range(count)]))
    for message in reported:
        message.metrics_id, message.told_unix_ns = "a", at(100 * count)
    hearer.hear(reported, 100 * count)
    hearer.tick(100 * count)
    assert sum(len(window.workers) for window in hearer.received) == MAX_RECEIVED_CELLS
    assert hearer.sharing.left_out == Counter({LeftOut.UNSTREAMED: count * len(names) - MAX_RECEIVED_CELLS})
    assert hearer.covered_ms(TICK_NS, 0, 100 * count) == 100 * count * len(names)
    hearer.tick(100 * count)
    assert hearer.received == []


def test_another_instance_with_the_same_id_is_warned_about_once() -> None:
    instance, namesake = Instance("a"), Instance("a", ahead_ns=1)
    with capture_logs() as logs:
        instance.hear(instance.tick(10_000), 10_000)
        instance.hear(namesake.tick(1_000), 10_000)  # as it was before it was started again
        assert logs == []
        for now_ms in (10_000, 10_100):
            instance.hear(namesake.tick(now_ms), now_ms)
    assert [log["log_level"] for log in logs] == ["warning"]
    assert instance.sharing.left_out == Counter({LeftOut.NAMESAKE: 2})


@pytest.mark.parametrize("silent_ms", [20_000, 50])
def test_workers_of_a_dead_instance_are_missed_and_stay_in_coverage(silent_ms: int) -> None:
    """The worker dies long before its instance, or with it."""
    dead, lives = Instance("a"), Instance("b")
    died_ms = 30_000
    for start in range(0, died_ms, 100):
        if start < died_ms - silent_ms:
            dead.live("w", start, start + 100, gpus=4)
        lives.live("own", start, start + 100)
        lives.hear(dead.tick(start + 100), start + 100)
        dead.hear(lives.tick(start + 100), start + 100)
    for start in range(died_ms, died_ms + 3_000, 100):
        lives.live("own", start, start + 100)
        lives.tick(start + 100)
        overdue_ns = at(start + 100) - OVERDUE_NS
        bounds_ns = overdue_ns - 10 * TICK_NS, overdue_ns
        pieces = sums(lives.state.members, lives.rollups, parse_scope("cluster"), lives.rollups.tiers[0], bounds_ns)
        reported = history(list(pieces), parse_scope("cluster"), TICK_NS, overdue_ns)
        assert reported.gpus == [5] * 10
        assert [(window.start_ns, window.workers.worker_ids) for window in lives.received] == (
            [(overdue_ns - TICK_NS, ["w"])] if overdue_ns > at(died_ms) else []
        )
    assert reported.coverage == [0.2] * 10
    assert cluster_occupancy(lives.fleet, lives.rollups, lives.state.members, overdue_ns, S).coverage == 0.2


def test_a_worker_first_reported_late_has_full_coverage() -> None:
    teller, hearer = Instance("a"), Instance("b")
    late = []
    for start in range(0, 5_000, 100):
        teller.live("w", start, start + 100)
        late.append(teller.tick(start + 100))
        if start >= 1_000:
            hearer.hear(late[start // 100 - 10], start + 100)
        hearer.tick(start + 100)
    for reported in late[-10:]:
        hearer.hear(reported, 5_100)
    assert hearer.covered_ms(TICK_NS, 0, 5_000) == 5_000
