"""Tests of the records with columns that metrics services send one another."""

from collections import Counter

from libs.bus.clients import MAX_RECORD_BYTES
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    SharedLoads,
    SharedWindows,
    SharedWorker,
)
from libs.telemetry.history import WrittenWindow
from libs.telemetry.relayed import COLUMNS, RelayTable
from libs.telemetry.rollups import Written, cells
from libs.telemetry.steps import PhaseTime
from libs.testing.workers.telemetry import MS, at, step_batch
from services.metrics.shared_records import DESCRIBED_IN, Report, column_messages
from services.metrics.sharing import (
    LeftOut,
)
from services.metrics.stream import TICK_NS
from tests.unit.metrics.sharing_rig import COMPUTE, STEP_TIME, Instance, column, exchange

S = 1_000 * MS


def test_however_much_there_is_to_tell_each_record_with_columns_is_one_that_a_broker_takes() -> None:
    teller = Instance("a")
    names = [f"decode-worker-of-some-length-{number:05}" for number in range(1_200)]
    batches = [step_batch(1, (0, 100), worker=name) for name in names]
    for batch in batches:
        batch.compute.CopyFrom(COMPUTE)
        batch.step_time.CopyFrom(STEP_TIME)
    reports = [Report(batch.worker_id, batch, at(100), number) for number, batch in enumerate(batches, 1)]
    everybody = cells([Written(name, PhaseTime(TICK_NS, 30 * MS, 40 * MS, 10 * MS), 1) for name in names])
    windows = [WrittenWindow(at(100 * n), everybody, False) for n in range(45)]
    reported = list(column_messages(reports, reports, windows, teller.fleet))
    assert max(message.ByteSize() for message in reported) < 0.8 * MAX_RECORD_BYTES
    assert [len(message.loads.covered_to_unix_ns) for message in reported if message.loads.covered_to_unix_ns] == [
        8 * 1_000, 8 * 200,
    ]  # fmt: skip
    assert sorted(worker.newest.worker_id for message in reported for worker in message.workers) == names
    sent = sum(len(window.roles) for message in reported for window in message.loads.windows)
    assert sent == len(names) * len(windows)


def test_a_description_is_sent_once_and_then_in_turn() -> None:
    teller, hearer = Instance("a"), Instance("b")
    names = [f"w-{number}" for number in range(DESCRIBED_IN)]
    sent = Counter[str]()
    for start in range(0, 100 * DESCRIBED_IN, 100):
        for name in names:
            teller.live(name, start, start + 100)
        (message,) = teller.tick(start + 100)
        hearer.hear([message], start + 100)
        described = [worker.newest.worker_id for worker in message.workers]
        assert described == names if not start else len(described) == 1
        assert list(message.loads.worker_ids) == names
        sent.update(described)
    assert min(sent.values()) >= 1
    assert sent.total() == 2 * DESCRIBED_IN - 1
    assert all(hearer.fleet.directory.reader(name) == "a" for name in names)


def test_a_changed_description_is_known_with_the_next_record() -> None:
    teller, hearer = Instance("a"), Instance("b")
    exchange(teller, hearer, 0, 300)
    batch = step_batch(3, (300, 400), worker="w", load=Load(running=7, waiting_prefill_tokens=9, images_encoded=2))
    batch.assignment.budget_tokens = 77
    batch.kv_blocks = 12
    teller.read(batch, 400)
    hearer.hear(teller.tick(400), 400)
    facts = hearer.fleet.directory.facts("w")
    assert facts == teller.fleet.directory.facts("w")
    assert facts is not None
    assert (facts.kv_blocks, facts.assignment.budget_tokens, facts.load.running) == (12, 77, 7)
    (row,) = hearer.fleet.directory.loads(at(400)).waiting_prefill_tokens.tolist()
    assert row == 9
    last = step_batch(4, (400, 500), worker="w")
    last.last = True
    teller.read(last, 500)
    hearer.hear(teller.tick(500), 500)
    left = hearer.fleet.directory.facts("w")
    assert left is not None
    assert left.left


def test_a_kept_description_does_not_keep_the_record_that_it_came_in() -> None:
    table, newest = RelayTable("other"), step_batch(0, (0, 100), worker="w")
    newest.assignment.epoch = 3
    record = SharedWindows(workers=[SharedWorker(newest=newest, description=1)])
    table.enrol(["w"])
    assert table.describe(record.workers[0])
    record.workers[0].newest.assignment.epoch = 4
    assert table.attach(0).facts.assignment.epoch == 3, "a part of the record would have changed with it"


def test_whoever_joins_learns_of_all_workers_at_once() -> None:
    teller = Instance("a")
    names = [f"w-{number}" for number in range(3 * DESCRIBED_IN)]
    for start in (0, 100):
        for name in names:
            teller.live(name, start, start + 100)
        teller.tick(start + 100)
    assert len(teller.tick(250)[0].workers) < len(names)
    joiner = Instance("c")
    teller.hear(joiner.tick(250), 250)
    joiner.hear(teller.tick(300), 300)
    assert joiner.fleet.directory.listing(at(300)).ids == sorted(names)
    assert len(teller.tick(400)[0].workers) < len(names)
    teller.hear(Instance("c", ahead_ns=1).tick(400), 400)  # it was started again
    assert len(teller.tick(500)[0].workers) == len(names)


def test_loads_without_a_description_wait_for_it() -> None:
    teller, hearer = Instance("a"), Instance("b")
    teller.live("w", 0, 100)
    teller.tick(100)
    (message,) = teller.tick(200)
    message.ClearField("workers")
    hearer.hear([message], 200)
    assert hearer.fleet.directory.facts("w") is None
    for start in range(200, 200 + 100 * DESCRIBED_IN, 100):
        hearer.hear(teller.tick(start + 100), start + 100)
    assert hearer.fleet.directory.facts("w") == teller.fleet.directory.facts("w")


def test_columns_of_nonsense_change_nothing() -> None:
    teller, hearer = Instance("a"), Instance("b")
    teller.live("v", 0, 100)
    exchange(teller, hearer, 0, 100)
    (message,) = teller.published
    known = hearer.fleet.directory.facts("w")
    for count, (name, spoiled) in enumerate(
        [
            ("running", column(1)),
            ("running", column(2**32, 0)),
            ("lost_batches", column(0, 2**63)),
            ("covered_to_unix_ns", b"123"),
        ],
        1,
    ):
        bad = SharedWindows.FromString(message.SerializeToString())
        setattr(bad.loads, name, spoiled)
        hearer.hear([bad], 200)
        assert hearer.sharing.left_out[LeftOut.MALFORMED] == count
        assert hearer.fleet.directory.facts("w") == known
    twice = SharedWindows.FromString(message.SerializeToString())
    twice.loads.worker_ids[1] = twice.loads.worker_ids[0]
    hearer.hear([twice], 300)
    assert hearer.sharing.left_out[LeftOut.MALFORMED] == 5


def test_one_worker_with_an_impossible_count_does_not_hide_the_others() -> None:
    teller, hearer = Instance("a"), Instance("b")
    teller.read(step_batch(0, (0, 100), worker="bad", load=Load(waiting_prefill_tokens=2**63)), 100)
    exchange(teller, hearer, 0, 100)
    assert hearer.fleet.directory.listing(at(100)).ids == ["bad", "w"]
    assert hearer.sharing.left_out.total() == 0


def test_every_count_of_a_load_has_a_column() -> None:
    columns = SharedLoads.DESCRIPTOR.fields_by_name
    assert columns.keys() >= Load.DESCRIPTOR.fields_by_name.keys()
    assert {*columns} == {*COLUMNS, "worker_ids", "part", "windows"}
