"""WorkerAdminService over gRPC; the server's interceptor has checked the token."""

from typing import Any

import grpc
import grpc.aio
import structlog

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.roles import role_name
from libs.runtime.rpc import abort_with
from libs.worker.drain import drain
from libs.worker.host import WorkerHost
from libs.worker.wire import load_message

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(pb_grpc.WorkerAdminServiceServicer):
    """Describe, SetRole, Drain."""

    def __init__(self, host: WorkerHost, *, drain_s: float) -> None:
        self._host = host
        self._drain_s = drain_s

    async def Describe(self, _request: pb.DescribeRequest, _context: Context) -> pb.DescribeResponse:  # noqa: N802
        """The worker, its depths, and what it still holds."""
        return pb.DescribeResponse(
            worker=self._host.worker(),
            load=load_message(self._host.engine.load()),
            integrity=self._host.integrity(),
        )

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:  # noqa: N802
        """Compare-and-set on the epoch; FAILED_PRECONDITION (stale_role) when it is not the current one."""
        try:
            assignment = self._host.set_role(request)
        except FulcrumError as error:
            await abort_with(context, error)
            raise
        log.info("role set", role=role_name(assignment), epoch=assignment.epoch, reason=request.reason)
        return pb.SetRoleResponse(assignment=assignment)

    async def Drain(self, request: pb.DrainRequest, _context: Context) -> pb.DrainResponse:  # noqa: N802
        """Drain within the deadline asked for, or the worker's own; it stays draining until it is stopped."""
        deadline_s = request.deadline_ms / 1000 if request.deadline_ms else self._drain_s
        drained = await drain(self._host, min(deadline_s, self._drain_s))
        return pb.DrainResponse(finished=drained.finished, aborted=drained.aborted)
