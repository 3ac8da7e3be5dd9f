"""Tests of records and workers of another release: new fields are ignored, other schemas skipped and counted."""

import re
from types import SimpleNamespace

import pytest

from libs.bus.codec import SCHEMA_HEADER, UNREADABLE, SkippedRecords, decode, encode, to_record
from libs.contracts import topics
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, Assignment, Worker
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan
from libs.contracts.protocol import OLDEST, PROTOCOL
from libs.contracts.topics import Topic
from libs.stores.registry import Unusable, read_worker

NEW_FIELD = b"\x80\xfa\x01\x01"
"""Field 4000, a number that no message uses."""
# Values that are in range, where an empty message is not.
VALID = {topics.CAPACITY: CapacityPlan(step_s=60)}
OWN_SCHEMA = [topic for topic in topics.ALL if not topic.wraps]


def the_worker(role: int = ROLE_MIXED) -> Worker:
    return Worker(id="w", address="h:1", assignment=Assignment(model="m", role=role))  # type: ignore[arg-type]


@pytest.mark.parametrize("topic", OWN_SCHEMA, ids=lambda topic: topic.stem)
def test_a_field_that_a_later_release_adds_to_a_record_is_ignored(topic: Topic) -> None:
    sent = encode(topic, "local", VALID.get(topic, topic.value()))
    read = decode(topic, sent.value + NEW_FIELD, [(SCHEMA_HEADER, sent.schema)])
    assert not isinstance(read, str)
    assert read.DESCRIPTOR is topic.value.DESCRIPTOR


@pytest.mark.parametrize("topic", OWN_SCHEMA, ids=lambda topic: topic.stem)
def test_a_record_of_a_later_schema_is_skipped_and_counted(topic: Topic) -> None:
    sent = encode(topic, "local", VALID.get(topic, topic.value()))
    later = re.sub(rb"\.v\d+\.", b".v99.", sent.schema)
    assert later != sent.schema
    raw = SimpleNamespace(key=b"", value=sent.value, headers=[(SCHEMA_HEADER, later)], partition=0, offset=7)
    skipped = SkippedRecords()
    assert to_record(topic, raw, skipped) is None
    assert skipped.counts == {(topic.stem, UNREADABLE): 1}


def test_every_topic_names_the_version_of_its_records() -> None:
    assert all(re.fullmatch(r"[a-z-]+\.v[1-9]\d*", topic.stem) for topic in topics.ALL)


def test_a_registered_worker_of_a_later_release_is_read_without_its_new_fields() -> None:
    worker = the_worker()
    assert read_worker(b"w", worker.SerializeToString() + NEW_FIELD).assignment == worker.assignment


def test_a_registered_worker_with_a_role_of_a_later_release_is_not_used() -> None:
    with pytest.raises(Unusable, match="role 99 is unknown here"):
        read_worker(b"w", the_worker(role=99).SerializeToString())


def test_a_release_understands_the_previous_protocol() -> None:
    assert 1 <= OLDEST <= max(PROTOCOL - 1, 1)
