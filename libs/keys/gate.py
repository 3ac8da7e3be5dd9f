"""The identification of callers before any route of a service.

`KeyGate` is the ASGI middleware in front of an HTTP API. On loopback it also checks host names. Otherwise a web page
could make its own name resolve to 127.0.0.1 and send requests as if it ran on this machine (DNS rebinding).

Browsers log in for a session with a random cookie, so that the key itself is stored on no disk. Changes to control
plane services need the suite's token or a key, never a session (`ChangeGuard`).

A service's key table follows the key store with a delay of at most `FOLLOW_S`.
"""

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts.errors import (
    FulcrumError,
    InvalidApiKey,
    StartupError,
    StoreUnavailable,
    Unauthenticated,
    WrongHost,
    quoted,
)
from libs.keys.book import KeySet, KeyStore, Role, digest_of
from libs.keys.store import IN_REDIS
from libs.keys.table import ANYBODY, NOBODY, SUITE_TOKEN, Caller, KeyTable
from libs.policy.newest import put_newest
from libs.runtime.clock import Clock
from libs.runtime.http.semantics import relative
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import PLAINTEXT_VARIABLE, TLS_VARIABLES, is_loopback
from libs.runtime.settings import CommonSettings

VARIABLE: Final = "FULCRUM_HTTP_HOSTS"
MAX_REMEMBERED: Final = 256
"""The maximum number of cached results for hosts and origins."""


def own_hosts(settings: HttpSettings) -> "HostCheck | None":
    """Return the host check for a listener on loopback or with configured names.

    Return None for other listeners, which accept any name.
    """
    if is_loopback(f"{settings.host}:0") or settings.http_hosts:
        return HostCheck(settings.http_hosts)
    return None


class HostCheck:
    """A check that requests name loopback or a configured host."""

    def __init__(self, names: str) -> None:
        """Create the check. It accepts loopback names and those in `names`, a comma-separated list without ports."""
        self._names = frozenset(filter(None, (name.strip().lower() for name in names.split(","))))
        self._wrong = lru_cache(MAX_REMEMBERED)(self._find_wrong)

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """Raise WrongHost for a foreign host or origin.

        A request without a Host header does not come from a browser and is accepted.
        """
        wrong = self._wrong(host, origin)
        if wrong:
            raise WrongHost(wrong)

    def _find_wrong(self, host: bytes | None, origin: bytes | None) -> str:
        if host and not self._is_own(f"//{host.decode('latin-1')}"):
            named = quoted(host.decode("latin-1"))
            return f"this service does not answer to {named}: {VARIABLE} names what it answers to beside loopback"
        if origin and not self._is_own(origin.decode("latin-1")):
            named = quoted(origin.decode("latin-1"))
            return f"pages of {named} may not ask this service: {VARIABLE} adds names that may"
        return ""

    def _is_own(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname
        except ValueError:
            return False
        if not name:
            return False
        return name in self._names or name.endswith(".localhost") or is_loopback(f"{name}:0")


COOKIE: Final = "fulcrum_session"
MAX_SESSIONS: Final = 1_000
"""The maximum number of sessions. Beyond it, the oldest session ends."""
SESSION_S: Final = 12 * 3600
"""The duration of a session in s."""
TOKEN_BYTES: Final = 32


class Sessions:
    """The browser sessions of one process. A session ends with the process or with its key."""

    def __init__(self) -> None:
        # The digest of the key and the end of the session, by the digest of the cookie.
        self._keys: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def begin(self, key: bytes, now_s: float) -> str:
        """Begin a session for the holder of a key. Return the value of its cookie."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        put_newest(self._keys, digest_of(token.encode()), (digest_of(key), now_s + SESSION_S), MAX_SESSIONS)
        return token

    def digest(self, cookies: bytes, now_s: float) -> bytes | None:
        """Return the digest of the key that began the request's session, or None without a session."""
        token = _token(cookies)
        found = self._keys.get(digest_of(token)) if token else None
        return found[0] if found is not None and now_s < found[1] else None

    def end(self, cookies: bytes) -> None:
        self._keys.pop(digest_of(_token(cookies)), None)


def _token(cookies: bytes) -> bytes:
    for each in cookies.split(b";"):
        name, _, value = each.strip().partition(b"=")
        if name == COOKIE.encode():
            return value
    return b""


class ChangeGuard:
    """The check in front of routes that change something.

    Unlike `KeyGate`, it admits nobody without a token or a key, even if there are no keys.
    """

    def __init__(self, keys: KeyTable | None, clock: Clock, *, token: str) -> None:
        """Create the check. The suite's `token` has the rights of an admin's key; empty for none."""
        self._keys = keys
        self._clock = clock
        self._token = token

    def admit(self, authorization: str, what: str, least: Role = "operator") -> Caller:
        """Return the caller. `what` describes the action in error messages.

        Raise Unauthenticated without a valid token or key, and PermissionDenied if the key's role is below `least`.
        """
        if self._token and hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return SUITE_TOKEN
        try:
            if self._keys is not None and self._keys.known and self._keys.closed:
                caller = self._keys.caller(authorization.encode(), self._clock.now_ns() / 1e9)
                caller.check_role(least)
                return caller
        except InvalidApiKey:
            pass
        raise Unauthenticated(
            f"{what} needs the suite's token, or a key of role {least}, as authorization: Bearer TOKEN"
        )


# The key under which a request's scope contains its caller.
CALLER: Final = "fulcrum.caller"
PROBES: Final = frozenset({"/healthz", "/health", "/readyz"})
"""The paths that need no key. Probes have no secrets, and learn only whether the process serves."""
_DOCS: Final = ("/docs", "/redoc", "/openapi.json", "/static-offline-docs")

Need = Callable[[str, str], Role | None]
"""A function from a request's method and path to the lowest role that may make it, or None for everybody."""


def is_public(path: str) -> bool:
    """Return whether the path is a probe or part of the API documentation, which is the same in every cluster."""
    return path in PROBES or path.startswith(_DOCS)


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request, or `ANYBODY` if the app has no gate."""
    found: Caller = scope.get(CALLER, ANYBODY)
    return found


class _NoLongerAdmitted(Exception):
    """A signal that ends a running answer because its caller is no longer admitted."""


class KeyGate:
    """Middleware that admits or refuses each request by its key, session and host."""

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
        """Guard an app with the keys in `table`.

        `hosts` checks host names while there are no keys; with None, any name is accepted. With `sessions`, browsers
        without a session are redirected to /login.
        """
        self._app = app
        self._table = table
        self._clock = clock
        self._need = need
        self._hosts = hosts
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        """Run the app until its answer ends or its caller is no longer admitted."""
        # The event stream of a web page has no end of its own.

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
        caller.check_named(found)  # here, so that no route can omit it
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


log = structlog.get_logger()

FOLLOW_S: Final = 0.5
"""The interval between two reads of the store.

A revoked key is refused within two seconds: after this interval, the time of a read, and a second read if the first one
fails.
"""


async def start_keys(settings: HttpSettings, store: KeyStore, clock: Clock) -> KeyTable:
    """Return a table with the current keys.

    Raise StartupError if the key file is unusable, or if a listener beyond loopback would admit everybody.
    """
    trusted = _trusted(settings)
    table = KeyTable(open_without_keys=trusted, token=settings.token.get_secret_value())
    try:
        found = await store.load()
        assert found is not None
        book = found.book
        if book.keys and not book.cache_secret:  # created by an older release
            book = await store.change(KeySet.with_cache_secret)
        table.replace(book, clock.now_ns() / 1e9)
    except StoreUnavailable as error:
        if settings.keys != IN_REDIS:
            raise StartupError(error.message) from None
        log.warning("no request is answered until the keys have been read", error=error.message)
        return table
    if not (trusted or table.closed):
        raise StartupError(
            f"anybody could call the REST API on {settings.host}: make a key with `fulcrum keys create`, or set"
            f" {TLS_VARIABLES} or FULCRUM_TOKEN with {PLAINTEXT_VARIABLE} on a network that you trust, or"
            " FULCRUM_HOST=127.0.0.1"
        )
    return table


async def follow_keys(store: KeyStore, table: KeyTable, clock: Clock) -> None:
    """Apply changes of the store to the table until cancelled.

    While the store is unreachable, the last known keys apply.
    """
    version, away = "", False
    while True:
        try:
            found = await store.load(version)
            if found is not None:
                if version and table.closed and not found.book.keys:
                    log.warning("the store has lost all API keys: nobody is admitted until there are keys again")
                version = found.version
                table.replace(found.book, clock.now_ns() / 1e9)
            away = False
        except StoreUnavailable as error:
            if not away:
                log.warning("the store of API keys does not answer: the last known keys apply", error=error.message)
            away = True
        await asyncio.sleep(FOLLOW_S)


def _trusted(settings: CommonSettings) -> bool:
    """Return whether callers may be admitted without a key.

    They may be if only this machine's processes can connect, or if the operator has configured mutual trust in the
    network.
    """
    if is_loopback(f"{settings.host}:0") or settings.tls_cert:
        return True
    return bool(settings.token.get_secret_value()) and settings.allow_plaintext_token
