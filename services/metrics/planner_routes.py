"""Routes that the planner answers: models of a pool, and another role for a worker. The page speaks to one address."""

from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit

import httpx
from fastapi import APIRouter, Header
from fastapi.responses import Response
from pydantic import BaseModel, Field

from libs.contracts.errors import PlannerUnavailable, Unauthenticated
from libs.runtime.net.access import PLAINTEXT_VARIABLE, is_loopback
from libs.runtime.web import JsonRoute
from services.metrics.outgoing import MakeClient

ANSWER_S: Final = 8.0
"""A change of role waits for gateways up to a second, and for a worker up to five."""
AWAY_RETRY_S: Final = 2.0
"""Another planner leads by then."""
UNNAMED_RETRY_S: Final = 60.0
"""A setting changes with a restart alone."""
AWAY: dict[int | str, dict[str, Any]] = {503: {"description": "no planner is named, or it does not answer"}}


Authorization = Annotated[str, Header()]


class WantedRole(BaseModel):
    """As the planner takes it, and judges it."""

    role: str = Field(max_length=20)
    budget_tokens: int | None = None
    epoch: int | None = None
    actor: str = Field("", max_length=80)
    reason: str = Field("", max_length=200)
    force: bool = False


class PlannerRoutes:
    """Hands two routes on to the planner at `url`; empty: there is none."""

    def __init__(self, url: str, make_client: MakeClient | None, *, token: str, plaintext: bool) -> None:
        """token: the suite's, by which this service reads where the planner asks for keys. plaintext: whether a token
        may travel readable to another host."""
        self._url = url.rstrip("/")
        self._make_client = make_client
        address = urlsplit(self._url)
        port = address.port or (443 if address.scheme == "https" else 80)
        local = is_loopback(f"{address.hostname or ''}:{port}")
        self._token = token
        self._token_may_travel = plaintext or local or address.scheme == "https"

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1", route_class=JsonRoute)

        @router.get("/models", responses=AWAY)
        async def models() -> Response:
            """The catalogue of models, the pool that serves it, and what is expected, as the planner answers it."""
            own = {"authorization": f"Bearer {self._token}"} if self._token and self._token_may_travel else {}
            return await self._ask("GET", "/v1/models", headers=own)

        @router.put("/workers/{worker_id}/role", responses=AWAY | {401: {"description": "the token is missing"}})
        async def set_role(worker_id: str, wanted: WantedRole, authorization: Authorization = "") -> Response:
            """Ask a worker to take a role, by way of the planner; needs the suite's token, or an operator's key,
            as `authorization: Bearer TOKEN`."""
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
                "this metrics service knows no planner: set FULCRUM_METRICS_PLANNER_URL", retry_after_s=UNNAMED_RETRY_S
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
