"""The client of a worker's admin service, which describes it, changes its role or model, and times the change."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from libs.contracts.errors import (
    Conflict,
    FulcrumError,
    InvalidRequest,
    NoWorkers,
    QueueFull,
    StaleLead,
    StaleRole,
    Unauthenticated,
)
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Role
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc

CALL_TIMEOUT_S = 5.0
TUNE_TIMEOUT_S = 60.0
POLL_S = 0.01
_ERRORS: tuple[type[FulcrumError], ...] = (StaleLead, StaleRole, Conflict, InvalidRequest, Unauthenticated, QueueFull)


@dataclass(frozen=True, slots=True)
class RoleMove:
    """A completed change of a worker's role, with its measured effect."""

    assignment: Assignment
    effect_s: float | None
    """The seconds from the call until old-role work was refused and every attached gateway routed by the new epoch;
    None if one did not in time.
    """
    call_s: float
    """The duration of the call without the wait for gateways."""
    gateways_behind: int
    running: int
    """The number of sequences that ran in the engine at the change, without waiting ones."""


class WorkerAdmin:
    """The WorkerAdminService of one worker. Calls raise the worker's error, or NoWorkers if it does not answer."""

    def __init__(self, channel: grpc.aio.Channel, worker_id: str, token: str) -> None:
        self._stub: Any = pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]
        self._worker_id = worker_id
        self._metadata = (("authorization", f"Bearer {token}"),)

    async def describe(self) -> pb.DescribeResponse:
        answer: pb.DescribeResponse = await self._call(self._stub.Describe, pb.DescribeRequest(), CALL_TIMEOUT_S)
        return answer

    async def set_role(
        self,
        role: Role,
        budget_tokens: int,
        *,
        expected_epoch: int,
        incarnation: int = 0,
        actor: str,
        reason: str,
        wait_ms: int = 1000,
        own_budget_tokens: int = 0,
        force: bool = False,
        lead_term: int = 0,
    ) -> RoleMove:
        """Change the role if `expected_epoch` is current, then wait at most `wait_ms` until gateways route by it.

        A planner passes as `own_budget_tokens` the budget that the worker had before planners changed it. `force`
        changes the role even if it leaves a phase without workers. `lead_term` is the term of a planner that acts
        without a person.
        """
        request = pb.SetRoleRequest(
            expected_epoch=expected_epoch,
            incarnation=incarnation,
            role=role,
            budget_tokens=budget_tokens,
            actor=actor,
            reason=reason,
            wait_ms=wait_ms,
            own_budget_tokens=own_budget_tokens,
            force=force,
            lead_term=lead_term,
        )
        start_s = time.monotonic()
        answer: pb.SetRoleResponse = await self._call(self._stub.SetRole, request, CALL_TIMEOUT_S + wait_ms / 1000)
        took_s = time.monotonic() - start_s
        return RoleMove(
            assignment=answer.assignment,
            effect_s=None if answer.gateways_behind else took_s,
            call_s=max(took_s - answer.waited_ns / 1e9, 0.0),
            gateways_behind=answer.gateways_behind,
            running=answer.running,
        )

    async def assign_model(self, request: pb.AssignModelRequest) -> pb.AssignModelResponse:
        """Assign another model to a worker of a pool. Return before the model is loaded."""
        answer: pb.AssignModelResponse = await self._call(self._stub.AssignModel, request, CALL_TIMEOUT_S)
        return answer

    async def first_step_s(self, move: RoleMove, *, within_s: float) -> float | None:
        """Return the time from the call to the end of the first step in the new role; None if none ended in time.

        The result is an upper bound, because the change happens during the call.
        """
        give_up_s = time.monotonic() + within_s
        while True:
            described = await self.describe()
            if described.worker.assignment.epoch != move.assignment.epoch:
                return None
            if described.HasField("first_step_ns"):
                return move.call_s + described.first_step_ns / 1e9
            if time.monotonic() >= give_up_s:
                return None
            await asyncio.sleep(POLL_S)

    async def tune_prefill(self, request: pb.TunePrefillRequest) -> pb.TunePrefillResponse:
        """Measure prefill and choose the chunk size. Raise QueueFull if the worker cannot measure now."""
        answer: pb.TunePrefillResponse = await self._call(self._stub.TunePrefill, request, TUNE_TIMEOUT_S)
        return answer

    async def tune_decode(self, request: pb.TuneDecodeRequest) -> pb.TuneDecodeResponse:
        """Return the largest decode batch within a TPOT target."""
        answer: pb.TuneDecodeResponse = await self._call(self._stub.TuneDecode, request, CALL_TIMEOUT_S)
        return answer

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, self._worker_id) from None


def _typed(error: grpc.aio.AioRpcError, worker_id: str) -> FulcrumError:
    details = error.details() or error.code().name
    code, _, message = details.partition(": ")
    for kind in _ERRORS:
        if code == kind.code:
            return kind(f"{worker_id}: {message}")
    return NoWorkers(f"{worker_id} does not answer ({details}): see `fulcrum workers` for those that do")
