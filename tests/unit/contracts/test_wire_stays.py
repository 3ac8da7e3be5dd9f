"""Tests that field numbers, topics and Redis keys stay compatible between releases."""

import inspect
import string
from dataclasses import asdict
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from libs.contracts import keys, topics
from libs.contracts.pb.fulcrum.alerts.v1 import alerts_pb2
from libs.contracts.pb.fulcrum.audit.v1 import audit_pb2
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2
from libs.contracts.pb.fulcrum.common.v1 import common_pb2
from libs.contracts.pb.fulcrum.demand.v1 import demand_pb2
from libs.contracts.pb.fulcrum.planner.v1 import planner_pb2
from libs.contracts.pb.fulcrum.telemetry.v1 import telemetry_pb2
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2
from libs.testing import golden

FILES = (alerts_pb2, audit_pb2, batch_pb2, common_pb2, demand_pb2, planner_pb2, telemetry_pb2, worker_pb2)


def fields(message: Descriptor) -> dict[str, Any]:
    own = {field.name: [field.number, kind(field)] for field in message.fields}
    return own | {nested.name: fields(nested) for nested in message.nested_types}


def kind(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    times = "repeated " * field.is_repeated + "optional " * field.has_presence
    return times + (named.full_name if named else str(field.type))


def values(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def test_field_numbers_and_types_are_stable() -> None:
    found: dict[str, Any] = {}
    for file in (each.DESCRIPTOR for each in FILES):
        found |= {message.full_name: fields(message) for message in file.message_types_by_name.values()}
        found |= {enum.full_name: values(enum) for enum in file.enum_types_by_name.values()}
        found |= {
            service.full_name: {
                call.name: [call.input_type.full_name, call.output_type.full_name] for call in service.methods
            }
            for service in file.services_by_name.values()
        }
    golden.hold("protos", found)


def test_topics_are_stable() -> None:
    golden.hold(
        "topics",
        {topic.name("c"): {**asdict(topic), "value": topic.value.DESCRIPTOR.full_name} for topic in topics.ALL},
    )


def test_redis_keys_are_stable() -> None:
    functions = {name: make for name, make in vars(keys).items() if inspect.isfunction(make)}
    golden.hold(
        "redis_keys",
        {
            name: make(*string.ascii_lowercase[: len(inspect.signature(make).parameters)])
            for name, make in functions.items()
        },
    )


@pytest.mark.parametrize(
    ("was", "now", "reported"),
    [
        ({"a": 1}, {"a": 2.5}, []),
        ({"a": 1}, {"a": "x"}, [".a was number, is string"]),
        ({"a": 1}, {}, [".a is missing"]),
        ({}, {"a": {"b": 1}}, [".a is new"]),
        ({"a": None}, {"a": 1}, []),
        ({"a": [{"b": 1}]}, {"a": []}, []),
        ({"a": [{"b": 1}, {}]}, {"a": [{}]}, []),
        ({"a": [{"b": 1}]}, {"a": [{"c": 1}]}, [".a[].b is missing", ".a[].c is new"]),
        ({"a": [1]}, {"a": {"b": 1}}, [".a was a list, is an object"]),
        ({"decode-1": {"b": 1}}, {"decode-2": {"b": 1}}, []),
    ],
)
def test_shapes_differ_if_a_reader_would_notice(was: Any, now: Any, reported: list[str]) -> None:
    ids = ("decode-1", "decode-2")
    assert golden.differences(golden.shape(was, ids), golden.shape(now, ids)) == reported
