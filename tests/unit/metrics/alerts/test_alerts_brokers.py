"""Tests of the alert of brokers that lack copies of records."""

from dataclasses import replace

import pytest

from libs.bus.broker import Copies, copies
from libs.policy.alerts.rules import Name, Snapshot
from libs.policy.alerts.watch import AlertWatch
from libs.policy.copies import (
    RECENT_NS,
    CopyLog,
    LostCopies,
    PartitionCopies,
    UnreachableBroker,
    UnreachableBrokers,
    lost_copies,
)
from services.metrics.settings import MetricsSettings

S_NS = 10**9
WHOLE = [PartitionCopies(1, (1, 2, 3), (1, 2, 3)), PartitionCopies(2, (2, 3, 1), (2, 3, 1))]
LOST = [PartitionCopies(2, (1, 2, 3), (2, 3)), PartitionCopies(2, (2, 3, 1), (2, 3))]
SNAPSHOT = Snapshot(0, [], [], [], 0)


def compared(partitions: list[PartitionCopies]) -> LostCopies:
    """Compare the copies of topics that were made with the settings' defaults."""
    return lost_copies(partitions, Copies().needed)


def fired(watch: AlertWatch, lost: LostCopies | None, from_s: int, to_s: int) -> list[str]:
    """Look once a second, and return the sentences of what fires in the end."""
    for second in range(from_s, to_s):
        watch.look(replace(SNAPSHOT, at_ns=second * S_NS, lost_copies=lost))
    return [each.reason for each in watch.book.firing() if each.name == Name.BROKER_LOST]


def test_a_lost_broker_fires_within_the_settings_duration_and_names_itself() -> None:
    watch = AlertWatch(MetricsSettings().alert_limits())
    assert fired(watch, compared(WHOLE), 0, 60) == []
    assert fired(watch, compared(LOST), 60, 69) == []
    assert fired(watch, compared(LOST), 69, 72) == ["Kafka: broker 1 has no copy in sync; records have 2 of 3 copies"]
    assert fired(watch, None, 72, 172) != [], "no broker answers, so nothing is known to have ended"
    assert fired(watch, compared(WHOLE), 172, 203) == []


def test_a_broker_with_some_copies_is_not_called_lost() -> None:
    found = compared([WHOLE[0], LOST[1]])
    assert found.sentence == "Kafka: broker 1 lacks 1 of 2 copies; records have 2 of 3 copies"


def test_a_broker_that_only_this_service_cannot_reach_fires_and_names_both_and_the_remedy() -> None:
    watch = AlertWatch(MetricsSettings().alert_limits())

    def look(found: UnreachableBrokers | None, from_s: int, to_s: int) -> list[tuple[str, str]]:
        for second in range(from_s, to_s):
            watch.look(replace(SNAPSHOT, at_ns=second * S_NS, unreachable=found))
        firing = watch.book.firing()
        return [(each.severity, each.reason) for each in firing if each.name == Name.BROKER_UNREACHABLE]

    found = UnreachableBrokers("node-a", (UnreachableBroker(1, "k1:9092", 12),))
    sentence = (
        "Kafka: broker 1 (k1:9092) cannot be reached from node-a, though other brokers reach it;"
        " 12 partitions that it leads cannot be read or written from there;"
        " check routes, firewalls and the broker's advertised.listeners"
    )
    assert look(UnreachableBrokers("node-a"), 0, 60) == []
    assert look(found, 60, 69) == []
    assert look(found, 69, 72) == [("critical", sentence)]
    assert look(None, 72, 172) != [], "no broker answers, so nothing is known to have ended"
    assert look(UnreachableBrokers("node-a"), 172, 203) == []
    idle = UnreachableBrokers("node-a", (UnreachableBroker(2, "k2:9092", 0), UnreachableBroker(3, "k3:9092", 0)))
    assert look(idle, 203, 215) == [("warning", idle.sentence)]
    assert "broker 2 (k2:9092) and broker 3 (k3:9092) cannot be reached" in idle.sentence


def test_partitions_without_a_leader_are_critical() -> None:
    found = compared([PartitionCopies(-1, (1, 2), (1,)), PartitionCopies(1, (1, 2), (1,))])
    assert found.sentence == (
        "Kafka: broker 1 lacks 1 of 2 copies, broker 2 has no copy in sync;"
        " 1 partition cannot be written until a broker is back"
    )
    watch = AlertWatch(MetricsSettings().alert_limits())
    assert fired(watch, found, 0, 12) == [found.sentence]
    assert [each.severity for each in watch.book.firing()] == ["critical"]


def test_the_only_copy_of_a_partition_without_a_leader_is_missing() -> None:
    found = compared([PartitionCopies(-1, (1,), (1,))])
    assert found.sentence == "Kafka: broker 1 has no copy in sync; 1 partition cannot be written until a broker is back"
    assert LostCopies(stopped=2).sentence == "Kafka: 2 partitions cannot be written until a broker is back"


def test_partitions_with_fewer_copies_than_a_write_needs_are_critical() -> None:
    found = compared([PartitionCopies(3, (1, 2, 3), (3,)), PartitionCopies(3, (2, 3, 1), (3,))])
    assert found.sentence == (
        "Kafka: broker 1 has no copy in sync, broker 2 has no copy in sync;"
        " 2 partitions cannot be written until a broker is back"
    )
    watch = AlertWatch(MetricsSettings().alert_limits())
    assert fired(watch, found, 0, 12) == [found.sentence]
    assert [each.severity for each in watch.book.firing()] == ["critical"]


@pytest.mark.parametrize(
    ("in_sync_setting", "assigned", "in_sync", "stopped"),
    [
        (0, (1, 2, 3), (2, 3), 0),
        (0, (1, 2, 3), (3,), 1),
        (0, (1, 2), (2,), 0),
        (1, (1, 2, 3), (3,), 0),
        (3, (1, 2, 3), (2, 3), 1),
        (3, (1, 2), (1, 2), 0),
    ],
)
def test_the_settings_decide_how_many_copies_a_write_needs(
    in_sync_setting: int, assigned: tuple[int, ...], in_sync: tuple[int, ...], stopped: int
) -> None:
    found = lost_copies([PartitionCopies(in_sync[0], assigned, in_sync)], Copies(in_sync=in_sync_setting).needed)
    assert found.stopped == stopped


def test_a_partition_needs_no_more_copies_than_it_has() -> None:
    assert not lost_copies([PartitionCopies(1, (1,), (1,))], lambda _: 2)


def test_only_partitions_that_lack_copies_decide_how_many_copies_records_have() -> None:
    found = compared([PartitionCopies(1, (1,), (1,)), *LOST])
    assert (found.fewest, found.wanted) == (2, 3)


def test_a_broker_that_catches_up_is_not_called_lost() -> None:
    found = compared([PartitionCopies(1, (1, 2, 4), (1, 2)), PartitionCopies(2, (4, 1, 2), (2, 1))])
    assert found.sentence == "Kafka: broker 4 has no copy in sync; records have 2 of 3 copies"


def test_topics_without_copies_have_nothing_to_lose() -> None:
    assert not compared([PartitionCopies(1, (1,), (1,))])
    assert not compared([])


def test_an_answer_of_a_broker_that_is_cut_off_does_not_hide_the_loss() -> None:
    log = CopyLog()
    assert log.worst(0) is None
    log.add(1 * S_NS, compared(LOST))
    log.add(2 * S_NS, compared(WHOLE))
    assert log.worst(2 * S_NS) == compared(LOST)
    assert log.worst(1 * S_NS + RECENT_NS + 1) == compared(WHOLE)
    assert log.worst(2 * S_NS + RECENT_NS + 1) is None


def test_copies_are_read_from_a_brokers_description_of_topics() -> None:
    described = [{"topic": "a", "partitions": [{"leader": 2, "replicas": [1, 2], "isr": [2], "partition": 0}]}]
    assert list(copies(described)) == [PartitionCopies(2, (1, 2), (2,))]
