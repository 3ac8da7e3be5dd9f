"""Rules of HTTP and of proxies for every response, whichever framework made it, and of content types."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts.errors import UnsupportedMediaType, quoted

_SELF_DESCRIBING: Final = frozenset({"/docs", "/redoc", "/openapi.json"})
_HERE: Final = "."


class _Answered(Exception):
    """Raised to end an app whose response has no body."""


def relative(scope: Scope, location: str) -> str:
    """Return an address of this service as a reference relative to the request's own path.

    A client resolves it against the address that it requested, so scheme, host and prefix stay those of the proxy.
    No service here redirects elsewhere.
    """
    target = urlsplit(location)
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    up = "../" * (raw.partition(b"?")[0].count(b"/") - 1)
    query = f"?{target.query}" if target.query else ""
    return f"{up or './'}{target.path[1:]}{query}"


class HttpSemantics:
    """A wrapper that makes an app answer HEAD wherever it answers GET, and its addresses of itself relative.

    HEAD runs the route of GET up to the head of its response. No part of a body is made: an event stream frees its
    place.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        # FastAPI and fastapi-offline put root_path before each of their addresses.
        own = {"root_path": _HERE} if scope["path"] in _SELF_DESCRIBING else {}
        seen = {**scope, **own, "method": "GET"} if is_head else {**scope, **own}

        async def send_settled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _settled(scope, message["status"], message.get("headers", ()))
                if is_head:
                    await send(message)
                    await send({"type": "http.response.body", "body": b""})
                    raise _Answered
            await send(message)

        with suppress(_Answered):
            await self._app(seen, receive, send_settled)


def _settled(scope: Scope, status: int, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    if status == 405:
        return [(name, _with_head(value) if name == b"allow" else value) for name, value in headers]
    if 300 <= status < 400:
        return [
            (name, relative(scope, value.decode("latin-1")).encode("latin-1") if name == b"location" else value)
            for name, value in headers
        ]
    return list(headers)


def _with_head(allowed: bytes) -> bytes:
    methods = {each.strip() for each in allowed.split(b",")}
    return b", ".join(sorted(methods | {b"HEAD"} if b"GET" in methods else methods))


# A web page can make its reader's browser post text or a form to any address. Before it posts JSON the browser asks
# the address, and is refused. So a body that is not declared as JSON is not read as JSON.


JSON = b"application/json"


def check_json(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType unless the body is uncompressed JSON. `headers` are by lowercase name."""
    kind = headers.get(b"content-type", b"")
    if kind != JSON and not _is_json(kind):
        found = f"content-type {quoted(kind.decode('latin-1'))} is not served" if kind else "there is no content-type"
        raise UnsupportedMediaType(f"{found}: send the header content-type: application/json", param="content-type")
    if b"content-encoding" in headers:
        check_encoding(headers)


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType if the body is compressed."""
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if encoding.lower() not in ("", "identity"):
        text = f"content-encoding {quoted(encoding)} is not served: send the body without it, uncompressed"
        raise UnsupportedMediaType(text, param="content-encoding")


def _is_json(kind: bytes) -> bool:
    """Return whether a content type is JSON, regardless of its case and parameters."""
    media = kind.split(b";", 1)[0].strip().lower()
    return media == JSON or (media.startswith(b"application/") and media.endswith(b"+json"))
