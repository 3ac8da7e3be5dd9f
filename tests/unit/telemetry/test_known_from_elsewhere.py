"""Tests of workers known from another instance or a file before their own telemetry arrives."""

import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, SharedWorker, StepBatch
from libs.telemetry.columns import prefill_shares
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.fleet import MAX_AHEAD_NS, FleetTelemetry
from libs.testing.workers.telemetry import MS, at, step, step_batch


def plain(number: int, worker: str = "w") -> StepBatch:
    return step_batch(
        number, (100 * number, 100 * number + 100), [step(100 * number, 100 * number + 50, decode=1)], worker=worker
    )


def test_hand_offs_counted_by_another_instance_are_not_counted_again_after_a_takeover() -> None:
    fleet = FleetTelemetry(prefill_shares)
    fleet.relay(SharedWorker(newest=plain(99)), at(10_000), at(10_000), "other")
    for number in range(50, 120):  # all that came since, in one go
        batch = plain(number)
        batch.kv_transfers.append(KvTransfer(bytes=7))
        fleet.add(batch, at(12_000))
    assert fleet.kv_bytes["network"] == 7 * 20


def test_an_expected_worker_gives_no_information_about_its_hosts_clock() -> None:
    fleet = FleetTelemetry(prefill_shares)
    behind_ms = 5_000
    for worker, late_ms in (("a", 0), ("b", behind_ms), ("c", 0)):
        kept = step_batch(0, (9_900 - late_ms, 10_000 - late_ms), worker=worker)
        kept.node = worker
        fleet.expect(kept)
    assert fleet.clocks.offsets_ns(at(14_000)) == {}
    assert fleet.directory.newest_cover_ns == 0
    for worker, late_ms in (("a", 0), ("b", behind_ms), ("c", 0)):
        received = step_batch(1, (13_900 - late_ms, 14_000 - late_ms), worker=worker)
        received.node = worker
        fleet.add(received, at(14_030))
    assert fleet.clocks.offsets_ns(at(14_100))["b"] == -behind_ms * MS


@pytest.mark.parametrize("end_ns", [at(150) + MAX_AHEAD_NS + 1, 2**63, 2**64 - 1])
def test_a_step_that_ends_further_ahead_than_clocks_can_differ_is_refused(end_ns: int) -> None:
    fleet = FleetTelemetry(prefill_shares)
    assert not fleet.relay(SharedWorker(newest=plain(0), last_step_end_unix_ns=end_ns), at(150), at(150), "other")
    assert list(fleet.directory.known()) == []


def test_a_worker_that_returns_after_it_was_given_up_is_listed_at_once() -> None:
    fleet = FleetTelemetry(prefill_shares)
    away = LISTED_NS // (100 * MS) + 10
    fleet.add(plain(0, "back"), at(100))
    fleet.add(plain(away, "other"), at(100 * away + 100))
    now_ns = at(100 * away + 110)
    assert fleet.directory.listing(now_ns).ids == ["other"]
    returned = plain(away, "back")
    returned.sequence = 1
    fleet.add(returned, now_ns)
    assert fleet.directory.listing(now_ns).ids == ["back", "other"]


@pytest.mark.parametrize("numbered", [True, False])
def test_a_changed_description_is_listed_whether_or_not_the_worker_numbers_it(numbered: bool) -> None:
    fleet = FleetTelemetry(prefill_shares)
    for number, kv_blocks in enumerate((5, 5, 5, 9, 9, 7)):
        batch = plain(number)
        batch.kv_blocks = kv_blocks
        batch.description = numbered * kv_blocks
        fleet.add(batch, at(100 * number + 100))
        (listed,) = fleet.directory.listing(at(100 * number + 100)).workers
        assert listed.kv_blocks == kv_blocks
