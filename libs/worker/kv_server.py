"""KvService over gRPC: blocks leave under a lease that ends with the receiver's ack."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from zlib import crc32

import grpc
import grpc.aio

from libs.contracts.errors import FulcrumError, InvalidRequest, KvLost
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.engine.port import KvChunk
from libs.runtime.rpc import abort_with, read_message
from libs.worker.host import WorkerHost

FRAME_TIMEOUT_S = 10.0
"""How long a receiver may take to open or to ack; without an ack the blocks stay until their lease ends."""

Context = grpc.aio.ServicerContext[Any, Any]


class KvServicer(pb_grpc.KvServiceServicer):
    """Serves the blocks of prefilled sequences to other workers."""

    def __init__(self, host: WorkerHost, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation

    async def Pull(self, _frames: Any, context: Context) -> None:  # noqa: N802 - the service's name in proto
        """Send the blocks behind one handle, then wait for the ack that frees them."""
        try:
            pull = (await _frame(context)).open
            if pull.incarnation != self._incarnation:
                raise KvLost("the worker that held the blocks has restarted")
            chunks = self._host.engine.export(pull.handle, pull.kv_layout, pull.from_block)
            async for message in _messages(chunks):
                await context.write(message)
            if (await _frame(context)).HasField("ack"):
                self._host.release(pull.handle)
        except FulcrumError as error:
            await abort_with(context, error)


async def _messages(chunks: AsyncIterator[KvChunk]) -> AsyncIterator[pb.KvChunk]:
    """Chunks with checksums as they come, then one without blocks that says it is the last."""
    async for chunk in chunks:
        yield pb.KvChunk(
            first_block=chunk.first_block,
            blocks=chunk.blocks,
            data=chunk.data,
            data_bytes=chunk.data_bytes,
            crc32=crc32(chunk.data),
        )
    yield pb.KvChunk(last=True)


async def _frame(context: Context) -> pb.PullFrame:
    try:
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            frame: Any = await read_message(context)
    except TimeoutError:
        raise InvalidRequest(f"nothing from the receiver within {FRAME_TIMEOUT_S:g} s") from None
    return frame if isinstance(frame, pb.PullFrame) else pb.PullFrame()
