"""WorkerAdminService of a pool's worker, on an address that stays while its models change."""

from typing import Any

import grpc.aio

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.runtime.net.rpc import abort_with
from libs.worker.pool.member import PoolMember

Context = grpc.aio.ServicerContext[Any, Any]


class PoolAdminServicer(pb_grpc.WorkerAdminServiceServicer):
    """Describe and AssignModel; the rest is asked of the worker that serves a model, at its own address."""

    def __init__(self, member: PoolMember) -> None:
        self._member = member

    async def Describe(self, _request: pb.DescribeRequest, _context: Context) -> pb.DescribeResponse:  # noqa: N802
        """The worker as it is registered."""
        return pb.DescribeResponse(worker=self._member.worker())

    async def AssignModel(  # noqa: N802
        self, request: pb.AssignModelRequest, context: Context
    ) -> pb.AssignModelResponse:
        """Compare-and-set on the epoch; answered before the model is there."""
        try:
            return self._member.assign(request)
        except FulcrumError as error:
            await abort_with(context, error)
            raise
