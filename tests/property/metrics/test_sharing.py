"""Properties of instances that share telemetry: their figures equal those of one that reads all."""

from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import compress
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWindow, SharedWindows, SharedWorker, StepBatch
from libs.contracts.topics import STEPS, WINDOWS
from libs.policy.reading import ALIVE_NS, Shares
from libs.telemetry.columns import prefill_shares
from libs.telemetry.directory import BEHIND_NS
from libs.testing.examples import examples
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.accounting.occupancy import cluster_occupancy
from services.metrics.requests import RequestMetrics
from services.metrics.shared_records import MAX_WORKERS_A_RECORD, messages
from services.metrics.sharing import MAX_UNSENT, LeftOut, Sharing
from services.metrics.state import MetricsState
from services.metrics.stream import TICK_NS

WORKERS = 3
ROUNDS = 75
OVERLAP = 30
"""Rounds that are read again by an instance that takes over ..."""
SLOWEST = 3
"""... this many of them per round, or more."""
SETTLED = BEHIND_NS // TICK_NS + 2 + OVERLAP // (SLOWEST - 1)
"""Rounds after which a worker's former reader knows of its loss, and the new one has read the existing records."""


class Instance:
    """A metrics service's state; what it tells is in `published`."""

    def __init__(self, name: str | None) -> None:
        self.published: list[SharedWindows] = []
        self.unsent = 0
        sharing = None
        if name:
            sharing = Sharing(Shares(name), self.published.append, began_ns=ORIGIN_NS, unsent=lambda: self.unsent)
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()), sharing)

    def read(self, batch: StepBatch, now_ns: int) -> None:
        self.state.take(Record(STEPS, batch.worker_id, batch, 0, 0), now_ns)

    def hear(self, message: SharedWindows, now_ns: int) -> None:
        self.state.take(Record(WINDOWS, message.metrics_id, message, 0, 0), now_ns)

    def be_older(self, now_ns: int) -> None:
        """Write the records of an older release, as it does beside one that understands no other."""
        self.hear(SharedWindows(metrics_id="older", told_unix_ns=now_ns), now_ns)

    def tick(self, now_ns: int) -> None:
        written = self.state.history.advance(now_ns)
        if self.state.sharing:
            self.state.sharing.keep(written)
            self.state.sharing.send(self.state.fleet, self.state.rollups, now_ns)
            self.state.sharing.take_received(self.state.fleet, self.state.rollups, now_ns)

    def figures(self, end_ns: int, rounds: int) -> Any:
        """Return the whole nanoseconds of every worker and window."""
        ids = [f"worker-{number}" for number in range(WORKERS)]
        series = self.state.rollups.read(TICK_NS, end_ns - rounds * TICK_NS, end_ns, ids)
        return series.times_ns.tolist(), series.roles.tolist()


owners = st.lists(st.tuples(st.integers(1, 15), st.sampled_from([0, 1, 2])), max_size=6)
"""(rounds, readers of the workers: one, the other, or both)."""
outages = st.sets(st.integers(0, ROUNDS - SETTLED)) | st.builds(
    range, st.integers(0, 20), st.integers(20, ROUNDS - SETTLED)
)
"""The rounds in which the broker accepts nothing from an instance."""


HANDED_OVER_IN_AN_OUTAGE = {
    "plans": [[], [], [(1, 1), (14, 1), (15, 1)]],
    "busy": [(1, False)] * 7,
    "phases": [0] * WORKERS,
    "away": [set(), range(35)],
    "pace": OVERLAP,
    "received_first": False,
    "upgraded": [0, 0],
}
"""Records of a worker that no other instance has read can be sent only after others have read it for long."""


@settings(deadline=None, max_examples=examples(40))
@example(**HANDED_OVER_IN_AN_OUTAGE)
@given(
    plans=st.lists(owners, min_size=WORKERS, max_size=WORKERS),
    busy=st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=7, max_size=7),
    phases=st.lists(st.integers(0, 99), min_size=WORKERS, max_size=WORKERS),
    away=st.lists(outages, min_size=2, max_size=2),
    pace=st.sampled_from([SLOWEST, 5, OVERLAP]),
    received_first=st.booleans(),
    upgraded=st.lists(st.sampled_from([0, ROUNDS]) | st.integers(0, ROUNDS), min_size=2, max_size=2),
)
def test_all_instances_report_the_same_figures_whoever_reads_a_worker(
    *,
    plans: list[list[tuple[int, int]]],
    busy: list[tuple[int, bool]],
    phases: list[int],
    away: list[Collection[int]],
    pace: int,
    received_first: bool,
    upgraded: list[int],
) -> None:
    """`upgraded` is the round from which each instance understands columns; until then it is of an older release."""
    alone, pair = Instance(None), [Instance("a"), Instance("b")]
    _introduce(pair, upgraded)
    moving = [[who for rounds, who in [*plan, (ROUNDS, 0)] for _ in range(rounds)] for plan in plans]
    reads = [[*who[: ROUNDS - SETTLED], *[who[ROUNDS - SETTLED]] * SETTLED] for who in moving]
    logs: list[list[StepBatch]] = [[] for _ in range(WORKERS)]
    unread: dict[tuple[int, int], list[StepBatch]] = defaultdict(list)
    for number in range(ROUNDS):
        now_ns = at((number + 1) * 100)
        for worker, phase in enumerate(phases):
            start = number * 100 + phase
            length, prefill = busy[(number + worker) % len(busy)]
            work = step(start, start + length, prefill=8 * prefill, decode=0 if prefill else 4)
            batch = step_batch(number + 1, (start, start + 100), [work], worker=f"worker-{worker}", gpus=worker + 1)
            logs[worker].append(batch)
            alone.read(batch, now_ns)
            for who, instance in enumerate(pair):
                if reads[worker][number] not in {who, 2}:
                    continue
                taken_over = number and reads[worker][number - 1] not in {who, 2}
                left = logs[worker][-OVERLAP:] if taken_over else [*unread[worker, who], batch]
                for each in left[:pace]:
                    instance.read(each, now_ns)
                unread[worker, who] = left[pace:]
        for instance, rounds in zip(pair, away, strict=True):
            instance.unsent = (MAX_UNSENT + 1) * (number in rounds)
        older = [number < first for first in upgraded]
        if received_first:
            _exchange(pair, older, now_ns)
        for instance in compress(pair, older):
            instance.be_older(now_ns)
        for instance in (alone, *pair):
            instance.tick(now_ns)
        if not received_first:
            _exchange(pair, older, now_ns)
    end_ns = at((ROUNDS - 1) * 100)
    assert pair[0].figures(end_ns, ROUNDS - 1) == pair[1].figures(end_ns, ROUNDS - 1)
    assert pair[0].figures(end_ns, ROUNDS - 1) == alone.figures(end_ns, ROUNDS - 1)
    whole = cluster_occupancy(alone.state.fleet, alone.state.rollups, alone.state.members, end_ns, 2_000 * MS)
    for instance in pair:
        shared = cluster_occupancy(
            instance.state.fleet, instance.state.rollups, instance.state.members, end_ns, 2_000 * MS
        )
        assert (shared.gpu_ns, shared.gpus, shared.coverage) == (whole.gpu_ns, whole.gpus, whole.coverage)
        assert [worker.gpu_ns for worker in shared.workers] == [worker.gpu_ns for worker in whole.workers]


def _introduce(pair: list[Instance], upgraded: list[int]) -> None:
    for hearer, name, first in zip(pair, "ba", upgraded[::-1], strict=True):
        hearer.hear(SharedWindows(metrics_id=name, told_unix_ns=at(0), reads_loads=first == 0), at(0))


def _exchange(pair: list[Instance], older: list[bool], now_ns: int) -> None:
    for teller, hearer, of_older, to_older in zip(pair, pair[::-1], older, older[::-1], strict=True):
        for message in teller.published:
            copy = SharedWindows.FromString(message.SerializeToString())
            if of_older:
                copy.ClearField("reads_loads")
            if to_older:
                copy.ClearField("loads")  # an unknown field
            hearer.hear(copy, now_ns)
        teller.published.clear()


def test_partitions_are_distributed_among_live_instances() -> None:
    one, other = Shares("a"), Shares("b")
    assert [one.mine(partition, 0) for partition in range(4)] == [True] * 4
    one.mark_alive("b", 0)
    other.mark_alive("a", 0)
    assert [(one.mine(partition, 1), other.mine(partition, 1)) for partition in range(3)] == [
        (True, False), (False, True), (True, False),
    ]  # fmt: skip
    assert [one.mine(partition, ALIVE_NS) for partition in range(4)] == [True] * 4


@given(
    names=st.sets(st.text("abc-", min_size=1, max_size=4), min_size=1, max_size=5),
    gone=st.sets(st.text("xyz", min_size=1, max_size=2), max_size=3),
    partition=st.integers(0, 7),
)
def test_a_partition_has_one_live_reader_and_there_is_one_leader_once_all_know_each_other(
    names: set[str], gone: set[str], partition: int
) -> None:
    ordered = sorted(names)
    shares = [Shares(name) for name in ordered]
    for hearer in shares:
        for name in gone:
            hearer.mark_alive(name, 0)
        for name in ordered:
            hearer.mark_alive(name, 1)
    assert sum(each.mine(partition, ALIVE_NS) for each in shares) == 1
    assert [each.own_id for each in shares if each.leads(ALIVE_NS)] == ordered[:1]


def test_an_impossible_message_is_refused() -> None:
    hearer = Instance("a")
    worker = SharedWorker(newest=step_batch(1, (0, 100)), arrived_unix_ns=at(100))
    good = {"workers": [0], "covered_ns": [9], "prefill_ns": [4], "decode_ns": [5], "kv_wait_ns": [0], "roles": [1]}
    for spoiled in (
        {"prefill_ns": [5]},
        {"covered_ns": [TICK_NS + 1]},
        {"workers": [1]},
        {"roles": [0]},
        {"roles": []},
    ):
        window = SharedWindow(start_unix_ns=ORIGIN_NS, **{**good, **spoiled})  # type: ignore[arg-type]
        hearer.hear(SharedWindows(metrics_id="b", workers=[worker], windows=[window]), at(200))
    assert hearer.state.rollups.worker_ids() == []
    assert hearer.state.sharing is not None
    assert hearer.state.sharing.left_out == Counter({LeftOut.MALFORMED: 5})
    window = SharedWindow(start_unix_ns=ORIGIN_NS, **good)  # type: ignore[arg-type]
    hearer.hear(SharedWindows(metrics_id="b", workers=[worker], windows=[window]), at(200))
    assert hearer.state.rollups.worker_ids() == ["decode-0"]


def test_many_workers_are_split_into_several_records() -> None:
    workers = [SharedWorker(newest=StepBatch(worker_id=f"w-{n}")) for n in range(MAX_WORKERS_A_RECORD + 1)]
    assert [len(message.workers) for message in messages(workers, [])] == [MAX_WORKERS_A_RECORD, 1]
    assert [len(message.workers) for message in messages([], [])] == [0]
