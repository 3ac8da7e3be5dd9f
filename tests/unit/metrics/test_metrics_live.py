"""Tests of history, events and the live stream of the metrics service, over its real state."""

import asyncio
import contextlib
import json
import struct

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, ACTION_ROLE_MOVED, Decision
from libs.contracts.topics import DECISIONS, STEPS
from libs.telemetry.columns import prefill_shares
from libs.testing.wait import at_once
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.accounting.series import TIER_NAMES, history, parse_scope, parse_span_ns, parse_tier, sums
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.cluster_events import MAX_EVENTS, EventLog
from services.metrics.http.routes import pack
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.stream import KEPT_TICKS, MAX_READERS, TICK_NS, EventStream, Hub, TickWriter, tick

TIER = TIER_NAMES["100ms"]


class Live:
    """State, hub and writer, ticked by hand; nothing is late unless a test makes it so."""

    def __init__(self):
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self.hub = Hub()
        self.writer = TickWriter(window_ns=TICK_NS, settled_ns=400 * MS)
        self.desk = AlertEvaluator(self.state, MetricsSettings().alert_limits(), lag_ns=0)

    def take(self, *values, now_ms=0):
        for value in values:
            topic = DECISIONS if isinstance(value, Decision) else STEPS
            self.state.take(Record(topic, "key", value, 0, 0), at(now_ms))

    def tick(self, now_ms, *, whole=True):
        alerts = at_once(self.desk.look(at(now_ms)))
        tick(self.state, self.hub, self.writer, alerts, at(now_ms), lag_ns=0, whole=whole)

    def history(self, scope="cluster", span_ms=(0, 400)):
        wanted = parse_scope(scope)
        bounds_ns = at(span_ms[0]), at(span_ms[1])
        return history(
            list(sums(self.state.members, self.state.rollups, wanted, TIER, bounds_ns)), wanted, TICK_NS, bounds_ns[1]
        )


@pytest.fixture
def live():
    service = Live()
    service.tick(0)
    return service


def two_workers(live, until_ms=400):
    """prefill-0 with 4 GPUs computes for half of each window, decode-0 with one for a quarter."""
    for number in range(until_ms // 100):
        start = 100 * number
        live.take(
            step_batch(number, (start, start + 100), [step(start, start + 50, prefill=8)],
                       worker="prefill-0", role="prefill", gpus=4),
            step_batch(number, (start, start + 100), [step(start, start + 25, decode=1)]),
        )  # fmt: skip
        live.tick(start + 100)


async def next_messages(messages, count):
    """Return (event, data) of that many messages."""
    found = []
    async with asyncio.timeout(5):
        while len(found) < count:
            fields = dict(line.split(": ", 1) for line in (await anext(messages)).decode().strip().split("\n"))
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_history_adds_up_exactly_and_is_weighted_by_gpus(live):
    two_workers(live)
    found = live.history()
    assert found.gpu_ns.prefill == [4 * 50 * MS] * 4
    assert found.gpu_ns.decode == [25 * MS] * 4
    assert found.gpu_ns.idle == [(4 * 50 + 75) * MS] * 4
    assert (found.gpus, found.coverage) == ([5] * 4, [1.0] * 4)
    assert (found.roles["prefill"], found.roles["decode"]) == ([4] * 4, [1] * 4)
    assert live.history("model:sim") == type(found)(**{**_fields(found), "scope": "model:sim"})
    assert live.history("worker:decode-0").gpu_ns.decode == [25 * MS] * 4
    assert live.history("node:node-a").gpus == [5] * 4


def _fields(found):
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


async def test_each_window_in_the_stream_has_the_age_of_the_data(live):
    live.take(step_batch(0, (0, 100)), now_ms=100)
    with live.hub.reader() as messages:
        live.tick(100)
        (_, (_, first)) = await next_messages(messages, 2)
        live.tick(2_600)
        ((_, second),) = await next_messages(messages, 1)
    assert (first["age_ms"], second["age_ms"]) == (0, 2_500)
    assert json.loads(live.writer.changes(at(2_610), [], []).split(b"data: ")[1])["age_ms"] is None


def test_a_moved_worker_counts_for_its_earlier_pool_however_late_its_telemetry_comes(live):
    def batch(number, role, **steps):
        start = 100 * number
        return step_batch(number, (start, start + 100), [step(start, start + 50, **steps)], role=role)

    late = batch(1, "decode", decode=1)
    live.take(batch(0, "decode", decode=1), batch(2, "prefill", prefill=8))
    for now_ms in (100, 200, 300):
        live.tick(now_ms)
    live.take(batch(3, "prefill", prefill=8), late)
    live.tick(400)
    decode, prefill = live.history("pool:decode"), live.history("pool:prefill")
    assert (decode.gpus, prefill.gpus) == ([1, 1, 0, 0], [0, 0, 1, 1])
    assert (decode.gpu_ns.decode, prefill.gpu_ns.prefill) == ([50 * MS] * 2 + [0] * 2, [0] * 2 + [50 * MS] * 2)


def test_a_silent_worker_lowers_coverage_and_not_the_shares_of_the_others(live):
    two_workers(live, 200)
    for number in (2, 3):
        start = 100 * number
        live.take(step_batch(number, (start, start + 100), [step(start, start + 25, decode=1)]))
        live.tick(start + 100)
    found = live.history()
    assert found.coverage == [1.0, 1.0, 0.2, 0.2]
    assert found.gpus == [5] * 4
    assert found.gpu_ns.idle[2:] == [75 * MS] * 2


def test_a_running_step_is_provisional_until_it_ends(live):
    live.take(step_batch(0, (0, 100), [step(50, None, prefill=8)]))
    live.tick(100)
    assert live.history(span_ms=(0, 100)).provisional == [True]
    live.take(step_batch(1, (100, 200), [step(50, 150, prefill=8)]))
    live.tick(200)
    found = live.history(span_ms=(0, 200))
    assert (found.provisional, found.gpu_ns.prefill) == ([False, False], [50 * MS, 50 * MS])


@pytest.mark.parametrize("text", ["", "all", "pool:gpu", "pool:", "cluster:x", "worker:"])
def test_an_invalid_scope_is_refused_with_the_allowed_ones(text):
    with pytest.raises(InvalidRequest, match="is not cluster, model:NAME, pool:prefill"):
        parse_scope(text)


def test_an_unknown_name_is_refused_with_the_known_ones(live):
    two_workers(live)
    with pytest.raises(InvalidRequest, match="no such worker; known: decode-0, prefill-0"):
        live.history("worker:decode-1")


def test_only_stored_windows_and_spans_are_served():
    assert parse_span_ns("2m", parse_tier("100ms")) == 120 * 10**9
    with pytest.raises(InvalidRequest, match="100ms, 1s, 10s"):
        parse_tier("5s")
    for text in ("3m", "50ms", "soon"):
        with pytest.raises(InvalidRequest, match=r"from 0\.1s to 120s"):
            parse_span_ns(text, parse_tier("100ms"))


@pytest.mark.parametrize(("window", "kind"), [("100ms", "u4"), ("10s", "f8")])
def test_packed_windows_equal_the_roll_ups(live, window, kind):
    two_workers(live)
    tier = TIER_NAMES[window]
    series = live.state.rollups.read(tier.window_ns, ORIGIN_NS, ORIGIN_NS + max(tier.window_ns, 400 * MS))
    found = pack(series, live.state.members, at(60_000))
    (length,) = struct.unpack("<I", found[:4])
    header = json.loads(found[4 : 4 + length])
    assert (4 + length) % 8 == 0
    shape = (header["windows"], len(header["workers"]), 4)
    assert header["workers"] == ["decode-0", "prefill-0"]
    times = np.frombuffer(found, kind, np.prod(shape), 4 + length).reshape(shape)
    assert np.array_equal(times, series.times_ns)
    assert found[4 + length + times.nbytes :] == series.roles.tobytes()


async def test_a_reader_gets_the_list_of_workers_and_then_every_tick(live):
    with live.hub.reader() as messages:
        await next_messages(messages, 2)
        two_workers(live)
        found = await next_messages(messages, 5)
    assert [name for name, _ in found] == ["members", "tick", "tick", "tick", "tick"]
    members = found[0][1]
    assert [(each["id"], each["gpus"]) for each in members["workers"]] == [("decode-0", 1), ("prefill-0", 4)]
    last = found[-1][1]
    assert last["version"] == members["version"]
    assert last["windows"] == [
        [at(300) // MS, None, [100 * MS] * 2, [0, 50 * MS], [25 * MS, 0], [0, 0], [2, 1]],
    ]


async def test_late_telemetry_resends_the_window_for_that_worker_alone(live):
    two_workers(live, 200)
    live.take(step_batch(3, (300, 400), worker="prefill-0", role="prefill", gpus=4))
    live.tick(300)
    live.take(step_batch(2, (200, 300), [step(200, 230, prefill=8)], worker="prefill-0", role="prefill", gpus=4))
    live.tick(400)
    with live.hub.reader() as messages:
        _, (_, last) = await next_messages(messages, 2)
    assert last["windows"][0] == [at(200) // MS, [1], [100 * MS], [30 * MS], [0], [0], [1]]
    assert [window[0] for window in last["windows"]] == [at(200) // MS, at(300) // MS]


async def test_only_changes_are_sent_between_two_windows(live):
    two_workers(live, 200)
    live.tick(300)
    with live.hub.reader() as messages:
        await next_messages(messages, 2)
        live.tick(325, whole=False)
        live.take(step_batch(2, (200, 260), [step(200, 230, prefill=8)], worker="prefill-0", role="prefill", gpus=4))
        live.tick(350, whole=False)
        ((name, reported),) = await next_messages(messages, 1)
    assert (name, reported["depths"], reported["number"]) == ("tick", None, live.writer.number)
    assert reported["windows"] == [[at(200) // MS, [1], [60 * MS], [30 * MS], [0], [0], [1]]]


async def test_a_new_worker_is_sent_at_once(live):
    two_workers(live, 200)
    live.take(step_batch(0, (150, 210), worker="decode-1"), now_ms=225)
    live.tick(225, whole=False)
    with live.hub.reader() as messages:
        (_, members), (_, reported) = await next_messages(messages, 2)
    assert [each["id"] for each in members["workers"]] == ["decode-0", "decode-1", "prefill-0"]
    assert reported["windows"] == [[at(100) // MS, [1], [50 * MS], [0], [0], [0], [2]]]
    assert len(reported["depths"]["running"]) == 3


async def test_a_slow_reader_continues_with_the_newest_and_missed_messages_are_counted(live):
    with live.hub.reader() as messages:
        await next_messages(messages, 2)
        for number in range(KEPT_TICKS + 5):
            live.tick(100 * number + 100)
        ((_, newest),) = await next_messages(messages, 1)
    assert newest["number"] == live.writer.number
    assert live.hub.skipped_ticks == KEPT_TICKS + 4


async def test_readers_are_bounded_and_closing_ends_them(live):
    with contextlib.ExitStack() as places:
        readers = [places.enter_context(live.hub.reader()) for _ in range(MAX_READERS)]
        with pytest.raises(QueueFull):
            live.hub.check_room()
        waiting = asyncio.ensure_future(next_messages(readers[0], 3))
        await asyncio.sleep(0)
        live.hub.close()
        with pytest.raises(StopAsyncIteration):
            await anext(readers[1])
        waiting.cancel()
    assert live.hub.readers == 0


async def test_readers_of_one_key_leave_room_for_others(live):
    with contextlib.ExitStack() as places:
        held = 0
        with pytest.raises(QueueFull, match="this key"):
            while True:
                places.enter_context(live.hub.reader("key_flood"))
                held += 1
        assert held == MAX_READERS // 2
        with live.hub.reader("key_other"):
            assert live.hub.readers == held + 1
    assert live.hub.readers == 0


@pytest.mark.parametrize("ending", ["the client goes", "the task is cancelled", "the hub closes"])
async def test_a_stream_frees_its_reader_slot_whatever_ends_it(live, ending):
    gone, sent = asyncio.Event(), asyncio.Queue()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    serving = asyncio.ensure_future(EventStream(live.hub)({"type": "http"}, receive, sent.put))
    async with asyncio.timeout(5):
        start = await sent.get()
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        await sent.get()
        assert live.hub.readers == 1
        if ending == "the client goes":
            gone.set()
        elif ending == "the task is cancelled":
            serving.cancel()
        else:
            live.hub.close()
        await asyncio.wait([serving])
    assert live.hub.readers == 0


def moved(sequence, reason="by hand"):
    return Decision(
        planner_id="planner-1", incarnation=1, sequence=sequence, decided_unix_ns=at(150), action=ACTION_ROLE_MOVED,
        reason=reason, worker_id="decode-0", actor="me",
    )  # fmt: skip


async def test_a_role_move_is_reported_once_with_its_reason(live):
    live.take(moved(1), moved(1), Decision(action=ACTION_KEEP, sequence=2))
    live.tick(100)
    with live.hub.reader() as messages:
        _, (_, reported) = await next_messages(messages, 2)
    (event,) = reported["events"]
    assert (event["action"], event["worker"], event["actor"], event["reason"]) == (
        "role_moved", "decode-0", "me", "by hand",
    )  # fmt: skip
    live.tick(200)
    assert live.state.unsent_events() == []
    assert [each.number for each in live.state.events.newest(10)] == [1]


def test_the_log_of_events_is_bounded():
    log = EventLog()
    for number in range(MAX_EVENTS + 10):
        log.add(moved(number, "x" * 10_000))
    kept = log.newest(10 * MAX_EVENTS)
    assert (len(kept), kept[0].number, len(kept[0].reason)) == (MAX_EVENTS, MAX_EVENTS + 10, 500)


def test_time_during_which_the_machine_slept_is_idle_and_stops_nothing(live):
    two_workers(live)
    hour_ms = 3_600_000
    live.take(
        step_batch(4, (400, hour_ms), [], worker="prefill-0", role="prefill", gpus=4),
        step_batch(4, (400, hour_ms), []),
        now_ms=hour_ms,
    )
    live.tick(hour_ms)
    for number in range(5, 9):
        start = hour_ms + 100 * (number - 5)
        live.take(
            step_batch(number, (start, start + 100), [step(start, start + 50, prefill=8)],
                       worker="prefill-0", role="prefill", gpus=4),
            step_batch(number, (start, start + 100), [step(start, start + 25, decode=1)]),
            now_ms=start + 100,
        )  # fmt: skip
        live.tick(start + 100)
    rounds = 0
    while live.state.history.written_to_ns < at(hour_ms + 400):  # a round writes a bounded number of windows
        live.tick(hour_ms + 400)
        rounds += 1
    assert rounds < 200
    found = live.history(span_ms=(hour_ms, hour_ms + 400))
    assert (found.gpu_ns.prefill, found.gpu_ns.decode) == ([4 * 50 * MS] * 4, [25 * MS] * 4)
    assert found.gpu_ns.idle == [(4 * 50 + 75) * MS] * 4
    assert (found.gpus, found.coverage) == ([5] * 4, [1.0] * 4)
