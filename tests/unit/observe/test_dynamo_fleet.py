"""Tests of a Dynamo fleet: its folder, its workers' records, and invalid, late or missing ones."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import step_rows
from libs.observe.demand import KnownWork
from libs.observe.dynamo_folder import LEASE_S, check_folder, read_members
from libs.testing.wait import ManualClock
from services.metrics.observed.dynamo import AWAY_NS, DynamoFleet
from tests.dynamo_rig import NOW_MS, PUBLISHER, WORKER, card, channel, join, message, record

RECORDED = [json.loads(line) for line in (Path(__file__).parent / "dynamo_1_6_1.jsonl").read_text().splitlines()]
MS = 1_000_000
NAME = f"prefill-{WORKER:x}"


class Rig:
    """A fleet over a folder, whose time and messages are a test's."""

    def __init__(self, folder: Path, at_ms: int = NOW_MS) -> None:
        self.folder, self.clock, self.sent = folder, ManualClock(at_ms * MS), list[StepBatch]()
        self.demand = list[tuple[str, str, str, KnownWork]]()
        self.fleet = DynamoFleet(
            folder,
            lambda body: self.sent.append(StepBatch.FromString(body)),
            self.clock,
            lambda *each: self.demand.append(each),
        )

    def look(self) -> None:
        self.fleet.know(read_members(self.folder, self.clock.now_ns() / 1e9))

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in self.fleet.status()}

    def outcomes(self) -> dict[str, int]:
        (metric,) = self.fleet.collect()
        return {each.labels["outcome"]: int(each.value) for each in metric.samples if each.value}


def touched(files: list[Path], at_ms: int) -> None:
    for file in files:
        os.utime(file, (at_ms / 1000, at_ms / 1000))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A fleet of one prefill worker that has been seen in its folder."""
    touched(join(tmp_path, card(), channel()), NOW_MS)
    found = Rig(tmp_path)
    found.look()
    return found


def test_a_recording_of_dynamo_1_6_1_gives_its_steps(tmp_path: Path) -> None:
    sent_ms = int(RECORDED[0]["at_unix_ms"])
    rig = Rig(tmp_path, sent_ms)
    for each in RECORDED:
        touched(join(tmp_path, each["card"], each["channel"]), sent_ms)
    rig.look()
    for each in RECORDED:
        for frames in each["messages"]:
            rig.fleet.take([bytes.fromhex(frame) for frame in frames])
    rig.fleet.cut()
    assert rig.outcomes() == {"taken": 4}
    steps = {each.worker_id: [] for each in rig.sent}
    for batch in rig.sent:
        steps[batch.worker_id] += step_rows(batch.steps)
    prefill, decode = steps["prefill-7c6a48c5c2c44c3a"], steps["backend-83229908cc25e2d8"]
    assert [(row.prefill_tokens, row.decode_sequences) for row in prefill] == [(631, 0), (55, 0)]
    assert [(row.prefill_tokens, row.decode_sequences) for row in decode] == [(0, 1), (0, 1)]
    assert prefill[0].end_unix_ns - prefill[0].start_unix_ns == 26_249_796
    assert set(rig.states().values()) == {"exact"}


def test_demand_is_counted_and_the_time_of_a_lost_record_is_not_covered(rig: Rig) -> None:
    for number, at_ms in ((1, 0), (2, 10), (4, 100)):  # the third one was lost
        rig.fleet.take(message(record(number, sum_prefill_tokens=100, num_prefill_requests=1), NOW_MS + at_ms))
    rig.fleet.cut()
    works = [work for _, _, role, (_, _, work) in rig.demand if role == "prefill" and any(work)]
    assert sum(each.known_requests for each in works) == 3
    assert sum(each.computed_tokens for each in works) == 300
    assert sum(each.requests for each in works) == 4, "one more waits"
    covered_ns = sum(to_ns - from_ns for *_, (from_ns, to_ns, _) in rig.demand)
    assert covered_ns == pytest.approx(6 * MS + 10 * MS + 6 * MS, abs=MS)
    assert rig.fleet.models() == {NAME: rig.sent[0].assignment.model}


def test_an_invalid_or_old_record_is_counted_and_dropped(rig: Rig) -> None:
    good = message(record(5, sum_prefill_tokens=100, num_prefill_requests=1))
    rig.fleet.take(good)
    rig.fleet.take(good)
    rig.fleet.take(message(record(4), NOW_MS - 5))
    rig.fleet.take(message({**record(6), "version": 2}))
    rig.fleet.take(good[:-1])
    rig.fleet.take([b"\xff" * 40])
    rig.fleet.take(message(record(7, worker=3)))
    rig.fleet.take(message(record(8), publisher=3))
    rig.fleet.cut()
    assert rig.outcomes() == {"taken": 1, "stale": 2, "garbage": 3, "unknown_worker": 2}
    assert [row.prefill_tokens for batch in rig.sent for row in step_rows(batch.steps)] == [100]


def test_a_worker_without_records_is_absent_until_they_return(rig: Rig) -> None:
    assert rig.states() == {NAME: "unknown"}
    rig.fleet.take(message(record(1)))
    assert rig.states() == {NAME: "exact"}
    rig.clock.advance_ms(AWAY_NS / MS + 1)
    rig.look()
    assert rig.states() == {NAME: "away"}
    assert rig.fleet.status()[0].trouble == "it publishes no records"
    rig.fleet.take(message(record(2), NOW_MS + 4_001))
    assert rig.states() == {NAME: "exact"}


def test_a_silent_publisher_is_reconnected_at_intervals(rig: Rig) -> None:
    assert rig.fleet.quiet_endpoints() == []
    rig.clock.advance_ms(AWAY_NS / MS + 1)
    assert rig.fleet.quiet_endpoints() == ["tcp://127.0.0.1:1"]
    assert rig.fleet.quiet_endpoints() == []
    rig.clock.advance_ms(AWAY_NS / MS + 1)
    rig.fleet.take(message(record(1)))
    assert rig.fleet.quiet_endpoints() == []


def test_a_worker_that_leaves_the_folder_is_reported_as_left(rig: Rig) -> None:
    rig.fleet.take(message(record(1)))
    for file in (rig.folder / "v1" / "mdc").iterdir():
        file.unlink()
    rig.look()
    assert rig.states() == {}
    assert [batch.last for batch in rig.sent] == [False, True]


def test_a_worker_whose_files_are_no_longer_updated_has_left(rig: Rig) -> None:
    rig.fleet.take(message(record(1)))
    rig.clock.advance_ms(LEASE_S * 1000 + 1)
    rig.look()
    assert rig.states() == {}
    assert rig.sent[-1].last


def test_a_restarted_worker_has_the_same_name_and_causes_no_spike(rig: Rig) -> None:
    for number in range(1, 11):
        rig.fleet.take(message(record(number, 0.01), NOW_MS + 10 * number))
    touched(join(rig.folder, card(), channel(publisher=PUBLISHER + 1)), NOW_MS)
    rig.look()
    rig.fleet.take(message(record(1, 0.01), NOW_MS + 3_000, 0, publisher=PUBLISHER + 1))
    rig.fleet.take(message(record(2, 0.01), NOW_MS + 3_010, 1, publisher=PUBLISHER + 1))
    rig.fleet.cut()
    assert {batch.worker_id for batch in rig.sent} == {NAME}
    rows = [row for batch in rig.sent for row in step_rows(batch.steps)]
    assert len(rows) == 12
    assert all(one.end_unix_ns <= two.start_unix_ns for one, two in pairwise(rows))
    covered = sum(batch.covered_to_unix_ns - batch.covered_from_unix_ns for batch in rig.sent)
    assert covered == sum(row.end_unix_ns - row.start_unix_ns for row in rows)
    assert rig.fleet.status()[0].restarts == 1


def test_another_process_under_another_id_is_another_worker(rig: Rig) -> None:
    rig.fleet.take(message(record(9)))
    touched(join(rig.folder, card(worker=WORKER + 1), channel(publisher=PUBLISHER + 1)), NOW_MS)
    rig.look()
    rig.fleet.take(message(record(1, worker=WORKER + 1), publisher=PUBLISHER + 1))
    assert rig.states() == {NAME: "exact", f"prefill-{WORKER + 1:x}": "exact"}
    assert "restarts" not in rig.outcomes()


@pytest.mark.parametrize("made", ["", "v1", "v1/instances"])
def test_a_folder_without_dynamo_files_is_refused_with_a_remedy(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "kv"
    if made:
        (folder / made).mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=r"DYN_DISCOVERY_BACKEND=file.*DYN_FILE_KV"):
        check_folder(folder)


def test_files_that_are_neither_cards_nor_channels_are_ignored(rig: Rig) -> None:
    for file in ("mdc/a", "event_channels/forward%2Dpass%2Dmetrics"):
        (rig.folder / "v1" / file).write_bytes(b"\xff\x00{")
    (rig.folder / "v1" / "mdc" / "folder").mkdir()
    members = read_members(rig.folder, NOW_MS / 1000)
    assert (set(members.cards), set(members.channels)) == ({str(WORKER)}, {PUBLISHER})
