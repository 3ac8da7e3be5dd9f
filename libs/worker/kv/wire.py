"""KvFrame as gRPC carries it, made and read with one copy of the blocks: protobuf's own code makes several. Pure."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from google.protobuf.message import DecodeError

from libs.contracts.errors import KvLost
from libs.contracts.packing import unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvChunk

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DATA_TAG = pb.KvFrame.DATA_FIELD_NUMBER << 3 | _BYTES
MAX_VARINT_BYTES = 10
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""A frame takes no further chunk once its blocks have this size; the chunk that reaches it is the last."""
WINDOW_BYTES = 4 * 1024 * 1024
"""A pull's sender pauses while this many bytes are on their way, or received and not yet taken in."""


def chunk_message(pull: int, chunk: KvChunk, *, last: bool, in_place: bool) -> pb.KvChunk:
    """What a frame says of a chunk: how many bytes of it follow in the frame's data, or where they lie."""
    return pb.KvChunk(
        pull=pull,
        first_block=chunk.first_block,
        blocks=chunk.blocks,
        data_bytes=chunk.data_bytes,
        sent_bytes=0 if in_place else sum(view.nbytes for view in chunk.data),
        last=last,
        checksums=chunk.checksums,
        pool_blocks=chunk.pool_blocks if in_place else (),
        ready_blocks=chunk.ready_blocks,
    )


def encode(frame: pb.KvFrame, data: Sequence[memoryview]) -> bytes:
    """A frame without data, and the data of its chunks, as one message."""
    message = frame.SerializeToString()
    if not data:
        return message
    size = sum(view.nbytes for view in data)
    return b"".join((message, bytes((_DATA_TAG,)), _varint_of(size), *data))


def decode(message: bytes) -> tuple[pb.KvFrame, memoryview]:
    """A message without its data, and the data as a view of it. Raises KvLost for bytes that are no message."""
    whole = memoryview(message)
    rest, data = [], whole[:0]
    try:
        at = 0
        while at < len(whole):
            start = at
            tag, at = _varint(whole, at)
            begin, at = _value(whole, at, tag & 7)
            if tag == _DATA_TAG:
                data = whole[begin:at]
            else:
                rest.append(whole[start:at])
        return pb.KvFrame.FromString(b"".join(rest)), data
    except (DecodeError, IndexError) as error:
        raise KvLost(f"a frame of KV blocks is no message: {error}") from None


def parts(frame: pb.KvFrame, data: memoryview) -> Iterator[tuple[pb.KvChunk, memoryview]]:
    """The chunks of a frame, each with what was sent of it; raises KvLost where they name more than came."""
    at = 0
    for chunk in frame.chunks:
        end = at + chunk.sent_bytes
        if end > data.nbytes:
            raise KvLost(f"a frame of KV blocks has {data.nbytes} bytes where its chunks name {end}")
        yield chunk, data[at:end]
        at = end


def numbers(packed: bytes) -> list[int]:
    """Pulls by their numbers; raises KvLost for bytes that are none."""
    try:
        return unpack_u32(packed) if packed else []
    except ValueError:
        raise KvLost("numbers of pulls are not a whole number of uint32") from None


def split(data: memoryview, blocks: int) -> tuple[memoryview, ...]:
    """The data of a chunk, block by block; raises KvLost where it is no whole number of bytes each."""
    if not data.nbytes:
        return ()
    size, left = divmod(data.nbytes, blocks) if blocks else (0, 1)
    if left:
        raise KvLost(f"{data.nbytes} bytes came for {blocks} KV blocks")
    ends = accumulate([size] * blocks)
    return tuple(data[end - size : end] for end in ends)


def _value(message: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Where the value of a field begins and ends."""
    if kind == _VARINT:
        _, end = _varint(message, at)
    elif kind == _BYTES:
        size, at = _varint(message, at)
        end = at + size
    elif kind in (_FIXED64, _FIXED32):
        end = at + (8 if kind == _FIXED64 else 4)
    else:
        raise DecodeError(f"wire type {kind}")
    if end > len(message):
        raise DecodeError("cut short")
    return at, end


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number without an end")


def _varint_of(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
