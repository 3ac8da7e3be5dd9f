"""Adds the routes that generate to the OpenAPI document, since FastAPI does not look into ASGI callables."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from services.gateway.http.replies import ChatChoice, CompletionChoice, Envelope, ErrorReply
from services.gateway.http.tokens import Detokenized, Tokenized
from services.gateway.prompt.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{name}"
Declared = tuple[str, str, Any, Any]
"""The path, summary, body type and answer type of a route."""
_ROUTES: tuple[Declared, ...] = (
    ("/v1/chat/completions", "Answer a chat, whole or as server-sent events.", ChatRequest, Envelope[ChatChoice]),
    ("/v1/completions", "Continue text or tokens.", CompletionRequest, Envelope[CompletionChoice]),
)
_TOKEN_ROUTES: tuple[Declared, ...] = (
    ("/tokenize", "Show a prompt or a chat as its model's tokens.", TokenizeRequest, Tokenized),
    ("/detokenize", "Show tokens as text.", DetokenizeRequest, Detokenized),
)
_HEADERS = (
    ("x-request-id", "Echoed; made up where absent."),
    ("x-fulcrum-tenant", "Who asks."),
    ("x-fulcrum-class", "Service class, online by default."),
    ("x-fulcrum-ttft-deadline-ms", "Time to first token that this request should have."),
    ("x-fulcrum-tpot-target-ms", "Time per output token that it should have."),
    ("x-fulcrum-details", "1: the (last) JSON says who served and how fast."),
    ("traceparent", "W3C trace context."),
)

_EVENTS: dict[str, Any] = {"text/event-stream": {}}


def declare(app: FastAPI, more: Sequence[Declared]) -> None:
    """Add the routes that generate, and those in `more`, to the app's OpenAPI document."""
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
    types = [kind for _, _, *kinds in routes for kind in kinds]
    schemas, components = msgspec.json.schema_components([*types, ErrorReply], ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    by_type = dict(zip(map(str, [*types, ErrorReply]), schemas, strict=True))
    for path, summary, request, reply in routes:
        is_hot = path.startswith("/v1")
        document["paths"][path] = {
            "post": {
                "tags": ["completions" if is_hot else "tokens"],
                "summary": summary,
                "operationId": path.strip("/").replace("/", "_"),
                "parameters": [
                    {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
                    for name, text in _HEADERS[: None if is_hot else 1]
                ],
                "requestBody": {"required": True, "content": _json(by_type[str(request)])},
                "responses": {
                    "200": {
                        "description": "The answer.",
                        "content": _json(by_type[str(reply)]) | (_EVENTS if is_hot else {}),
                    },
                    "4XX": {"description": "The request's fault.", "content": _json(by_type[str(ErrorReply)])},
                    "5XX": {"description": "The suite's fault.", "content": _json(by_type[str(ErrorReply)])},
                },
            }
        }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
