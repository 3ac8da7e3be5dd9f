"""KV chunks on the wire: the same as protobuf's own, and nothing but KvLost for garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import KvLost
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import KvChunk
from libs.worker import kv_wire

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
MESSAGES = st.builds(
    pb.KvChunk,
    first_block=U32, blocks=U32, data=st.binary(max_size=300), data_bytes=U64, last=st.booleans(),
    checksums=st.lists(U64, max_size=5), pool_blocks=st.lists(U32, max_size=5),
)  # fmt: skip


@given(st.lists(st.binary(min_size=200, max_size=200), max_size=4), U32, st.booleans())
def test_what_is_encoded_is_what_protobuf_reads_and_decode_gives(data: list[bytes], first: int, in_place: bool) -> None:
    views = tuple(map(memoryview, data))
    chunk = KvChunk(first, len(data), views, 200 * len(data), tuple(range(len(data))), tuple(range(9, 9 + len(data))))
    encoded = kv_wire.encode(chunk, in_place=in_place)
    whole = pb.KvChunk.FromString(encoded)
    assert (whole.first_block, whole.blocks, whole.data_bytes) == (first, len(data), 200 * len(data))
    assert tuple(whole.checksums) == chunk.checksums
    assert (whole.data, tuple(whole.pool_blocks)) == ((b"", chunk.pool_blocks) if in_place else (b"".join(data), ()))
    message, sent = kv_wire.decode(encoded)
    assert sent == whole.data and not message.data and message.checksums == whole.checksums
    if not in_place:
        assert kv_wire.split(sent, message.blocks) == views


@given(MESSAGES)
def test_whatever_protobuf_writes_is_read(message: pb.KvChunk) -> None:
    rest, data = kv_wire.decode(message.SerializeToString())
    assert data == message.data
    message.ClearField("data")
    assert rest == message


@given(st.one_of(st.binary(max_size=60), MESSAGES.map(lambda message: message.SerializeToString()[:-1])))
def test_garbage_is_lost_kv_and_nothing_else(raw: bytes) -> None:
    try:
        _, data = kv_wire.decode(raw)
    except KvLost:
        return
    assert len(data) <= len(raw)


def test_data_that_is_no_whole_number_of_blocks_is_lost() -> None:
    for size, blocks in ((5, 2), (5, 0)):
        with pytest.raises(KvLost):
            kv_wire.split(memoryview(bytes(size)), blocks)
