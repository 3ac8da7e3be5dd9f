"""Anthropic's key header and error format for the routes of its API."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts.errors import ContextTooLong, FulcrumError, InvalidRequest
from services.gateway.messages.schema import COUNT_PATH, PATH, MessageErrorBody, MessageErrorReply
from services.gateway.request.exchange import error_reply
from services.gateway.request.formats import ErrorBody, ErrorReply

KEY_HEADER: Final = "x-api-key"
MAX_BODY_BYTES: Final = 16_384
"""The size up to which an error body is converted."""
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# The message of `check_fit` in services/gateway/request/prompt.py.
_BEYOND: Final = re.compile(r"(\d+) prompt tokens and (\d+) more exceed the context of (\d+)")
_decoder: Final = msgspec.json.Decoder(ErrorReply)
Headers = list[tuple[bytes, bytes]]


def message_error(status: int, error: ErrorBody, request_id: str | None) -> MessageErrorReply:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    text = _in_known_words(error.message) if error.code == ContextTooLong.code else error.message
    return MessageErrorReply(MessageErrorBody(kind, text, error.code, error.param), request_id)


def _in_known_words(message: str) -> str:
    # Coding agents match the wording of Anthropic's API: Claude Code compacts its history if the prompt is too long.
    # It requests fewer tokens if input and `max_tokens` together exceed the limit.
    found = _BEYOND.fullmatch(message)
    if found is None:
        return f"prompt is too long: {message}"
    prompt, more, context = found.groups()
    return f"input length and `max_tokens` exceed context limit: {prompt} + {more} > {context}"


def refused_body(error: FulcrumError, path: str) -> object:
    """Return the body of an error that was raised before any route, in the format of the path's API."""
    if path not in (PATH, COUNT_PATH):
        return error.http_body
    return message_error(error.http_status, error_reply(error).error, None)


class MessagesDialect:
    """The middleware for Anthropic's routes. It turns the key in `x-api-key` into a bearer token and converts errors.

    It wraps the key check, so that all inner parts see only bearer tokens, and errors of the key check are converted
    too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (PATH, COUNT_PATH):
            await self._app(scope, receive, send)
            return
        sender = _ErrorSender(send)
        try:
            headers = with_bearer(scope["headers"])
        except FulcrumError as error:
            await sender.refuse(error)
            return
        await self._app({**scope, "headers": headers}, receive, sender)


def with_bearer(headers: Headers) -> Headers:
    """Return the headers with the key in `x-api-key` as a bearer token.

    Raise InvalidRequest if `authorization` contains a different key.
    """
    found = dict(headers)
    key, authorization = found.get(KEY_HEADER.encode()), found.get(b"authorization")
    if not key:
        return headers
    if authorization is None:
        return [*headers, (b"authorization", b"Bearer " + key)]
    if authorization[:7].lower() != b"bearer " or authorization[7:].strip() != key.strip():
        raise InvalidRequest(f"headers {KEY_HEADER} and authorization hold different keys: send one", param=KEY_HEADER)
    return headers


class _ErrorSender:
    """A sender that converts error bodies. It sends the start of an error only with its body, whose length changes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            named = _named(message)
            if named["status"] >= 400:
                self._start = named
                return
            await self._send(named)
            return
        start, self._start = self._start, None
        if start is not None:
            message = _converted(start, message)
            await self._send(start)
        await self._send(message)

    async def refuse(self, error: FulcrumError) -> None:
        body = msgspec.json.encode(error_reply(error))
        headers = {**error.http_headers, "content-type": "application/json", "content-length": str(len(body))}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.http_status, "headers": pairs})
        await self({"type": "http.response.body", "body": body})


def _named(start: Message) -> Message:
    """Return the response start with the request's id also in the header that Anthropic's clients read."""
    headers: Headers = list(start.get("headers", ()))
    own = dict(headers).get(b"x-request-id")
    return {**start, "headers": headers if own is None else [*headers, (b"request-id", own)]}


def _converted(start: Message, message: Message) -> Message:
    """Return the body in Anthropic's format and update the content-length in `start`.

    A body that is not an error of the gateway is returned unchanged.
    """
    body: bytes = message.get("body", b"")
    if message.get("more_body", False) or len(body) > MAX_BODY_BYTES:
        return message
    try:
        error = _decoder.decode(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return message
    headers: Headers = start["headers"]
    request_id = dict(headers).get(b"x-request-id")
    reply = message_error(start["status"], error, request_id.decode("latin-1") if request_id else None)
    shown = msgspec.json.encode(reply)
    others = [(name, value) for name, value in headers if name != b"content-length"]
    start["headers"] = [*others, (b"content-length", str(len(shown)).encode())]
    return {**message, "body": shown}
