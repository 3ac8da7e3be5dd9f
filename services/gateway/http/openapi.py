"""The hot routes in the OpenAPI document: FastAPI does not see into ASGI callables, msgspec knows their schemas."""

from typing import Any

import msgspec
from fastapi import FastAPI

from services.gateway.http.replies import ChatChoice, CompletionChoice, Envelope, ErrorReply
from services.gateway.prompt.schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{name}"
_ROUTES: tuple[tuple[str, str, Any, Any], ...] = (
    ("/v1/chat/completions", "Answer a chat, whole or as server-sent events.", ChatRequest, Envelope[ChatChoice]),
    ("/v1/completions", "Continue text or tokens.", CompletionRequest, Envelope[CompletionChoice]),
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


def declare(app: FastAPI) -> None:
    """Add the hot routes to the app's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _add(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add(document: dict[str, Any]) -> None:
    types = [kind for _, _, *kinds in _ROUTES for kind in kinds]
    schemas, components = msgspec.json.schema_components([*types, ErrorReply], ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    by_type = dict(zip(map(str, [*types, ErrorReply]), schemas, strict=True))
    for path, summary, request, reply in _ROUTES:
        document["paths"][path] = {
            "post": {
                "tags": ["completions"],
                "summary": summary,
                "operationId": path.strip("/").replace("/", "_"),
                "parameters": [
                    {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
                    for name, text in _HEADERS
                ],
                "requestBody": {"required": True, "content": _json(by_type[str(request)])},
                "responses": {
                    "200": {"description": "The answer.", "content": _json(by_type[str(reply)]) | _EVENTS},
                    "4XX": {"description": "The request's fault.", "content": _json(by_type[str(ErrorReply)])},
                    "5XX": {"description": "The suite's fault.", "content": _json(by_type[str(ErrorReply)])},
                },
            }
        }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
