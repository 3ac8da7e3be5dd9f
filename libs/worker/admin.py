"""WorkerAdminService over gRPC with its audit trail, and the worker's registration.

The server's interceptor has checked the token of each admin call.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from libs.bus.port import Bus
from libs.contracts.errors import Conflict, FulcrumError, InvalidRequest, QueueFull
from libs.contracts.foreign_text import masked
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_STANDBY, WORKER_STATE_READY, Assignment, Worker
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.protocol import unpaired
from libs.contracts.roles import is_by_hand, role_name
from libs.contracts.topics import AUDIT
from libs.keys.table import SUITE_TOKEN, actor_of
from libs.policy.roles import end_refusal, ended_by
from libs.policy.worker.assignment import AssignmentRefusal, first_assignment
from libs.runtime.clock import Clock
from libs.runtime.net.rpc import abort_with, peer_of
from libs.stores.registry import Registry, RegistryDown
from libs.worker.host import WorkerHost, drain
from libs.worker.settings import RENEWALS_PER_LEASE
from libs.worker.telemetry import StepTimes
from libs.worker.tuning import FEW, PrefillTuner, Tuned, decode_message, tuned_message
from libs.worker.wire import load_message

log = structlog.get_logger()

MAX_DETAIL: Final = 500
MAX_ACTOR: Final = 100
SERVICE: Final = "worker"
# The certificate role of the service that checks API keys and may name another actor.
SPEAKS_FOR_OTHERS: Final = "planner"

Record = Callable[[str, str, str, int], None]
"""A function that records a change by its actor, action, detail and HTTP status."""


def actor_from(context: "grpc.aio.ServicerContext[Any, Any]", named: str) -> str:
    """Return the actor of an admin call that showed the suite's token and names `named`.

    If certificates contain roles, only a planner may name another actor. An operator's command is then recorded as the
    token. Without roles, holders of the token are indistinguishable, and the named actor is recorded.
    """
    named = masked(named)[:MAX_ACTOR]
    peer = peer_of(context)
    if named and (peer is None or peer.role == SPEAKS_FOR_OTHERS):
        return named
    own = f"{SUITE_TOKEN.name} ("
    return actor_of(SUITE_TOKEN, named.removeprefix(own).removesuffix(")") if named.startswith(own) else named)


def audit_changes(bus: Bus, clock: Clock, worker_id: str) -> Record:
    """Return a recorder that publishes to the audit topic. Only callers with the suite's token reach it."""
    number = 0

    def record(actor: str, action: str, detail: str, status: int) -> None:
        nonlocal number
        number += 1
        now_ns = clock.now_ns()
        bus.publish(
            AUDIT,
            AuditEvent(
                event_id=f"{SERVICE}-{worker_id}-{now_ns}-{number}",
                at_unix_ns=now_ns,
                service=SERVICE,
                actor=actor,
                action=f"{action} {worker_id}",
                detail=masked(detail)[:MAX_DETAIL],
                status=status,
            ),
        )

    return record


MAX_WAIT_MS = 10_000
REGISTRY_S = 0.5
FORCE = "set force (`fulcrum role --force`)"
OK = 200

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(pb_grpc.WorkerAdminServiceServicer):
    def __init__(
        self,
        host: WorkerHost,
        tuner: PrefillTuner,
        step_times: StepTimes,
        *,
        record: Record,
        drain_s: float,
        registry: Registry,
    ) -> None:
        """Create the service. `registry` lists the other workers that serve the model."""
        self._registry = registry
        self._record = record
        self._host = host
        self._tuner = tuner
        self._step_times = step_times
        self._drain_s = drain_s

    async def Describe(self, _request: pb.DescribeRequest, _context: Context) -> pb.DescribeResponse:  # noqa: N802
        """Return the worker's description, its depths, and the resources that it still holds."""
        host = self._host
        return pb.DescribeResponse(
            worker=host.worker(),
            load=load_message(host.engine.load()),
            integrity=host.integrity(),
            gateways_behind=host.gateways.behind(host.assignment.current.epoch),
            first_step_ns=host.last_change.first_step_ns,
        )

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:  # noqa: N802
        """Change the role. Abort with FAILED_PRECONDITION (stale_role) unless `expected_epoch` is current.

        With `wait_ms`, return once every attached gateway routes by the new role, or after that time.
        """
        running = self._host.engine.load().running
        wanted = Assignment(role=request.role, budget_tokens=request.budget_tokens)
        described = f"{role_name(wanted)} at epoch {request.expected_epoch}: {request.reason}"
        request.actor = actor_from(context, request.actor)
        try:
            if not request.force:
                await self._check_others(wanted)
            assignment = self._host.set_role(request)
        except FulcrumError as error:
            self._record(request.actor, "SetRole", described, error.http_status)
            await abort_with(context, error)
            raise
        self._record(request.actor, "SetRole", described, OK)
        log.info(
            "role set", role=role_name(assignment), epoch=assignment.epoch, actor=request.actor, reason=request.reason
        )
        now_s = asyncio.get_running_loop().time
        set_s = now_s()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(request.wait_ms, MAX_WAIT_MS) / 1000):
                await self._host.gateways.wait_for_epoch(assignment.epoch)
        return pb.SetRoleResponse(
            assignment=assignment,
            gateways_behind=self._host.gateways.behind(assignment.epoch),
            waited_ns=int((now_s() - set_s) * 1e9),
            running=running,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802
        """Drain within the requested deadline, or else the worker's own.

        The worker stays draining until it is stopped.
        """
        actor = actor_from(context, request.actor)
        described = f"within {request.deadline_ms} ms" if request.deadline_ms else ""
        try:
            if not request.force:
                await self._check_others(Assignment(role=ROLE_STANDBY))
        except FulcrumError as error:
            self._record(actor, "Drain", described, error.http_status)
            await abort_with(context, error)
            raise
        self._record(actor, "Drain", described, OK)
        deadline_s = request.deadline_ms / 1000 if request.deadline_ms else self._drain_s
        drained = await drain(self._host, min(deadline_s, self._drain_s))
        return pb.DrainResponse(finished=drained.finished, aborted=drained.aborted)

    async def TunePrefill(  # noqa: N802
        self, request: pb.TunePrefillRequest, context: Context
    ) -> pb.TunePrefillResponse:
        """Measure prefill, set a named chunk size, or return the last measurement, as the request asks.

        Abort with RESOURCE_EXHAUSTED while another measurement runs, if KV blocks are lacking, or if decodes cannot
        wait.
        """
        try:
            tuned = await self._tuned(request, actor_from(context, request.actor))
        except FulcrumError as error:
            await abort_with(context, error)
            raise
        return tuned_message(tuned, request.tpot_target_us, self._host.engine.capabilities.max_sequences)

    async def _tuned(self, request: pb.TunePrefillRequest, actor: str) -> Tuned:
        if request.set_tokens:
            self._record(actor, "TunePrefill", f"{request.set_tokens} tokens", OK)
            return self._tuner.set(request.set_tokens)
        if request.kept:
            kept = await self._tuner.kept()
            if kept is None:
                raise InvalidRequest("no worker of this kind has measured prefill yet: fulcrum tune prefill does")
            return kept
        if not request.measure_only:
            self._record(actor, "TunePrefill", "as measured", OK)
        tuned = await self._tuner.tune(
            most_tokens=request.most_tokens, limit_s=request.limit_ms / 1000, apply=not request.measure_only
        )
        if tuned is None:
            raise QueueFull(FEW)
        return tuned

    async def _check_others(self, wanted: Assignment) -> None:
        """Raise Conflict if the change would leave a phase without workers although several serve the model.

        Allow the change if the registry does not answer, since the other workers are then unknown.
        """
        own = self._host.worker()
        try:
            async with asyncio.timeout(REGISTRY_S):
                listed = await self._registry.workers()
        except (RegistryDown, TimeoutError):
            log.warning("registry is away: a change is not checked against other workers", role=role_name(wanted))
            return
        others = [
            each.assignment
            for each in listed
            if each.id != own.id
            and each.assignment.model == own.assignment.model
            and each.state == WORKER_STATE_READY
            and not (own.group and each.group == own.group)
        ]
        ended = ended_by((*others, own.assignment), (*others, wanted)) if others else ()
        if ended:
            raise Conflict(end_refusal(own.assignment.model, (own.id,), ended, force=FORCE))

    async def TuneDecode(  # noqa: N802
        self, request: pb.TuneDecodeRequest, _context: Context
    ) -> pb.TuneDecodeResponse:
        """Return the largest decode batch within a TPOT target, according to the learned step times."""
        return decode_message(self._step_times.fitted, request, self._host.engine.capabilities.max_sequences)


WITHDRAW_TIMEOUT_S: Final = 2.0
# A role that a person set is stored for this long after the worker ends, so that a restart does not undo it.
KEPT_ROLE_MS: Final = 600_000


class Registration:
    """A worker's entry in the registry. If the registry is away it retries, and gateways stay attached."""

    def __init__(self, registry: Registry, host: WorkerHost, *, lease_ms: int) -> None:
        self._registry = registry
        self._host = host
        self._lease_ms = lease_ms
        self._changed = asyncio.Event()
        host.on_change(self._changed.set)

    async def run(self) -> None:
        away, announced_epoch = False, -1
        while True:
            self._changed.clear()
            try:
                worker = self._host.worker()
                await self._registry.announce(worker, lease_ms=self._lease_ms)
                away = False
                await self._keep_role(worker, changed=announced_epoch != worker.assignment.epoch)
                if announced_epoch != worker.assignment.epoch:
                    await self._look_for_partners(worker.id)
                    announced_epoch = worker.assignment.epoch
            except RegistryDown as error:
                if not away:
                    log.warning("registry is away", error=str(error))
                away = True
            try:
                async with asyncio.timeout(self._lease_ms / 1000 / RENEWALS_PER_LEASE):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _keep_role(self, worker: Worker, *, changed: bool) -> None:
        """Store a role that a person set, and remove it once a planner has set another."""
        if is_by_hand(worker.role_change):
            await self._registry.keep_role(worker, keep_ms=KEPT_ROLE_MS)
        elif changed and worker.role_change.actor:
            await self._registry.keep_role(worker, keep_ms=0)

    async def _look_for_partners(self, worker_id: str) -> None:
        """Log the reason why this worker will get no work, if there is one. Each role is checked once."""
        alone = unpaired(await self._registry.workers()).get(worker_id)
        if alone is not None:
            log.warning("worker has no partner", worker=worker_id, why=str(alone))

    async def withdraw(self) -> None:
        """Withdraw the entry. If the registry is away, the lease expires by itself."""
        worker = self._host.worker()
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._registry.withdraw(worker.id, worker.incarnation)
        except (RegistryDown, TimeoutError) as error:
            log.warning("could not withdraw the registration", error=repr(error))


async def kept_role(registry: Registry, worker_id: str, model: str) -> Worker | None:
    """Return the role that a person set before this worker restarted; None if there is none for its model."""
    try:
        kept = await registry.kept_role(worker_id)
    except RegistryDown as error:
        log.warning("registry is away: a role set by hand before the restart is unknown", error=str(error))
        return None
    if kept is None or kept.assignment.model != model:
        return None
    if isinstance(first_assignment(model, kept.assignment.role, kept.assignment.budget_tokens), AssignmentRefusal):
        log.warning("stored role of this worker is invalid", role=kept.assignment.role)
        return None
    role, actor = role_name(kept.assignment), kept.role_change.actor
    log.info("restored the role set by hand", worker=worker_id, role=role, actor=actor)
    return kept
