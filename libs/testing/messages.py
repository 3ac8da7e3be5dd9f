"""Hypothesis strategies for protobuf messages of any type, with values at the edges of what the wire can carry."""

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_REPEATED = 4
MAX_DEPTH = 4

M = TypeVar("M", bound=Message)
Known = Mapping[str, st.SearchStrategy[Any]]
"""By full field name ("fulcrum.worker.v1.Submit.model") or bare name: values that get further than chance would."""

_EDGES = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 7, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**64 - 1),
}


def messages(kind: type[M], known: Known | None = None) -> st.SearchStrategy[M]:
    """Messages of one type, each field absent or filled; at most MAX_REPEATED in a list."""
    return _of(kind.DESCRIPTOR, known or {}, MAX_DEPTH)


def spoiled(whole: st.SearchStrategy[M]) -> st.SearchStrategy[bytes]:
    """Messages on the wire: most as they should be, others cut short or with bytes that were changed."""
    wire = whole.map(lambda message: message.SerializeToString())
    place = st.floats(0, 1, exclude_max=True)
    cut = st.builds(lambda data, at: data[: int(at * len(data))], wire, place)
    changed = st.builds(_changed, wire, place, st.integers(0, 255))
    return st.one_of(wire, wire, cut, changed, st.binary(max_size=64))


def _changed(data: bytes, at: float, byte: int) -> bytes:
    place = int(at * len(data))
    return data[:place] + bytes((byte,)) + data[place + 1 :]


def _of(descriptor: Any, known: Known, depth: int) -> st.SearchStrategy[Any]:
    fields = {field.name: _field(field, known, depth) for field in descriptor.fields if depth or not field.message_type}
    kind = GetMessageClass(descriptor)
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: _build(kind, values))


def _build(kind: type[Message], values: dict[str, Any]) -> Message:
    message = kind()
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        place = getattr(message, name)
        if _is_map(field):
            place.update(value)
        elif field.is_repeated:
            place.extend(value)
        elif field.message_type:
            place.CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def _is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _field(field: Any, known: Known, depth: int) -> st.SearchStrategy[Any]:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_one(key, known, depth), _one(value, known, depth), max_size=MAX_REPEATED)
    one = _one(field, known, depth)
    return st.lists(one, max_size=MAX_REPEATED) if field.is_repeated else one


def _one(field: Any, known: Known, depth: int) -> st.SearchStrategy[Any]:
    likely = known.get(field.full_name, known.get(field.name))
    anything = _of(field.message_type, known, depth - 1) if field.message_type else _scalar(field)
    return anything if likely is None else st.one_of(likely, likely, likely, anything)


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    match field.type:
        case FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_FIXED32:
            return st.sampled_from(_EDGES[field.type]) | st.integers(0, 2**32 - 1)
        case FieldDescriptor.TYPE_UINT64 | FieldDescriptor.TYPE_FIXED64:
            return st.sampled_from(_EDGES[field.type]) | st.integers(0, 2**64 - 1)
        case FieldDescriptor.TYPE_INT64 | FieldDescriptor.TYPE_SINT64:
            return st.integers(-(2**63), 2**63 - 1)
        case FieldDescriptor.TYPE_SINT32 | FieldDescriptor.TYPE_INT32:
            return st.integers(-(2**31), 2**31 - 1)
        case FieldDescriptor.TYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.TYPE_DOUBLE:
            return st.floats()
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=24)
        case FieldDescriptor.TYPE_ENUM:
            numbers = [value.number for value in field.enum_type.values]
            return st.sampled_from([*numbers, max(numbers) + 1, 2**31 - 1, -1])
        case _:
            raise AssertionError(f"{field.full_name}: no strategy for type {field.type}")
