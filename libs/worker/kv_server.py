"""KvService over gRPC: blocks leave under a lease that ends with the receiver's ack."""

import asyncio
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest, KvLost, QueueFull
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.rpc import abort_with, read_message
from libs.worker import kv_wire
from libs.worker.host import WorkerHost

log = structlog.get_logger()

FRAME_TIMEOUT_S = 10.0
"""How long a receiver may take to open or to ack; without an ack the blocks stay until their lease ends."""
MAX_PULLS = 512
"""Transfers out of this worker at a time; credits keep it far below, and more are refused."""

Context = grpc.aio.ServicerContext[Any, Any]


class KvServicer:
    """Serves the blocks of prefilled sequences to other workers."""

    def __init__(self, host: WorkerHost, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation
        self.pulls = 0
        """Transfers under way."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve. Chunks leave as the bytes that `kv_wire` makes."""
        service = pb.DESCRIPTOR.services_by_name["KvService"].full_name
        handler: grpc.RpcMethodHandler[pb.PullFrame, bytes] = grpc.stream_stream_rpc_method_handler(
            self.pull, request_deserializer=pb.PullFrame.FromString, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Pull": handler}),))

    async def pull(self, _frames: Any, context: Context) -> None:
        """Send the blocks behind one handle, then wait for the ack that frees them."""
        self.pulls += 1
        try:
            await self._pull(context)
        except FulcrumError as error:
            await abort_with(context, error)
        finally:
            self.pulls -= 1

    async def _pull(self, context: Context) -> None:
        if self.pulls > MAX_PULLS:
            log.warning("a KV transfer is refused", under_way=MAX_PULLS)
            raise QueueFull(f"{MAX_PULLS} transfers are under way")
        pull = (await _frame(context)).open
        if pull.incarnation != self._incarnation:
            raise KvLost("the worker that held the blocks has restarted")
        engine = self._host.engine
        in_place = bool(pull.shared_nonce) and pull.shared_nonce == engine.capabilities.kv_nonce
        chunks = engine.export(pull.handle, pull.kv_layout, pull.from_block, in_place=in_place)
        async with aclosing(chunks):
            async for chunk in chunks:
                await context.write(kv_wire.encode(chunk, in_place=in_place))
            await context.write(kv_wire.LAST)
            if (await _frame(context)).HasField("ack"):
                self._host.release(pull.handle)


async def _frame(context: Context) -> pb.PullFrame:
    try:
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            frame: Any = await read_message(context)
    except TimeoutError:
        raise InvalidRequest(f"nothing from the receiver within {FRAME_TIMEOUT_S:g} s") from None
    return frame if isinstance(frame, pb.PullFrame) else pb.PullFrame()
