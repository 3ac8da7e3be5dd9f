"""Properties of KV chunks on the wire: equal to protobuf's encoding, and KvLost for garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import KvLost
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvChunk
from libs.worker import kv_wire

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
CHUNKS = st.builds(
    pb.KvChunk,
    pull=U32, first_block=U32, blocks=U32, data_bytes=U64, sent_bytes=st.integers(0, 400), last=st.booleans(),
    checksums=st.lists(U64, max_size=5), pool_blocks=st.lists(U32, max_size=5),
)  # fmt: skip
FAILED = st.builds(pb.PullFailed, pull=U32, failure=st.integers(0, 2), detail=st.text(max_size=9))
FRAMES = st.builds(
    pb.KvFrame,
    chunks=st.lists(CHUNKS, max_size=4), failed=st.lists(FAILED, max_size=3), alive=st.binary(max_size=12),
    data=st.binary(max_size=900),
)  # fmt: skip
SIZE = 200
BLOCKS = st.lists(st.binary(min_size=SIZE, max_size=SIZE), max_size=4)


@given(st.lists(BLOCKS, max_size=3), U32, st.booleans())
def test_encoded_chunks_are_read_by_protobuf_and_round_trip(
    sent: list[list[bytes]], first: int, in_place: bool
) -> None:
    chunks = [
        KvChunk(first, len(data), tuple(map(memoryview, data)), SIZE * len(data), tuple(range(len(data))), (9,))
        for data in sent
    ]
    frame = pb.KvFrame(
        chunks=[
            kv_wire.chunk_message(pull, chunk, last=pull == 1, in_place=in_place) for pull, chunk in enumerate(chunks)
        ]
    )
    encoded = kv_wire.encode(frame, [] if in_place else [view for chunk in chunks for view in chunk.data])
    whole = pb.KvFrame.FromString(encoded)
    assert whole.chunks == frame.chunks
    assert whole.data == (b"" if in_place else b"".join(block for data in sent for block in data))
    parts = list(kv_wire.parts(*kv_wire.decode(encoded)))
    assert [part.pull for part, _ in parts] == list(range(len(sent)))
    for (part, data), chunk in zip(parts, chunks, strict=True):
        assert tuple(part.pool_blocks) == (chunk.pool_blocks if in_place else ())
        assert kv_wire.split(data, part.blocks) == (() if in_place else chunk.data)


@given(FRAMES)
def test_chunks_written_by_protobuf_are_read(frame: pb.KvFrame) -> None:
    rest, data = kv_wire.decode(frame.SerializeToString())
    assert data == frame.data
    frame.ClearField("data")
    assert rest == frame


@given(st.one_of(st.binary(max_size=60), FRAMES.map(lambda frame: frame.SerializeToString()[:-1])))
def test_garbage_raises_only_kv_lost(raw: bytes) -> None:
    try:
        frame, data = kv_wire.decode(raw)
        assert sum(part.nbytes for _, part in kv_wire.parts(frame, data)) <= len(raw)
        kv_wire.numbers(frame.alive)
    except KvLost:
        return


def test_data_that_is_no_whole_number_of_blocks_raises_kv_lost() -> None:
    for size, blocks in ((5, 2), (5, 0)):
        with pytest.raises(KvLost):
            kv_wire.split(memoryview(bytes(size)), blocks)
