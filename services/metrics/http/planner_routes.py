"""Routes forwarded to the planner: the models of a pool, and a worker's role. The page thus uses a single address."""

from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit

import httpx
from fastapi import APIRouter, Header
from fastapi.responses import Response
from pydantic import BaseModel, Field

from libs.contracts.errors import PlannerUnavailable, Unauthenticated
from libs.runtime.net.access import PLAINTEXT_VARIABLE, is_loopback
from libs.runtime.web import JsonRoute, MakeClient

ANSWER_S: Final = 8.0
"""Timeout of an answer. A change of role waits up to a second for gateways and up to five for a worker."""
AWAY_RETRY_S: Final = 2.0
"""The time to a retry while the planner is unreachable; another planner acquires the lead within it."""
UNNAMED_RETRY_S: Final = 60.0
"""The time to a retry without a planner's address, which only a restart changes."""
AWAY: dict[int | str, dict[str, Any]] = {503: {"description": "no planner is configured, or it does not answer"}}


Authorization = Annotated[str, Header()]


class WantedRole(BaseModel):
    """A role in the planner's format; the planner validates it."""

    role: str = Field(max_length=20)
    budget_tokens: int | None = None
    epoch: int | None = None
    actor: str = Field("", max_length=80)
    reason: str = Field("", max_length=200)
    force: bool = False


class PlannerRoutes:
    """Two routes that are forwarded to the planner at `url`; an empty one means no planner."""

    def __init__(self, url: str, make_client: MakeClient | None, *, token: str, plaintext: bool) -> None:
        """Create the routes.

        `token` is the suite's, with which this service reads from a planner that requires keys. `plaintext` allows
        a token to travel unencrypted to another host.
        """
        self._url = url.rstrip("/")
        self._make_client = make_client
        address = urlsplit(self._url)
        port = address.port or (443 if address.scheme == "https" else 80)
        local = is_loopback(f"{address.hostname or ''}:{port}")
        self._token = token
        self._token_may_travel = plaintext or local or address.scheme == "https"

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", route_class=JsonRoute)

        @router.get("/models", responses=AWAY)
        async def models() -> Response:
            """Return the catalogue of models, the pool that serves it and the expected demand, as the planner reports
            them.
            """
            own = {"authorization": f"Bearer {self._token}"} if self._token and self._token_may_travel else {}
            return await self._ask("GET", "/v1/models", headers=own)

        @router.put("/workers/{worker_id}/role", responses=AWAY | {401: {"description": "the token is missing"}})
        async def set_role(worker_id: str, wanted: WantedRole, authorization: Authorization = "") -> Response:
            """Request a role for a worker from the planner. Needs the suite's token, or an operator's key, as
            `authorization: Bearer TOKEN`.
            """
            if not authorization:
                raise Unauthenticated(
                    "changing a role needs the suite's token, or an operator's key, as authorization: Bearer TOKEN"
                )
            if not self._token_may_travel:
                raise Unauthenticated(
                    f"the token would travel to {self._url} in plaintext: set {PLAINTEXT_VARIABLE} on a network that"
                    " you trust, or use `fulcrum role`"
                )
            headers = {"authorization": authorization, "content-type": "application/json"}
            path = f"/v1/workers/{quote(worker_id, safe='')}/role"
            return await self._ask("PUT", path, wanted.model_dump_json().encode(), headers)

        return router

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Response:
        if not self._url or self._make_client is None:
            raise PlannerUnavailable(
                "no planner is configured: set FULCRUM_METRICS_PLANNER_URL", retry_after_s=UNNAMED_RETRY_S
            )
        try:
            async with self._make_client(timeout=ANSWER_S, trust_env=False) as http:
                answer = await http.request(method, self._url + path, content=body, headers=headers)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise PlannerUnavailable(
                f"the planner at {self._url} does not answer: {why}", retry_after_s=AWAY_RETRY_S
            ) from None
        return Response(answer.content, status_code=answer.status_code, media_type="application/json")
