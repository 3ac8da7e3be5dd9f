"""Tests of history in a file: what returns after restarts, crashes and damage."""

import asyncio
import sqlite3
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.errors import StartupError
from libs.contracts.topics import STEPS
from libs.telemetry.columns import prefill_shares
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.rollups import TIERS, StoredWindow, Tier
from libs.telemetry.workers import Member
from libs.testing.wait import until
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.accounting.occupancy import cluster_occupancy
from services.metrics.accounting.series import history, parse_scope, sums
from services.metrics.history import HistoryFile, HistoryKeeper, HistorySnapshot
from services.metrics.requests import RequestMetrics
from services.metrics.state import MetricsState

SECOND = Tier(10**9, 3)
WAIT_S = 10
TEN = TIERS[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "history.sqlite"


def opened(path, cluster="local", tiers=(SECOND,)):
    return HistoryFile(path, cluster, tiers)


def kept(second, workers=("a", "b"), scale=1):
    times = np.arange(4 * len(workers), dtype=np.int64).reshape(-1, 4) * scale
    return StoredWindow(10**9, second * 10**9, list(workers), times, np.arange(len(workers), dtype=np.uint8) + 1)


def records_of(file):
    members = file.members()
    return members, [
        (k.start_ns // 10**9, list(k.worker_ids), k.times_ns.tolist(), k.roles.tolist()) for k in file.windows()
    ]


A, B = Member("a", "node-1", "sim", 1), Member("b", "node-2", "sim", 8)


def test_saved_history_is_restored_and_old_history_removed(path):
    file = opened(path)
    assert file.written_to_ns() is None
    file.save(HistorySnapshot(10**9, [A, B], [kept(second) for second in range(5)]))
    file.save(HistorySnapshot(6 * 10**9, [B], [kept(4, scale=10**9), kept(5, workers=())]))
    file.close()
    file = opened(path)
    assert file.written_to_ns() == 6 * 10**9
    members, windows = records_of(file)
    assert members == [B]
    assert windows == [
        (3, ["a", "b"], [[0, 1, 2, 3], [4, 5, 6, 7]], [1, 2]),
        (4, ["a", "b"], [[0, 10**9, 2 * 10**9, 3 * 10**9], [4 * 10**9, 5 * 10**9, 6 * 10**9, 7 * 10**9]], [1, 2]),
        (5, [], [], []),
    ]


def test_ranks_of_data_parallel_groups_are_stored_with_their_group(path):
    file, rank = opened(path), A._replace(group="10.0.0.1:29550")
    file.save(HistorySnapshot(10**9, [rank, B], [kept(0)]))
    file.close()
    file = opened(path)
    assert records_of(file)[0] == [rank, B]
    file.save(HistorySnapshot(2 * 10**9, [A, B], [kept(1)]))
    assert records_of(file)[0] == [A, B]


def test_a_file_in_use_or_of_another_cluster_is_refused_in_one_line(path):
    file = opened(path)
    with pytest.raises(StartupError, match="no other metrics service"):
        opened(path)
    file.close()
    with pytest.raises(StartupError, match="of cluster 'local', not 'other'"):
        opened(path, "other")
    opened(path).close()


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="FULCRUM_METRICS_HISTORY_FILE"):
        opened(tmp_path / "file" / "history.sqlite")


@pytest.mark.parametrize("damage", ["garbage", "layout"])
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(path, damage):
    file = opened(path)
    file.save(HistorySnapshot(10**9, [A], [kept(0)]))
    file.close()
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 500)
    else:
        database = sqlite3.connect(path)
        with database:
            database.execute("UPDATE facts SET value = '99' WHERE name = 'layout'")
        database.close()
    file = opened(path)
    assert file.written_to_ns() is None
    assert records_of(file) == ([], [])
    assert len(list(path.parent.glob("*.unreadable-*"))) == 1


class Service:
    """A metrics service's state over a file, fed by hand."""

    def __init__(self, path):
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self.file = HistoryFile(path, "local", TIERS[1:])
        self.keeper = HistoryKeeper(self.state, self.file)

    def live(self, from_ms, to_ms, **worker):
        """Send batches of which half of each 100 ms is prefill."""
        for start in range(from_ms, to_ms, 100):
            batch = step_batch(start // 100, (start, start + 100), [step(start, start + 50, prefill=8)], **worker)
            self.state.take(Record(STEPS, "key", batch, 0, 0), at(start + 100))
            self.state.history.advance(at(start + 100))

    def leave(self, at_ms, **worker):
        """Leave cleanly."""
        batch = step_batch(at_ms // 100, (at_ms, at_ms + 1), **worker)
        batch.last = True
        self.state.take(Record(STEPS, "key", batch, 0, 0), at(at_ms + 1))

    def prefill_ms(self, tier, scope="cluster", until_ms=60_000):
        bounds = ORIGIN_NS // tier.window_ns * tier.window_ns, at(until_ms)
        pieces = sums(self.state.members, self.state.rollups, parse_scope(scope), tier, bounds)
        return sum(int(piece.times_ns[:, 1].sum()) for piece in pieces) // MS

    def occupancy(self, end_ms, window_ms):
        state = self.state
        return cluster_occupancy(state.fleet, state.rollups, state.members, at(end_ms), window_ms * MS)

    def crash(self):
        self.file.close()


async def test_a_crash_loses_nothing_that_the_broker_still_has(path):
    before = Service(path)
    before.live(0, 20_000)
    await before.keeper.save()
    before.live(20_000, 22_000)
    before.crash()

    after = Service(path)
    from_ns = await after.keeper.restore()
    assert at(0) < from_ns < at(18_000)
    assert after.prefill_ms(TEN) == 9_000  # all but the two seconds that might still have changed
    after.live((from_ns - ORIGIN_NS) // (100 * MS) * 100, 30_000)  # the broker's, then new ones
    for tier in TIERS[1:]:
        assert after.prefill_ms(tier) == 15_000
    await after.keeper.close()


async def test_the_past_of_a_worker_that_has_left_still_counts_where_it_was(path):
    before = Service(path)
    before.live(0, 20_000, worker="gone", role="prefill", gpus=4)
    await before.keeper.close()
    after = Service(path)
    await after.keeper.restore()
    for scope in ("cluster", "node:node-a", "worker:gone", "model:sim", "pool:prefill"):
        assert after.prefill_ms(TEN, scope) == 4 * 9_000
    await after.keeper.close()


async def test_a_disk_failure_loses_nothing_once_the_disk_works_again(path):
    service = Service(path)
    service.live(0, 10_000)
    service.file.close()
    await service.keeper.save()
    (failures,) = service.keeper.collect()
    assert failures.samples[0].value == 1
    service.keeper._file = HistoryFile(path, "local", TIERS[1:])
    await service.keeper.close()
    again = Service(path)
    await again.keeper.restore()
    assert again.prefill_ms(TEN) == 4_000
    again.crash()


async def test_occupancy_before_a_restart_is_that_of_the_workers_of_that_time(path):
    before = Service(path)
    before.live(0, 30_000, worker="gone", role="prefill", gpus=4)
    before.leave(30_000, worker="gone", role="prefill", gpus=4)
    before.live(0, 60_000, worker="stays")
    await before.keeper.close()
    expected = before.occupancy(30_000, 20_000)
    assert [worker.id for worker in expected.workers] == ["gone", "stays"]

    after = Service(path)
    from_ns = await after.keeper.restore()
    after.live((from_ns - ORIGIN_NS) // (100 * MS) * 100, 70_000, worker="stays")
    answer = after.occupancy(30_000, 20_000)
    gone = answer.workers[0]
    assert (answer.gpus, answer.coverage, answer.gpu_ns) == (5, 1.0, expected.gpu_ns)
    assert (gone.id, gone.node, gone.model, gone.role, gone.gpus) == ("gone", "node-a", "sim", "prefill", 4)
    assert [(pool.role, pool.gpus) for pool in answer.pools] == [("decode", 1), ("prefill", 4)]
    assert [worker.id for worker in after.occupancy(70_000, 5_000).workers] == ["stays"]
    across = after.occupancy(63_000, 10_000)
    assert (across.coverage, across.gpu_ns.prefill) == (1.0, 5_000 * MS)
    await after.keeper.close()


@pytest.mark.parametrize("ending", ["it dies", "it leaves", "it comes back"])
async def test_a_worker_that_died_before_a_restart_is_still_missed_after_it(path, ending):
    before = Service(path)
    for start in range(0, 20_000, 1_000):
        if start < 5_000:
            before.live(start, start + 1_000, worker="lost", incarnation=1)
        elif start == 5_000 and ending == "it leaves":
            before.leave(5_000, worker="lost")
        before.live(start, start + 1_000, worker="stays")
    await before.keeper.save()
    before.crash()

    after = Service(path)
    from_ms = (await after.keeper.restore() - ORIGIN_NS) // (100 * MS) * 100
    assert after.state.fleet.latest_arrival_ns is None  # nothing has come yet
    after.live(from_ms, 30_000, worker="stays")
    found = after.occupancy(30_000, 5_000)
    if ending == "it leaves":
        assert [(each.id, each.coverage) for each in found.workers] == [("stays", 1.0)]
        return
    assert [(each.id, each.coverage) for each in found.workers] == [("lost", 0.0), ("stays", 1.0)]
    assert (found.coverage, found.idle, found.prefill) == (0.5, 0.5, 0.5)
    window_ns, bounds_ns = TIERS[1].window_ns, (at(20_000), at(30_000))
    pieces = sums(after.state.members, after.state.rollups, parse_scope("cluster"), TIERS[1], bounds_ns)
    assert set(history(list(pieces), parse_scope("cluster"), window_ns, bounds_ns[1]).coverage) == {0.5}
    if ending == "it comes back":
        for start in range(30_000, 32_000, 1_000):
            after.live(start, start + 1_000, worker="lost", incarnation=2)
            after.live(start, start + 1_000, worker="stays")
        assert after.occupancy(32_000, 1_000).coverage == 1.0
    else:
        after.live(30_000, 5_000 + LISTED_NS // MS + 2_000, worker="stays")
        assert [each.id for each in after.occupancy(5_000 + LISTED_NS // MS + 2_000, 1_000).workers] == ["stays"]


class SlowDisk:
    """A history file whose writes wait until they may go on."""

    def __init__(self, file):
        self.file = file
        self.started, self.go_on = threading.Event(), threading.Event()
        self.writing = self.most_at_once = 0

    def save(self, snapshot):
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        self.started.set()
        assert self.go_on.wait(WAIT_S)
        self.file.save(snapshot)
        self.writing -= 1

    def close(self):
        self.file.close()


async def test_a_cancelled_write_ends_before_the_last_one_begins_and_loses_nothing(path):
    service = Service(path)
    service.live(0, 10_000)
    disk = service.keeper._file = SlowDisk(service.file)
    saving = asyncio.create_task(service.keeper.save())
    await until(disk.started.is_set)
    saving.cancel()
    await asyncio.wait([saving])
    disk.started.clear()
    service.live(10_000, 20_000)
    closing = asyncio.create_task(service.keeper.close())
    for _ in range(100):  # as many turns as it takes to begin another write beside the first
        await asyncio.sleep(0)
    disk.go_on.set()
    await closing
    assert disk.most_at_once == 1
    again = Service(path)
    await again.keeper.restore()
    assert again.prefill_ms(TEN) == 9_000
    again.crash()
