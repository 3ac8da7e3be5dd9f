"""The message StepBatch of proto/fulcrum/telemetry in protobuf's encoding.

Generated code requires its version of protobuf, and vLLM's images have different ones. A test compares this encoder
with the generated code.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

ROLE_PREFILL, ROLE_MIXED = 1, 2
_VARINT, _BYTES = 0, 2


class Span(NamedTuple):
    start_ns: int
    end_ns: int


class Step(NamedTuple):
    """A step with a model call. The fields are those of `StepColumns`, in the order of their numbers."""

    start_ns: int
    end_ns: int
    prefill_tokens: int = 0
    prefill_sequences: int = 0
    prefill_context_tokens: int = 0
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    prefill_squared_tokens: int = 0


class Load(NamedTuple):
    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    awaiting_kv: int = 0
    free_kv_blocks: int = 0
    preemptions: int = 0


class Source(NamedTuple):
    """The description of an engine, which is the same in each of its batches."""

    name: str
    incarnation: int
    node: str = ""
    gpus: int = 1
    engine: str = ""
    model: str = ""
    role: int = ROLE_MIXED
    budget_tokens: int = 0
    kv_blocks: int = 0
    block_size_tokens: int = 0
    max_sequences: int = 0
    chunk_tokens: int = 0
    group: str = ""


class Batch(NamedTuple):
    """The steps, KV waits and load of an engine in the time [from_ns, to_ns)."""

    sequence: int
    from_ns: int
    to_ns: int
    steps: list[Step]
    kv_waits: list[Span]
    load: Load
    dropped_batches: int = 0
    dummy_steps: int = 0
    dummies: tuple[Span, ...] = ()
    last: bool = False


def encode(source: Source, batch: Batch) -> bytes:
    """Serialize the batch as Fulcrum's protobuf message StepBatch."""
    assignment = _text(1, source.model) + _number(2, source.role) + _number(3, source.budget_tokens)
    parts = [
        _text(1, source.name), _number(2, source.incarnation), _number(3, batch.sequence), _text(4, source.node),
        _number(5, source.gpus), _part(6, assignment), _number(7, batch.from_ns), _number(8, batch.to_ns),
        *_spans(10, batch.kv_waits), _part(12, _numbers(batch.load)), _number(13, batch.dropped_batches),
        _text(14, source.engine), _number(18, source.kv_blocks), _number(19, int(batch.last)),
        _number(20, source.max_sequences), _part(21, _columns(batch.steps)), _number(22, source.block_size_tokens),
        _number(23, source.chunk_tokens), _text(25, source.group),
    ]  # fmt: skip
    if batch.dummy_steps:
        parts.append(_part(26, _number(1, batch.dummy_steps) + b"".join(_spans(2, batch.dummies))))
    return b"".join(parts)


def _columns(steps: list[Step]) -> bytes:
    # Columns are little-endian, like all machines on which vLLM runs. A column of zeros is left out.
    columns = [array("Q", column) for column in zip(*steps, strict=True)]
    return b"".join(_part(number, column.tobytes()) for number, column in enumerate(columns, 1) if any(column))


def _spans(field: int, spans: Iterable[Span]) -> list[bytes]:
    return [_part(field, _numbers(span)) for span in spans]


def _numbers(values: Iterable[int]) -> bytes:
    return b"".join(_number(field, value) for field, value in enumerate(values, 1))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _text(field: int, value: str) -> bytes:
    return _part(field, value.encode()) if value else b""


def _part(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
