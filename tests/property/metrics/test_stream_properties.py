"""Test of the live stream against a slow count over all telemetry, round by round and in any order."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import STEPS
from libs.telemetry.columns import prefill_shares
from libs.testing.examples import examples
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.requests import RequestMetrics
from services.metrics.state import MetricsState
from services.metrics.stream import ROUND_NS, TICK_NS, Hub, TickWriter, tick

ROUND_MS, TICK_MS, LAG_MS = ROUND_NS // MS, TICK_NS // MS, 50
WORKERS = ("a", "b", "c")
BATCHES, BATCH_MS, STEP_MS = 5, 100, 30
LATEST_MS = 900
Account = tuple[int, int]
"""The covered ns of a window, and the ns of decode among them."""


class Reader(Hub):
    """The knowledge of a page that has read all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.known: dict[tuple[str, int], Account] = {}
        """By worker and the start of the window in ms since the origin."""

    def publish(self, tick: bytes, members: bytes | None = None) -> None:
        if members is not None:
            self.ids = [each["id"] for each in _data(members)["workers"]]
        for start_ms, places, covered, prefill, decode, kv_wait, _ in _data(tick)["windows"]:
            assert not any(prefill) and not any(kv_wait)
            for index, account in enumerate(zip(covered, decode, strict=True)):
                worker = self.ids[index if places is None else places[index]]
                self.known[worker, start_ms - ORIGIN_NS // MS] = account


def _data(message: bytes) -> Any:
    return json.loads(message.split(b"data: ")[1])


def telemetry(worker: str, phase_ms: int) -> Iterator[tuple[int, StepBatch]]:
    """Yield (end, batch) of a worker with its own phase; each batch begins with a step."""
    for number in range(BATCHES):
        low = phase_ms + number * BATCH_MS
        batch = step_batch(number, (low, low + BATCH_MS), [step(low, low + STEP_MS, decode=1)], worker=worker)
        yield low + BATCH_MS, batch


def counted(came: list[StepBatch], start_ms: int) -> Account:
    """Count millisecond by millisecond, for the worker whose batches arrived."""
    spans_ns = [(each.covered_from_unix_ns, each.covered_to_unix_ns) for each in came]
    covered = decode = 0
    for ms in range(start_ms, start_ms + TICK_MS):
        inside = [low_ns for low_ns, high_ns in spans_ns if low_ns <= at(ms) < high_ns]
        covered += bool(inside)
        decode += any(low_ns + STEP_MS * MS > at(ms) for low_ns in inside)
    return covered * MS, decode * MS


phases = st.lists(st.integers(0, 99), min_size=len(WORKERS), max_size=len(WORKERS))
delays = st.lists(st.integers(0, 400), min_size=BATCHES * len(WORKERS), max_size=BATCHES * len(WORKERS))
"""The delay between the end of a batch and its arrival: many arrive in another order than they were sent."""


@settings(max_examples=examples(60), deadline=None)
@given(phases, delays)
def test_after_each_round_a_reader_has_the_state_of_all_received_telemetry(phases, delays):
    """This includes time without telemetry yet, which is covered by nothing and never idle."""
    sent = [pair for worker, phase in zip(WORKERS, phases, strict=True) for pair in telemetry(worker, phase)]
    arrivals = sorted(
        (end_ms + delay, index) for index, ((end_ms, _), delay) in enumerate(zip(sent, delays, strict=True))
    )
    state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
    reader, writer = Reader(), TickWriter(window_ns=TICK_NS, settled_ns=0)
    came: dict[str, list[StepBatch]] = {worker: [] for worker in WORKERS}
    counts: dict[tuple[str, int, int], Account] = {}  # by worker, window and number of batches: rounds bring few
    for now_ms in range(0, BATCHES * BATCH_MS + LATEST_MS, ROUND_MS):
        while arrivals and arrivals[0][0] <= now_ms:
            arrived_ms, index = arrivals.pop(0)
            came[sent[index][1].worker_id].append(sent[index][1])
            state.take(Record(STEPS, "", sent[index][1], 0, 0), at(arrived_ms))
        whole = (now_ms - LAG_MS) % TICK_MS == 0
        tick(state, reader, writer, [], at(now_ms), lag_ns=LAG_MS * MS, whole=whole)
        for start_ms in range(0, (now_ms - LAG_MS) // TICK_MS * TICK_MS, TICK_MS):
            for worker in WORKERS:
                key = worker, start_ms, len(came[worker])
                if key not in counts:
                    counts[key] = counted(came[worker], start_ms)
                assert reader.known.get((worker, start_ms), (0, 0)) == counts[key]
    assert sum(covered for covered, _ in reader.known.values()) == len(sent) * BATCH_MS * MS
