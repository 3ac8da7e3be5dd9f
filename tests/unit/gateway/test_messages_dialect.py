"""Tests of keys and errors of Anthropic's routes, whichever part of the gateway answers."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from libs.contracts.errors import ContextTooLong
from libs.runtime.http import ConnectionGuard
from services.gateway.messages.errors import MessagesDialect, message_error, refused_body
from services.gateway.messages.request import parse_message
from services.gateway.messages.schema import COUNT_PATH, PATH
from services.gateway.refusals import RefusalCounts, RefusalMiddleware
from services.gateway.request.exchange import error_reply
from services.gateway.request.formats import ErrorBody
from services.gateway.request.prompt import check_fit
from tests.unit.gateway.test_isolation import World, world  # noqa: F401 - a fixture
from tests.unit.gateway.test_tokenise import MODEL
from tests.unit.runtime.http.http_rig import served

QUESTION = {"model": "open", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
CASES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def client(app: ASGIApp, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(MessagesDialect(app))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


async def shows_key(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers with the authorization that it sees."""
    await PlainTextResponse(dict(scope["headers"]).get(b"authorization", b""))(scope, receive, send)


@pytest.mark.parametrize(("status", "kind"), CASES.items())
def test_an_errors_type_follows_from_its_status(status: int, kind: str) -> None:
    found = message_error(status, ErrorBody("text", "x", "field", "code"), "r")
    assert msgspec.to_builtins(found) == {
        "type": "error",
        "error": {"type": kind, "message": "text", "code": "code", "param": "field"},
        "request_id": "r",
    }


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens", "words"),
    [
        (9000, 8, "input length and `max_tokens` exceed context limit: 8 + 9000 > 8192"),
        (1, 9000, "prompt is too long: the prompt's 9000 tokens leave no room in a context of 8192"),
    ],
)
def test_an_error_beyond_the_context_has_the_wording_that_agents_recognise(
    max_tokens: int, prompt_tokens: int, words: str
) -> None:
    parsed = parse_message(json.dumps({**QUESTION, "max_tokens": max_tokens}).encode())
    with pytest.raises(ContextTooLong) as caught:
        check_fit(parsed, [[1] * prompt_tokens], MODEL, 8192)
    found = message_error(400, error_reply(caught.value).error, None)
    assert (found.error.message, found.error.code) == (words, "context_length_exceeded")


@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
@pytest.mark.parametrize(
    ("headers", "seen"),
    [
        ({"x-api-key": "k"}, "Bearer k"),
        ({"authorization": "Bearer k"}, "Bearer k"),
        ({"x-api-key": "k", "authorization": "bearer k"}, "bearer k"),
        ({"x-api-key": "", "authorization": "Bearer k"}, "Bearer k"),
        ({}, ""),
    ],
)
async def test_a_key_is_accepted_in_either_header(path: str, headers: dict[str, str], seen: str) -> None:
    async with client(shows_key) as http:
        assert (await http.post(path, headers=headers)).text == seen


@pytest.mark.parametrize("authorization", ["Bearer other", "Basic k", "k"])
async def test_two_different_keys_are_refused_and_counted(authorization: str) -> None:
    counts = RefusalCounts()
    transport = httpx.ASGITransport(RefusalMiddleware(MessagesDialect(shows_key), counts))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.post(PATH, headers={"x-api-key": "k", "authorization": authorization})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "k" not in answer.json()["error"]["message"].split()
    assert [(row.status, row.code) for row in counts.rows()] == [(400, "invalid_request")]


async def test_other_routes_have_neither_the_header_nor_the_error_format() -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        assert b"authorization" not in dict(scope["headers"])
        error = {"message": "m", "type": "t", "param": None, "code": "c"}
        await JSONResponse({"error": error}, 404)(scope, receive, send)

    async with client(refuses, **{"x-api-key": "k"}) as http:
        for path in ("/v1/chat/completions", "/v1/messagesx", "/v1/messages/batches"):
            assert (await http.post(path)).json()["error"]["type"] == "t"


async def test_an_errors_headers_stay_and_its_length_matches_the_new_body() -> None:
    own = {"retry-after": "7", "x-request-id": "r7", "x-should-retry": "false"}

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        error = {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
        await JSONResponse({"error": error}, 429, own)(scope, receive, send)

    async with client(busy) as http:
        answer = await http.post(PATH, json=QUESTION)
    assert answer.status_code == 429
    assert {name: answer.headers[name] for name in own} == own
    assert answer.headers["request-id"] == answer.json()["request_id"] == "r7"
    assert answer.headers.get_list("content-length") == [str(len(answer.content))]


async def test_an_error_from_elsewhere_is_passed_on_unchanged() -> None:
    async def foreign(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("Disallowed CORS origin", 400)(scope, receive, send)

    async with client(foreign) as http:
        answer = await http.post(PATH)
    assert (answer.status_code, answer.text) == (400, "Disallowed CORS origin")


@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
async def test_key_gate_parser_and_catalogue_refuse_in_anthropics_format(world: World, path: str) -> None:  # noqa: F811
    key = {"x-api-key": world.b.headers["authorization"].removeprefix("Bearer ")}
    question = QUESTION if path == PATH else {name: QUESTION[name] for name in ("model", "messages")}

    async def post(**requested: Any) -> tuple[int, str, str]:
        answer = await http.post(path, **{"json": question, "headers": key, **requested})
        body = answer.json()
        assert body["type"] == "error"
        return answer.status_code, body["error"]["type"], body["error"]["code"]

    invalid = "invalid_request_error"
    async with client(world.gate) as http:
        assert await post(headers={}) == (401, "authentication_error", "invalid_api_key")
        assert await post(headers={"x-api-key": "wrong"}) == (401, "authentication_error", "invalid_api_key")
        other = {**key, "x-fulcrum-tenant": "a"}
        assert await post(headers=other) == (403, "permission_error", "permission_denied")
        assert await post(json={**question, "model": "absent"}) == (404, "not_found_error", "model_not_found")
        assert await post(json={**question, "surprise": 1}) == (400, invalid, "unsupported_field")
        long = {**question, "system": "a" * 10**6}
        assert await post(json=long) == (413, "request_too_large", "body_too_large")
        plain = {**key, "content-type": "text/plain"}
        assert await post(headers=plain, json=None, content=b"{}") == (415, invalid, "unsupported_media_type")
        refused = await http.get(path, headers=key)
        assert (refused.status_code, refused.json()["type"]) == (405, "error")


@pytest.mark.system
@pytest.mark.parametrize("path", [f"{PATH}?beta=true", COUNT_PATH, f"{PATH}/batches", "/v1/chat/completions"])
async def test_a_refused_head_is_answered_in_the_format_of_its_route(path: str) -> None:
    guard = ConnectionGuard()
    guard.error_body = refused_body
    async with served(shows_key, guard=guard) as sock:
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: a\r\nx-api-key: b\r\n\r\n".encode())
        found = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
    assert (found["error"]["code"], found["error"]["param"]) == ("repeated_header", "x-api-key")
    assert found.get("type") == ("error" if path.partition("?")[0] in (PATH, COUNT_PATH) else None)
