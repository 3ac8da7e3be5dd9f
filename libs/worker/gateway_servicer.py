"""WorkerService over gRPC: one stream for each gateway, and one frame for all pending output when it can be written."""

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
from libs.worker.gateways.attached import AttachedGateway
from libs.worker.host import WorkerHost

log = structlog.get_logger()

HELLO_TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Carries frames between gateways and the host. When a stream ends, its sequences are aborted."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def Serve(self, _frames: Any, context: Context) -> None:  # noqa: N802 - the service's name in proto
        """Serve one gateway until it leaves or the worker closes the stream."""
        try:
            first = await _hello(context)
            gateway = self._host.gateways.attach(first.hello)
        except FulcrumError as error:
            await abort_with(context, error)
            return
        log.info("gateway attached", gateway=gateway.demand.gateway_id)
        try:
            # By itself: a first frame that is cut short would leave gRPC unable to send the final status.
            await context.send_initial_metadata(())
            await self._carry(gateway, first, context)
        finally:
            self._host.detach(gateway)
            log.info("gateway detached", gateway=gateway.demand.gateway_id, reason=str(gateway.error or "left"))
        if gateway.error is not None:
            await abort_with(context, gateway.error)

    async def _carry(self, gateway: AttachedGateway, first: pb.GatewayFrame, context: Context) -> None:
        await until_first(
            read=self._read(gateway, first, context), write=self._write(gateway, context), closed=gateway.closed.wait()
        )

    async def _read(self, gateway: AttachedGateway, first: pb.GatewayFrame, context: Context) -> None:
        frame: Any = first
        while frame is not grpc.aio.EOF:
            try:
                self._host.receive(gateway, frame)
                frame = await read_message(context)
            except InvalidRequest as error:
                gateway.close(error)
                return

    async def _write(self, gateway: AttachedGateway, context: Context) -> None:
        while True:
            await gateway.wake.wait()
            gateway.wake.clear()
            while self._host.gateways.has_news(gateway):
                # Taken only now that the last write is done: what came meanwhile leaves as one frame.
                await context.write(self._host.gateways.take_frame(gateway))
            if gateway.leaving:
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
