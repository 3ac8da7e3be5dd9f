from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, Field

from libs.contracts.errors import Conflict, InvalidRequest, NoWorkers, StartupError, UnknownWorker, quoted
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Assignment, Worker
from libs.contracts.roles import PLANNERS, role_from_name, role_name
from libs.policy.newest import put_newest
from libs.policy.roles import MAX_BUDGET_TOKENS, end_refusal, ended_by
from libs.runtime.web import JsonRoute
from services.planner.executor import OrderExecutor
from services.planner.http.admin import Admin

# The budget of role mixed if the request specifies none.
BUDGET_TOKENS = 256
# The maximum time to wait until every gateway knows the new role.
WAIT_MS = 1_000
MAX_REASON_CHARS = 200
MAX_ACTOR_CHARS = 80
MAX_MADE: Final = 4096
"""The maximum number of workers whose last change by this route is remembered."""


class RoleBody(BaseModel):
    role: Literal["prefill", "decode", "mixed", "standby"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_BUDGET_TOKENS)
    """Prompt tokens in each step; only role mixed has a budget."""
    epoch: int | None = Field(None, ge=0)
    """Epoch of the assignment that the caller read; a newer one is a conflict. Null accepts any."""
    actor: str = Field("", max_length=MAX_ACTOR_CHARS)
    """The name of a caller that shows the suite's token. With an API key, the key's holder is recorded."""
    reason: str = Field("", max_length=MAX_REASON_CHARS)
    force: bool = False
    """Move the worker even if no other worker of the model then computes prompts or decodes."""


@dataclass(frozen=True, slots=True)
class RoleAnswer:
    """The worker's assignment after the request.

    `effect_ms` is the time until the worker refused work of the old role and every gateway knew the new one. It is null
    if the worker already had the role or a gateway lags behind.
    """

    worker: str
    role: str
    budget_tokens: int
    epoch: int
    changed: bool
    effect_ms: float | None
    gateways_behind: int


class _MadeAssignment(NamedTuple):
    incarnation: int
    assignment: Assignment


class RolesApi:
    """The route PUT /v1/workers/ID/role, an admin request."""

    def __init__(self, admin: Admin, executor: OrderExecutor) -> None:
        self._admin = admin
        self._executor = executor
        self._made: OrderedDict[str, _MadeAssignment] = OrderedDict()
        """The last change of each worker by this route, which the view lacks until the worker reports it."""

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)

        @router.put(
            "/v1/workers/{worker_id}/role",
            responses={
                401: {"description": "the token is missing or wrong"},
                404: {"description": "no worker with this id is registered"},
                409: {
                    "description": "its assignment has changed, it is the last of its kind, or another planner leads"
                },
                503: {"description": "the worker does not answer, or the token must not be sent to it in plaintext"},
            },
        )
        async def set_role(
            worker_id: str, body: RoleBody, request: Request, authorization: Annotated[str, Header()] = ""
        ) -> RoleAnswer:
            """Set a worker's role. Requires the suite's token as `authorization: Bearer TOKEN`. The planner leaves the
            worker alone for a minute.
            """
            actor = self._admin.allow(request, authorization, "changing a role", said=body.actor)
            return await self._set_role(self._worker(worker_id), body, actor)

        return router

    def _worker(self, worker_id: str) -> Worker:
        roster = self._admin.state.view.roster
        index = roster.index_of.get(worker_id)
        if index is None:
            raise UnknownWorker(f"no worker {quoted(worker_id)} is registered", param="worker_id")
        return roster.workers[index]

    async def _set_role(self, worker: Worker, body: RoleBody, actor: str) -> RoleAnswer:
        if body.actor.startswith(PLANNERS):
            raise InvalidRequest(f"an actor whose name begins with {PLANNERS!r} counts as a planner", param="actor")
        if body.budget_tokens is not None and body.role != "mixed":
            raise InvalidRequest("only role mixed has a budget", param="budget_tokens")
        budget = (body.budget_tokens or BUDGET_TOKENS) if body.role == "mixed" else 0
        role, budget_tokens = role_from_name(body.role, budget)
        epoch, known = self._latest(worker)
        if known is not None and (known.role, known.budget_tokens) == (role, budget_tokens) and body.epoch is None:
            return _answer(worker.id, known, changed=False)
        expected = epoch if body.epoch is None else body.epoch
        if not body.force:
            self._check_others(worker, Assignment(role=role, budget_tokens=budget_tokens))
        wanted = Assignment(role=role, budget_tokens=budget_tokens, epoch=expected + 1)
        try:
            move = await self._executor.ask(
                worker, wanted, actor=actor, reason=body.reason, wait_ms=WAIT_MS, force=body.force
            )
        except StartupError as error:  # the settings of this planner, not of the caller
            raise NoWorkers(error.message) from None
        put_newest(self._made, worker.id, _MadeAssignment(worker.incarnation, move.assignment), MAX_MADE)
        found = _answer(worker.id, move.assignment, changed=True)
        effect_ms = None if move.effect_s is None else round(move.effect_s * 1e3, 2)
        return RoleAnswer(
            found.worker, found.role, found.budget_tokens, found.epoch, True, effect_ms, move.gateways_behind
        )

    def _latest(self, worker: Worker) -> tuple[int, Assignment | None]:
        """Return the latest known epoch of a worker, and its assignment; None if only the epoch is known."""
        view = self._admin.state.view
        epoch = view.epoch(view.roster.index_of[worker.id])
        made = self._made.get(worker.id)
        if made is not None and made.incarnation == worker.incarnation and made.assignment.epoch > epoch:
            return made.assignment.epoch, made.assignment
        return epoch, worker.assignment if worker.assignment.epoch == epoch else None

    def _check_others(self, worker: Worker, wanted: Assignment) -> None:
        """Raise Conflict if the change leaves a phase of the model without workers.

        The ranks of a group change together.
        """
        serving = [
            each
            for each in self._admin.state.view.roster.workers
            if each.assignment.model == worker.assignment.model and each.state == WORKER_STATE_READY
        ]
        moved = {each.id for each in serving if each.id == worker.id or (worker.group and each.group == worker.group)}
        if len(moved) == len(serving):
            return
        before = [self._latest(each)[1] or each.assignment for each in serving]
        after = [wanted if each.id in moved else assignment for each, assignment in zip(serving, before, strict=True)]
        if ended := ended_by(before, after):
            raise Conflict(end_refusal(worker.assignment.model, sorted(moved), ended, force="send force: true"))


def _answer(worker_id: str, assignment: Assignment, *, changed: bool) -> RoleAnswer:
    return RoleAnswer(worker_id, role_name(assignment), assignment.budget_tokens, assignment.epoch, changed, None, 0)
