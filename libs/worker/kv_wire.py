"""The wire form of KvFrame. It copies the blocks once, where protobuf would copy them several times. Pure."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from google.protobuf.message import DecodeError

from libs.contracts.errors import KvLost
from libs.contracts.packing import pack_u32, unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvChunk

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DATA_TAG = pb.KvFrame.DATA_FIELD_NUMBER << 3 | _BYTES
MAX_VARINT_BYTES = 10
# A frame takes no further chunk once its blocks have reached this size.
MAX_FRAME_BYTES = 4 * 1024 * 1024
# A sender pauses a pull while this many bytes are sent and not yet reported as read.
WINDOW_BYTES = 4 * 1024 * 1024


def chunk_message(pull: int, chunk: KvChunk, *, last: bool, in_place: bool) -> pb.KvChunk:
    """Return a frame's entry for a chunk, with its number of bytes in the frame's data or its blocks in the pool."""
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
        token_ids=pack_u32(chunk.token_ids) if chunk.token_ids else b"",
        waited_ns=chunk.waited_ns,
    )


def encode(frame: pb.KvFrame, data: Sequence[memoryview]) -> bytes:
    """Encode a frame without data, and the data of its chunks, as one message."""
    message = frame.SerializeToString()
    if not data:
        return message
    size = sum(view.nbytes for view in data)
    return b"".join((message, bytes((_DATA_TAG,)), _varint_of(size), *data))


def decode(message: bytes) -> tuple[pb.KvFrame, memoryview]:
    """Split a message into its frame and a view of its data. Raise KvLost if it is malformed."""
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
    """Yield a frame's chunks with their data. Raise KvLost if they claim more bytes than there are."""
    at = 0
    for chunk in frame.chunks:
        end = at + chunk.sent_bytes
        if end > data.nbytes:
            raise KvLost(f"a frame of KV blocks has {data.nbytes} bytes where its chunks name {end}")
        yield chunk, data[at:end]
        at = end


def numbers(packed: bytes) -> list[int]:
    """Unpack a list of pull numbers or tokens. Raise KvLost if it is malformed."""
    try:
        return unpack_u32(packed) if packed else []
    except ValueError:
        raise KvLost("numbers in a frame of KV blocks are not a whole number of uint32") from None


def split(data: memoryview, blocks: int) -> tuple[memoryview, ...]:
    """Split a chunk's data by block. Raise KvLost if it cannot be divided evenly."""
    if not data.nbytes:
        return ()
    size, left = divmod(data.nbytes, blocks) if blocks else (0, 1)
    if left:
        raise KvLost(f"{data.nbytes} bytes came for {blocks} KV blocks")
    ends = accumulate([size] * blocks)
    return tuple(data[end - size : end] for end in ends)


def _value(message: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return the start and end of a field's value."""
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
    """Return a varint's value and the position after it."""
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
