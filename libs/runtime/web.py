"""Common routes of the control plane's HTTP services (health, readiness, Prometheus, errors), and their client port."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol

import httpx
from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException

from libs.contracts.errors import MAX_QUOTED_CHARS, FulcrumError, InvalidRequest, quoted
from libs.runtime.http.semantics import HttpSemantics, check_json

_REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request's fault: the error names the parameter and says what is allowed."}
}
_WITH_BODY = ("POST", "PUT", "PATCH")
# Other routes serve browsers, probes and scrapers, whose makers add further parameters.
STRICT_PREFIX: Final = "/v1/"
_CODES = {404: "not_found", 405: "method_not_allowed"}

NotReady = Callable[[], str | None]
"""Returns why a service's answers cannot be trusted now, in words, or None if they can."""


def make_web_app(title: str, description: str, *, not_ready: NotReady, metrics: CollectorRegistry) -> FastAPI:
    """Return an app with /healthz (/health to clients of vLLM), /readyz and /metrics.

    FulcrumErrors and bad parameters become {"error": {...}}. Routes below `STRICT_PREFIX` refuse query parameters
    that they do not declare.
    """
    refuse_unknown = [Depends(check_query)]
    app = FastAPIOffline(title=title, description=description, responses=_REFUSED, dependencies=refuse_unknown)
    app.add_middleware(HttpSemantics)

    @app.get("/healthz", tags=["operation"])
    @app.get("/health", tags=["operation"])
    async def healthz() -> dict[str, str]:
        """Answer `ok` for as long as the process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"], responses={503: {"description": "not ready, with the reason"}})
    async def readyz() -> JSONResponse:
        """Answer whether the served data is up to date."""
        reason = not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Return the metrics in Prometheus's text format."""
        return Response(await _exposed(metrics), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(FulcrumError)
    async def fulcrum_error(_request: Request, error: FulcrumError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = str(first["loc"][-1])[:MAX_QUOTED_CHARS]
        said = first["msg"].removeprefix("Value error, ")  # pydantic's prefix of our own sentences
        return error_response(InvalidRequest(f"{name}: {said}", param=name))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES.get(error.status_code, InvalidRequest.code)
        message = f"{request.method[:MAX_QUOTED_CHARS]} {request.url.path[:MAX_QUOTED_CHARS]}: {error.detail}"
        body = {"message": message, "type": InvalidRequest.error_type, "code": code, "param": None}
        return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)

    return app


async def check_query(request: Request) -> None:
    """Raise InvalidRequest for a query parameter that the matched route does not declare."""
    route = request.scope.get("route")
    if not (request.query_params and isinstance(route, APIRoute) and request.url.path.startswith(STRICT_PREFIX)):
        return
    allowed = query_names(route.dependant)
    for name in request.query_params:
        if name not in allowed:
            said = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            where = f"{request.method} {request.url.path[:MAX_QUOTED_CHARS]}"
            raise InvalidRequest(
                f"{where} has no query parameter {quoted(name)}: {said}", param=name[:MAX_QUOTED_CHARS]
            )


def query_names(dependant: Dependant) -> list[str]:
    """Return the query parameters of a route and of its dependencies, in the order of their declaration."""
    own = [each.alias for each in dependant.query_params]
    return list(dict.fromkeys([*own, *(name for each in dependant.dependencies for name in query_names(each))]))


class JsonRoute(APIRoute):
    """A route whose body must be declared as JSON before FastAPI reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if request.method in _WITH_BODY:
                check_json(dict(request.headers.raw))
            return await handle(request)

        return checked


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _exposed(metrics: Collector) -> bytes:
    """Return the text of all metric families.

    Their sources belong to the event loop, which gets a turn after each. The text is made in a thread: with
    thousands of samples it is most of the work.
    """
    families = []
    for family in metrics.collect():
        families.append(family)
        await asyncio.sleep(0)
    return await asyncio.to_thread(generate_latest, _Collected(families))


def error_response(error: FulcrumError) -> JSONResponse:
    """Return the error with its HTTP status and headers, in the shape of OpenAI's API."""
    return JSONResponse(error.http_body, status_code=error.http_status, headers=error.http_headers)


class MakeClient(Protocol):
    """The constructor `httpx.AsyncClient`, or one for another network."""

    def __call__(
        self, *, timeout: float, headers: dict[str, str] | None = None, trust_env: bool = True
    ) -> httpx.AsyncClient:
        """Return a new client, to be used as a context."""
        ...
