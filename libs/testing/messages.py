"""Protobuf messages with values at the limits of the wire: Hypothesis strategies, and all messages that differ from a
plain one in a single field.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from libs.telemetry.fleet_loads import COLUMNS

MAX_REPEATED = 4
MAX_DEPTH = 4

M = TypeVar("M", bound=Message)
Known = Mapping[str, st.SearchStrategy[Any]]
"""Values that get further than random ones, by full field name ("fulcrum.worker.v1.Submit.model") or bare name."""

_EDGES = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 7, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**64 - 1),
}


def messages(kind: type[M], known: Known | None = None) -> st.SearchStrategy[M]:
    """Draw messages of one type, with each field absent or filled; lists have at most MAX_REPEATED elements."""
    return _of(kind.DESCRIPTOR, known or {}, MAX_DEPTH)


def spoiled(whole: st.SearchStrategy[M]) -> st.SearchStrategy[bytes]:
    """Draw encoded messages: most are valid, the others are truncated or have changed bytes."""
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
            setattr(message, name, _fitting(field, value))
    return message


def _fitting(field: Any, value: Any) -> Any:
    # Columns are called as the numbers that they consist of.
    is_column = field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, int)
    return value.to_bytes(8, "little") if is_column else value


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


MANY: Final = 2_000
"""The length of a list that is much longer than any of ours."""
LONG_CHARS: Final = 100_000
_HOUR_NS: Final = 3_600 * 10**9


def plain(kind: type[M], known: Mapping[str, Any] | None = None) -> M:
    """Build a message with a value in every field: 1, "a", one element. `known` has values by field name."""
    message: M = _plain(kind.DESCRIPTOR, known or {})
    return message


def extremes(base: M) -> Iterator[tuple[str, M]]:
    """Yield copies of a message with one field, at any depth, at a limit of its type. Each has a name and value."""
    for path in _paths(base.DESCRIPTOR):
        field = path[-1]
        for value in _ends(field):
            copy = type(base)()
            copy.CopyFrom(base)
            place = _place(copy, path[:-1])
            try:
                _put(place, field, value)
            except (TypeError, ValueError):  # the wire cannot carry such a value
                continue
            yield f"{'.'.join(each.name for each in path)} {str(value)[:40]}", copy


def _plain(descriptor: Any, known: Mapping[str, Any]) -> Any:
    message = GetMessageClass(descriptor)()
    taken: set[str] = set()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.name not in known.get("", ()):
            if oneof.name in taken:
                continue
            taken.add(oneof.name)
        _put(message, field, _fitting(field, known.get(field.full_name, known.get(field.name, _usual(field, known)))))
    return message


def _usual(field: Any, known: Mapping[str, Any]) -> Any:
    if _is_map(field):
        return {"a": "a"}
    if field.message_type:
        one = _plain(field.message_type, known)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        one = "a" if field.type == FieldDescriptor.TYPE_STRING else b""
    else:
        one = 1
    return [one] if field.is_repeated else one


def _paths(descriptor: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for field in descriptor.fields:
        yield (*above, field)
        if field.message_type and not _is_map(field):
            yield from _paths(field.message_type, (*above, field))


def _place(message: Any, path: tuple[Any, ...]) -> Any:
    """Return the part of a message at a path, created if absent. Of each list, the first element is taken."""
    for field in path:
        message = getattr(message, field.name)
        if field.is_repeated:
            message = message[0] if message else message.add()
        else:
            message.SetInParent()
    return message


def _put(message: Any, field: Any, value: Any) -> None:
    place = getattr(message, field.name)
    if _is_map(field):
        place.clear()
        place.update(value)
    elif field.is_repeated:
        many = list(place[:1]) * MANY if value is MANY else list(value)
        del place[:]
        place.extend(many)
    elif field.message_type:
        place.CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _ends(field: Any) -> list[Any]:
    if _is_map(field):
        return [{str(number): "a" for number in range(MANY)}, {"a" * LONG_CHARS: "a"}, {"a": "a" * LONG_CHARS}]
    if field.message_type:
        return [MANY] if field.is_repeated else []
    ends = _scalar_ends(field.type)
    return [[end] for end in ends] + [[ends[-1]] * MANY] if field.is_repeated else ends


def _scalar_ends(kind: int) -> list[Any]:
    match kind:
        case FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_FIXED32:
            return [0, 2**31, 2**32 - 1]
        case FieldDescriptor.TYPE_UINT64 | FieldDescriptor.TYPE_FIXED64:
            return [0, 2**49, 2**53, 2**62 - 1, 2**63 - 1, 2**63, 2**64 - 1]
        case FieldDescriptor.TYPE_SINT32 | FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_ENUM:
            return [0, -(2**31), 2**31 - 1]
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return [0.0, -1.0, 1e38, float("inf"), float("-inf"), float("nan")]
        case FieldDescriptor.TYPE_STRING:
            return ["", "\x00\x1b[31m\n", "ff/ff/ff", "/v1/\U0010ffff", "a" * LONG_CHARS]
        case FieldDescriptor.TYPE_BYTES:
            return [b"", b"\xff" * 7, b"\xff" * 8, b"\xff" * 80_000]
        case _:
            return [False, True]


def plausible_fields(now_ns: int) -> dict[str, Any]:
    """Return field values for `plain` that make a message recent enough for a consumer to act on it."""
    moments = ("covered_to_unix_ns", "arrival_unix_ns", "told_unix_ns", "decided_unix_ns", "made_unix_ns",
               "changed_unix_ns", "at_unix_ns", "started_unix_ns", "end_unix_ns")  # fmt: skip
    return {
        **dict.fromkeys(moments, now_ns),
        "start_unix_ns": now_ns // 10**8 * 10**8,
        "covered_from_unix_ns": now_ns - 10**8,
        "until_unix_ns": now_ns + _HOUR_NS,
        "expires_unix_ns": now_ns + _HOUR_NS,
        "incarnation": now_ns,
        "output_tokens": 3,
        "endpoint": "/v1/completions",
        "note": "1/0",
        **{
            f"fulcrum.telemetry.v1.FleetLoads.{name}": (now_ns if name in moments else 1).to_bytes(8, "little")
            for name in COLUMNS
        },
        "fulcrum.telemetry.v1.StepColumns.start_unix_ns": (now_ns - 10**7).to_bytes(8, "little"),
        "fulcrum.telemetry.v1.StepColumns.end_unix_ns": now_ns.to_bytes(8, "little"),
    }
