"""The FastAPI app around the generating routes: models, tokens, health, metrics and error responses."""

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from msgspec import Struct, to_builtins
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from libs.contracts.errors import MAX_QUOTED_CHARS, FulcrumError, InvalidRequest
from libs.keys.book import KeyStore, Role
from libs.keys.gate import caller_of, is_public
from libs.keys.table import KeyTable
from libs.policy.gateway.view import serves
from libs.runtime.clock import Clock
from libs.runtime.http.semantics import HttpSemantics, check_json
from services.gateway.fleet import WorkerLinks
from services.gateway.messages.request import MessageCounter
from services.gateway.messages.schema import COUNT_PATH
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.exchange import ClientGone, Stalled, Stalls, Wire, error_reply, read_body
from services.gateway.request.formats import ChatChoice, CompletionChoice, Declared, Envelope, ErrorBody, ErrorReply
from services.gateway.request.intake import Intake
from services.gateway.request.models import LoadableModels
from services.gateway.request.parse import parse_detokenize, parse_tokenize, read_headers
from services.gateway.request.prompt import Catalog
from services.gateway.request.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


class Tokenized(Struct):
    """The tokens of a text or a chat. `token_strs` is null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """The text of tokens, without special ones."""

    prompt: str


_REF = "#/components/schemas/{name}"
_ROUTES = (
    Declared(
        "/v1/chat/completions", "Answer a chat, whole or as server-sent events.", ChatRequest, Envelope[ChatChoice]
    ),
    Declared("/v1/completions", "Continue text or tokens.", CompletionRequest, Envelope[CompletionChoice]),
)
_TOKEN_ROUTES = (
    Declared(
        "/tokenize",
        "Tokenize a prompt or a chat.",
        TokenizeRequest,
        Tokenized,
        streams=False,
        tag="tokens",
    ),
    Declared("/detokenize", "Show tokens as text.", DetokenizeRequest, Detokenized, streams=False, tag="tokens"),
)
_HEADERS = (
    ("x-request-id", "Echoed; generated if absent."),
    ("x-fulcrum-tenant", "Who asks."),
    ("x-fulcrum-class", "Service class, online by default."),
    ("x-fulcrum-ttft-deadline-ms", "TTFT target of this request."),
    ("x-fulcrum-tpot-target-ms", "TPOT target of this request."),
    ("x-fulcrum-details", "1: the (last) JSON says who served and how fast."),
    ("traceparent", "W3C trace context."),
)

_EVENTS: dict[str, Any] = {"text/event-stream": {}}


def declare(app: FastAPI, more: Sequence[Declared]) -> None:
    """Add `more` and the other routes that FastAPI does not declare itself to the app's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _add(document, more)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add(document: dict[str, Any], more: Sequence[Declared]) -> None:
    routes = (*_ROUTES, *more, *_TOKEN_ROUTES)
    types = [kind for route in routes for kind in (route.request, route.reply, route.error)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    by_type = dict(zip(map(str, types), schemas, strict=True))
    for route in routes:
        path, error = route.path, _json(by_type[str(route.error)])
        document["paths"][path] = {
            "post": {
                "tags": [route.tag],
                "summary": route.summary,
                "operationId": path.strip("/").replace("/", "_"),
                "parameters": [
                    {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
                    for name, text in _HEADERS[: 1 if route.tag == "tokens" else None]
                ],
                "requestBody": {"required": True, "content": _json(by_type[str(route.request)])},
                "responses": {
                    "200": {
                        "description": "The answer.",
                        "content": _json(by_type[str(route.reply)]) | (_EVENTS if route.streams else {}),
                    },
                    "4XX": {"description": "The request's fault.", "content": error},
                    "5XX": {"description": "The suite's fault.", "content": error},
                },
            }
        }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


METHODS: Final = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
EXPOSED: Final = ("x-request-id", "retry-after", "x-fulcrum-expected-wait-ms")
"""The response headers that CORS exposes to browser scripts besides the safelisted ones."""
MAX_AGE_S: Final = 600
"""The time for which a browser may cache the response to a preflight request."""


def cross_origin(app: ASGIApp, origins: str) -> ASGIApp:
    """Wrap the app in CORS middleware for these comma-separated origins; `*` allows all.

    Preflight requests carry no key, so this middleware answers them before the key check.
    """
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )


_CODES = {404: "not_found", 405: "method_not_allowed"}


def need(_method: str, path: str) -> Role | None:
    """Return the lowest role that may request a path, or None if everybody may."""
    if is_public(path):
        return None
    if path.startswith("/v1/tenants/"):
        return "admin"
    return "operator" if path == "/metrics" else "user"


def make_routes(
    *,
    hot: Mapping[str, ASGIApp],
    routers: Sequence[APIRouter],
    catalog: Catalog,
    fleet: WorkerLinks,
    draining: Callable[[], bool],
    metrics: GatewayMetrics,
    version: str,
    loadable: LoadableModels | None = None,
    declared: Sequence[Declared] = (),
) -> "GatewayRoutes":
    """Return the gateway's ASGI app.

    `hot` maps paths to ASGI callables that bypass FastAPI's middleware stack. `declared` lists further routes for the
    OpenAPI document.
    """
    app = FastAPIOffline(title="Fulcrum", version=version, description="LLM serving split into prefill and decode.")
    app.add_middleware(HttpSemantics)
    started = int(time.time())
    for path, endpoint in hot.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    declare(app, declared)
    for router in routers:
        app.include_router(router)

    @app.get("/v1/models", tags=["models"], summary="List the models that requests can name.")
    async def models(request: Request) -> dict[str, object]:
        """List the models that requests can name."""
        names = [name for name in catalog.names if caller_of(request.scope).may_use(name)]
        return {"object": "list", "data": [_model(catalog, name, started, loadable) for name in names]}

    @app.get(
        "/v1/models/{name:path}",
        tags=["models"],
        summary="Describe one model.",
        responses={404: {"description": "There is no such model."}},
    )
    async def model(name: str, request: Request) -> dict[str, object]:
        """Return one model."""
        catalog.need(name, caller_of(request.scope).models)
        return _model(catalog, name, started, loadable)

    @app.get("/healthz", tags=["operation"], summary="Return 200 while the process is alive.")
    @app.get("/health", tags=["operation"], summary="Return 200 while the process is alive, at vLLM's path.")
    async def healthz() -> dict[str, str]:
        """Answer while the process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"], summary="Return 200 while requests can be served, else 503.")
    async def readyz(request: Request) -> JSONResponse:
        """Return 200 while new requests are accepted and some model can serve them.

        Both phases of that model have a worker, or the catalogue loads it on request.
        """
        views = fleet.views()
        ready = {name: serves(views, catalog.get(name).routed) and not draining() for name in catalog.names}
        loads = loadable is not None and loadable.has_models and not draining()
        is_ready = any(ready.values()) or loads
        shown = {name: state for name, state in ready.items() if caller_of(request.scope).may_use(name)}
        return JSONResponse({"ready": is_ready, "models": shown}, 200 if is_ready else 503)

    @app.get("/metrics", tags=["operation"], summary="Prometheus metrics.", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Return metrics in Prometheus's text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    handle_errors(app)
    return GatewayRoutes(hot, app)


def handle_errors(app: FastAPI) -> None:
    """Send every error of the app in OpenAI's format."""
    app.add_exception_handler(FulcrumError, _fulcrum_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


class GatewayRoutes:
    """An ASGI app that sends POSTs to hot routes directly to their endpoints and all other requests to FastAPI.

    FastAPI also registers the hot routes, so that it lists them in /docs and refuses other methods.
    """

    def __init__(self, hot: Mapping[str, ASGIApp], app: FastAPI) -> None:
        self._hot = {path: ServerErrorMiddleware(endpoint, handler=_unexpected) for path, endpoint in hot.items()}
        self._app: ASGIApp = app
        # A complete list: each route needs an owner or is open to everybody (tests/unit/gateway/test_isolation.py).
        self.routes: Sequence[BaseRoute] = app.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hot = self._hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (hot or self._app)(scope, receive, send)


def _model(catalog: Catalog, name: str, created: int, loadable: LoadableModels | None) -> dict[str, object]:
    info, calls = catalog.get(name).info, catalog.get(name).format.calls
    stands = loadable.state(name) if loadable else None
    cold = {"state": stands[0], "expected_wait_ms": round(stands[1] * 1000)} if stands else {}
    return {
        "id": info.name,
        "object": "model",
        "created": created,
        "owned_by": "fulcrum",
        "max_model_len": info.max_context_tokens,
        **({"tool_format": calls} if calls else {}),
        **({"parent": catalog.get(name).base} if catalog.get(name).base else {}),
        **cold,
    }


async def _fulcrum_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, FulcrumError)
    return JSONResponse(to_builtins(error_reply(error)), error.http_status, error.http_headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method[:MAX_QUOTED_CHARS]} {request.url.path[:MAX_QUOTED_CHARS]}: {error.detail}"
    code = _CODES.get(error.status_code, "invalid_request")
    reply = ErrorReply(ErrorBody(message, "invalid_request_error", None, code))
    return JSONResponse(to_builtins(reply), error.status_code, error.headers)


async def _unexpected(_request: Request, _error: Exception) -> Response:
    return JSONResponse(to_builtins(error_reply(FulcrumError("internal error"))), 500)


_REFUSED: Final[dict[int | str, dict[str, Any]]] = {
    400: {"description": "No tenant can have this name."},
    503: {"description": "Keys cannot be written now: try again later."},
}


def make_tenant_router(store: KeyStore, table: KeyTable, clock: Clock) -> APIRouter:
    """Return the router for deleting tenants. The key check admits only admins to it."""
    router = APIRouter()

    @router.delete(
        "/v1/tenants/{tenant}",
        tags=["tenants"],
        summary="Delete a tenant with its keys, files, batches and responses.",
        responses=_REFUSED,
    )
    async def delete_tenant(tenant: str) -> dict[str, Any]:
        """Revoke a tenant's keys and remove its limits. Its data is inaccessible at once, and deleted within a
        minute.
        """
        now_ns = clock.now_ns()
        book = await store.change(lambda before: before.without_tenant(tenant, now_ns))
        table.replace(book, now_ns / 1e9)
        return {"id": tenant, "object": "tenant", "deleted": True}

    return router


class TokenRoutes:
    """The handlers of /tokenize and /detokenize. An empty `allowed` permits every model."""

    def __init__(self, intake: Intake, catalog: Catalog) -> None:
        self._intake = intake
        self._catalog = catalog

    async def tokenize(self, body: bytes, allowed: AbstractSet[str], tenant: str) -> Tokenized:
        parsed, shows = parse_tokenize(body)
        model = self._catalog.need(parsed.model, allowed)
        (tokens,) = await self._intake.tokens(parsed, model, tenant)
        strings = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens] if shows else None
        return Tokenized(len(tokens), model.info.max_context_tokens, tokens, strings)

    async def detokenize(self, body: bytes, allowed: AbstractSet[str], _tenant: str) -> Detokenized:
        parsed = parse_detokenize(body)
        model = self._catalog.need(parsed.model, allowed)
        if any(token >= model.info.vocab_size for token in parsed.tokens):
            text = f"tokens: one is beyond the vocabulary's {model.info.vocab_size}"
            raise InvalidRequest(text, param="tokens")
        return Detokenized(model.tokenizer.decode(parsed.tokens))


class TokenEndpoint:
    """The ASGI endpoint of a route that counts or shows tokens.

    It applies the same body limits as the generating routes.
    """

    def __init__(
        self, answer: Callable[[bytes, AbstractSet[str], str], Awaitable[Any]], stalls: Stalls, max_body_bytes: int
    ) -> None:
        self._answer = answer
        self._stalls = stalls
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors are sent in OpenAI's format."""
        request_id = uuid.uuid4().hex
        with suppress(ClientGone, Stalled):
            try:
                raw = dict(scope["headers"])
                caller = caller_of(scope)
                headers = read_headers(raw, caller)
                request_id = headers.request_id or request_id
                check_json(raw)
                self._stalls.check_room(headers.tenant)
                with self._stalls.watched(headers.tenant) as read_deadline:
                    body = await read_body(receive, raw, self._max_body_bytes, read_deadline, self._stalls)
                    found = await self._answer(body, caller.models, headers.tenant)
                    await Wire(send, read_deadline).json(200, found, {"x-request-id": request_id})
            except FulcrumError as error:
                with self._stalls.watched() as read_deadline:
                    own = {"x-request-id": request_id, **error.http_headers}
                    await Wire(send, read_deadline).json(error.http_status, error_reply(error), own)


def token_routes(intake: Intake, catalog: Catalog, stalls: Stalls, max_body_bytes: int) -> dict[str, ASGIApp]:
    tokens, messages = TokenRoutes(intake, catalog), MessageCounter(intake, catalog)
    return {
        COUNT_PATH: TokenEndpoint(messages.count, stalls, max_body_bytes),
        "/tokenize": TokenEndpoint(tokens.tokenize, stalls, max_body_bytes),
        "/detokenize": TokenEndpoint(tokens.detokenize, stalls, max_body_bytes),
    }
