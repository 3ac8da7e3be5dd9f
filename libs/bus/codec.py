"""Records as they are on the broker: protobuf bytes, the key's text, and a header that names the message. Pure."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from google.protobuf.message import DecodeError, Message

from libs.bus.buffer import Outgoing
from libs.bus.port import Record
from libs.contracts.topics import Topic

SCHEMA_HEADER = "schema"


def encode(topic: Topic, cluster: str, value: Message) -> Outgoing:
    """The record of `value`; raises TypeError when it is not the topic's message."""
    if not isinstance(value, topic.value):
        raise TypeError(f"topic {topic.stem} takes {topic.value.DESCRIPTOR.full_name}, not {type(value).__name__}")
    return Outgoing(
        topic=topic.name(cluster),
        key=str(getattr(value, topic.key)).encode(),
        value=value.SerializeToString(),
        schema=_schema(topic),
    )


def decode(topic: Topic, value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Message | None:
    """The topic's message; None when the header does not name it or the bytes are not one."""
    if value is not None and topic.wraps:
        return topic.value(**{topic.wraps: value})
    if value is None or (SCHEMA_HEADER, _schema(topic)) not in headers:
        return None
    try:
        return topic.value.FromString(value)
    except DecodeError:
        return None


def to_record(topic: Topic, raw: Any) -> Record | None:
    """What aiokafka read, as a record of its topic; None where `decode` has none."""
    value = decode(topic, raw.value, raw.headers)
    if value is None:
        return None
    return Record(topic, (raw.key or b"").decode(errors="replace"), value, raw.partition, raw.offset)


@cache
def _schema(topic: Topic) -> bytes:
    return topic.value.DESCRIPTOR.full_name.encode()
