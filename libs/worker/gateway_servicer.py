"""WorkerService over gRPC: one stream for each gateway, one frame for whatever is pending when the stream can write."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.runtime.net.rpc import abort_with, read_message
from libs.runtime.tasks import until_first
from libs.worker.gateways.attached_gateway import AttachedGateway
from libs.worker.host import WorkerHost

log = structlog.get_logger()

HELLO_TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Carries frames between gateways and the host; a stream that ends takes its sequences with it."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def Serve(self, _frames: Any, context: Context) -> None:  # noqa: N802 - the service's name in proto
        """Until the gateway leaves or the worker has a reason to close the stream."""
        try:
            first = await _hello(context)
            link = self._host.gateways.attach(first.hello)
        except FulcrumError as error:
            await abort_with(context, error)
            return
        log.info("gateway attached", gateway=link.waiting.name)
        try:
            # By itself: a first frame that is cut short would leave gRPC unable to send the final status.
            await context.send_initial_metadata(())
            await self._carry(link, first, context)
        finally:
            self._host.detach(link)
            log.info("gateway detached", gateway=link.waiting.name, reason=str(link.error or "left"))
        if link.error is not None:
            await abort_with(context, link.error)

    async def _carry(self, link: AttachedGateway, first: pb.GatewayFrame, context: Context) -> None:
        await until_first(
            read=self._read(link, first, context), write=self._write(link, context), closed=link.closed.wait()
        )

    async def _read(self, link: AttachedGateway, first: pb.GatewayFrame, context: Context) -> None:
        frame: Any = first
        while frame is not grpc.aio.EOF:
            try:
                self._host.receive(link, frame)
                frame = await read_message(context)
            except InvalidRequest as error:
                link.close(error)
                return

    async def _write(self, link: AttachedGateway, context: Context) -> None:
        while True:
            await link.wake.wait()
            link.wake.clear()
            while self._host.gateways.has_news(link):
                # Taken only now that the last write is done: what came meanwhile leaves as one frame.
                await context.write(self._host.gateways.take_frame(link))
            if link.leaving:
                return


async def _hello(context: Context) -> pb.GatewayFrame:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame: Any = await read_message(context)
    except TimeoutError:
        raise InvalidRequest(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    if frame is grpc.aio.EOF or not frame.HasField("hello"):
        raise InvalidRequest("the first frame must carry hello")
    assert isinstance(frame, pb.GatewayFrame)
    return frame
