"""Tests of the alert of a broker that is lost or has fewer copies than it should."""

from dataclasses import replace

from libs.bus.broker import copies
from libs.policy.alerts.rules import Name, Snapshot
from libs.policy.alerts.watch import AlertWatch
from libs.policy.copies import RECENT_NS, CopyLog, LostCopies, PartitionCopies, lost_copies
from services.metrics.settings import MetricsSettings

S_NS = 10**9
WHOLE = [PartitionCopies(1, (1, 2, 3), (1, 2, 3)), PartitionCopies(2, (2, 3, 1), (2, 3, 1))]
LOST = [PartitionCopies(2, (1, 2, 3), (2, 3)), PartitionCopies(2, (2, 3, 1), (2, 3))]
SNAPSHOT = Snapshot(0, [], [], [], 0)


def fired(watch: AlertWatch, lost: LostCopies | None, from_s: int, to_s: int) -> list[str]:
    """Look once a second, and return the sentences of what fires in the end."""
    for second in range(from_s, to_s):
        watch.look(replace(SNAPSHOT, at_ns=second * S_NS, lost_copies=lost))
    return [each.reason for each in watch.book.firing() if each.name == Name.BROKER_LOST]


def test_a_lost_broker_fires_within_the_settings_duration_and_names_itself() -> None:
    watch = AlertWatch(MetricsSettings().alert_limits())
    assert fired(watch, lost_copies(WHOLE), 0, 60) == []
    assert fired(watch, lost_copies(LOST), 60, 69) == []
    assert fired(watch, lost_copies(LOST), 69, 72) == ["Kafka: broker 1 is lost; records have 2 of 3 copies"]
    assert fired(watch, None, 72, 172) != [], "no broker answers, so nothing is known to have ended"
    assert fired(watch, lost_copies(WHOLE), 172, 203) == []


def test_a_broker_with_some_copies_is_not_called_lost() -> None:
    found = lost_copies([WHOLE[0], LOST[1]])
    assert found.sentence == "Kafka: broker 1 lacks 1 of 2 copies; records have 2 of 3 copies"


def test_partitions_without_a_leader_are_critical() -> None:
    found = lost_copies([PartitionCopies(-1, (1, 2), (1,)), PartitionCopies(1, (1, 2), (1,))])
    assert found.sentence == "Kafka: broker 2 is lost; 1 partitions have no leader, so their records wait"
    watch = AlertWatch(MetricsSettings().alert_limits())
    assert fired(watch, found, 0, 12) == [found.sentence]
    assert [each.severity for each in watch.book.firing()] == ["critical"]


def test_topics_without_copies_have_nothing_to_lose() -> None:
    assert not lost_copies([PartitionCopies(1, (1,), (1,))])
    assert not lost_copies([])


def test_an_answer_of_a_broker_that_is_cut_off_does_not_hide_the_loss() -> None:
    log = CopyLog()
    assert log.worst(0) is None
    log.add(1 * S_NS, lost_copies(LOST))
    log.add(2 * S_NS, lost_copies(WHOLE))
    assert log.worst(2 * S_NS) == lost_copies(LOST)
    assert log.worst(1 * S_NS + RECENT_NS + 1) == lost_copies(WHOLE)
    assert log.worst(2 * S_NS + RECENT_NS + 1) is None


def test_copies_are_read_from_a_brokers_description_of_topics() -> None:
    described = [{"topic": "a", "partitions": [{"leader": 2, "replicas": [1, 2], "isr": [2], "partition": 0}]}]
    assert list(copies(described)) == [PartitionCopies(2, (1, 2), (2,))]
