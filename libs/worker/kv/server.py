"""KvService over gRPC: one stream for each receiver, and one frame for all pending output when it can be written."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError, QueueFull
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.net.rpc import abort_with, read_message
from libs.runtime.tasks import until_first
from libs.worker.host import WorkerHost
from libs.worker.kv.outbox import TICK_S, KvOutbox

log = structlog.get_logger()

# Concurrent transfers out of this worker. Credits keep them far below; more are refused.
MAX_PULLS = 512
# Concurrent streams; more are refused.
MAX_RECEIVERS = 256

Context = grpc.aio.ServicerContext[Any, Any]


class KvServicer:
    """Serves the blocks of prefilled sequences to other workers."""

    def __init__(self, host: WorkerHost, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation
        self._outboxes: set[KvOutbox] = set()
        self._leaving = asyncio.Event()
        self.refused_pulls = 0
        """Number of transfers refused because `MAX_PULLS` were running."""

    @property
    def pulls(self) -> int:
        return sum(map(len, self._outboxes))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server. Frames leave as the bytes that `kv_wire` makes."""
        service = pb.DESCRIPTOR.services_by_name["KvService"].full_name
        handler: grpc.RpcMethodHandler[pb.PullFrame, bytes] = grpc.stream_stream_rpc_method_handler(
            self.pull, request_deserializer=pb.PullFrame.FromString, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Pull": handler}),))

    def hang_up(self) -> None:
        self._leaving.set()

    async def pull(self, _frames: Any, context: Context) -> None:
        """Serve one receiver's pulls until it leaves."""
        try:
            # By itself: a first frame that is cut short would leave gRPC unable to send the final status.
            await context.send_initial_metadata(())
            await self._carry(context)
        except FulcrumError as error:
            await abort_with(context, error)

    async def _carry(self, context: Context) -> None:
        if len(self._outboxes) >= MAX_RECEIVERS:
            log.warning("a KV receiver is refused", receivers=MAX_RECEIVERS)
            raise QueueFull(f"{MAX_RECEIVERS} receivers are attached already")
        wake = asyncio.Event()
        outbox = KvOutbox(self._host, self._incarnation, has_room=self._has_room, wake=wake.set)
        self._outboxes.add(outbox)
        try:
            await until_first(
                read=_read(outbox, context),
                write=_write(outbox, wake, context),
                tick=_tick(outbox),
                leaving=self._leaving.wait(),
            )
        finally:
            self._outboxes.discard(outbox)
            outbox.close()

    def _has_room(self) -> bool:
        if self.pulls < MAX_PULLS:
            return True
        self.refused_pulls += 1
        log.warning("a KV transfer is refused", under_way=MAX_PULLS)
        return False


async def _read(outbox: KvOutbox, context: Context) -> None:
    while (frame := await read_message(context)) is not grpc.aio.EOF:
        outbox.receive(frame)


async def _write(outbox: KvOutbox, wake: asyncio.Event, context: Context) -> None:
    while True:
        await wake.wait()
        wake.clear()
        # Taken only now that the last write is done: what came meanwhile leaves as one frame.
        while (frame := outbox.take_frame()) is not None:
            await context.write(frame)


async def _tick(outbox: KvOutbox) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        outbox.tick()
