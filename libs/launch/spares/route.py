"""The launcher's own route, by which the planner requests spare workers."""

import hmac
from typing import Annotated, Final

import msgspec
from fastapi import FastAPI, Header, Request, Response

from libs.actuators.process import SpareState, SpareWish
from libs.contracts.errors import Unauthenticated
from libs.launch.spares.spares import Spares
from libs.runtime.http.semantics import HttpSemantics

MAX_BODY_BYTES: Final = 64 * 1024


def make_spares_app(spares: Spares, token: str) -> FastAPI:
    """Return an app with GET and PUT /v1/spares, for holders of the suite's token."""
    app = FastAPI(title="Fulcrum launcher", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpSemantics)

    @app.exception_handler(Unauthenticated)
    async def refused(_request: Request, error: Unauthenticated) -> Response:
        return Response(str(error), status_code=401)

    @app.get("/v1/spares")
    async def look(authorization: Annotated[str, Header()] = "") -> Response:
        _check(token, authorization)
        return _answer(spares.state)

    @app.put("/v1/spares")
    async def have(request: Request, authorization: Annotated[str, Header()] = "") -> Response:
        _check(token, authorization)
        if int(request.headers.get("content-length") or MAX_BODY_BYTES + 1) > MAX_BODY_BYTES:
            return Response("a wish is short", status_code=413)
        try:
            wish = msgspec.json.decode(await request.body(), type=SpareWish)
        except msgspec.MsgspecError as error:
            return Response(str(error), status_code=400)
        spares.have(wish.count, wish.first_to_end)
        return _answer(spares.state)

    return app


def _check(token: str, authorization: str) -> None:
    if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise Unauthenticated("spare workers are the planner's")


def _answer(state: SpareState) -> Response:
    return Response(msgspec.json.encode(state), media_type="application/json")
