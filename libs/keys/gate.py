"""ASGI middleware in front of a service's REST API that identifies the caller before any route runs."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts.errors import FulcrumError, InvalidApiKey
from libs.keys.book import Role
from libs.keys.hosts import HostCheck
from libs.keys.sessions import Sessions
from libs.keys.table import ANYBODY, NOBODY, Caller, KeyTable
from libs.runtime.clock import Clock
from libs.runtime.http.semantics import relative

# Key of the caller in a request's scope.
CALLER: Final = "fulcrum.caller"
PROBES: Final = frozenset({"/healthz", "/health", "/readyz"})
"""The paths answered to anybody; a probe has no secret and learns only whether the process serves."""
_DOCS: Final = ("/docs", "/redoc", "/openapi.json", "/static-offline-docs")

Need = Callable[[str, str], Role | None]
"""A function from method and path to the least role that may request it; None for anybody."""


def is_public(path: str) -> bool:
    """Return whether a path is a probe or the description of the API, which is the same in every cluster."""
    return path in PROBES or path.startswith(_DOCS)


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request; `ANYBODY` if no gate stands before the app."""
    found: Caller = scope.get(CALLER, ANYBODY)
    return found


class _NoLongerAdmitted(Exception):
    """The internal signal that ends a running answer whose caller is no longer admitted."""


class KeyGate:
    """The middleware that admits or refuses each request by its key, session and host."""

    def __init__(
        self,
        app: ASGIApp,
        table: KeyTable,
        clock: Clock,
        *,
        need: Need,
        hosts: HostCheck | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """Guard an app with the keys of `table`.

        `hosts` are the names that it answers to while there are no keys; None for any. `sessions` are those of
        browser users, who are redirected to /login without one.
        """
        self._app = app
        self._table = table
        self._clock = clock
        self._need = need
        self._hosts = hosts
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or refuse it."""
        if scope["type"] == "http":
            found: dict[bytes, bytes] = dict(scope["headers"])
            try:
                scope[CALLER] = self._admit(scope, found)
            except FulcrumError as error:
                await self._refuse(error, scope, found, send)
                return
            if self._sessions is not None:
                await self._while_admitted(scope, receive, send, found)
                return
        await self._app(scope, receive, send)

    async def _while_admitted(self, scope: Scope, receive: Receive, send: Send, found: dict[bytes, bytes]) -> None:
        """Run the app until the answer ends or its caller would no longer be admitted."""
        # The event stream of a page has no end of its own.

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("more_body", False):
                try:
                    self._admit(scope, found)
                except FulcrumError as error:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    raise _NoLongerAdmitted from error
            await send(message)

        with suppress(_NoLongerAdmitted):
            await self._app(scope, receive, guarded)

    def _admit(self, scope: Scope, found: dict[bytes, bytes]) -> Caller:
        least = self._need(scope["method"], scope["path"])
        if self._hosts is not None and not self._table.closed:
            self._hosts.check(found.get(b"host"), found.get(b"origin"))
        if least is None:
            return ANYBODY if self._table.is_open else NOBODY
        caller = self._caller(found)
        caller.check_role(least)
        caller.check_named(found)  # here, so that no route forgets it
        return caller

    def _caller(self, found: dict[bytes, bytes]) -> Caller:
        now_s = self._clock.now_ns() / 1e9
        authorization = found.get(b"authorization")
        if authorization is None and self._sessions is not None and not self._table.open():
            digest = self._sessions.digest(found.get(b"cookie", b""), now_s)
            if digest is not None:
                return self._table.by_digest(digest, now_s)
        return self._table.caller(authorization, now_s)

    async def _refuse(self, error: FulcrumError, scope: Scope, found: dict[bytes, bytes], send: Send) -> None:
        wants_page = scope["method"] in ("GET", "HEAD") and b"text/html" in found.get(b"accept", b"")
        if self._sessions is not None and wants_page and isinstance(error, InvalidApiKey):
            status, body, headers = 303, b"", {"location": relative(scope, "/login")}
        else:
            status, body = error.http_status, msgspec.json.encode(error.http_body)
            headers = error.http_headers | {"content-type": "application/json"}
        headers |= {"content-length": str(len(body)), "cache-control": "no-store"}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
