"""The login of the page, which exchanges an operator's key for a session cookie.

An EventSource can send a cookie where it cannot send a header.
"""

from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from libs.contracts.errors import InvalidApiKey
from libs.contracts.http_errors import BodyTooLarge
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.keys.audit import AuditDoor, changes
from libs.keys.book import Role
from libs.keys.gate import COOKIE, ChangeGuard, KeyGate, Sessions, is_public, own_hosts
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.http.settings import HttpSettings
from services.metrics.http.static import CONTENT_SECURITY_POLICY, FOLDER, HEADERS

PUBLIC: Final = frozenset({"/login", "/logout", "/style.css", "/icon.svg"})
"""Paths that may be read without a session."""
LOGGED_IN: Final = "fulcrum_logged_in"
"""Cookie that shows the page's script that a session exists; the session's own cookie is hidden from scripts."""
MAX_BODY_BYTES: Final = 4096
_POLICY: Final = CONTENT_SECURITY_POLICY.replace("form-action 'none'", "form-action 'self'")


class Door:
    """Access control of the metrics service's routes: operators only, where keys are set."""

    def __init__(self, keys: KeyTable | None, settings: HttpSettings, clock: Clock, *, token: str) -> None:
        """Create the access control. Without `keys` everybody is admitted; the suite's `token` counts as an admin's
        key.
        """
        self._keys = keys
        self.guard = ChangeGuard(keys, clock, token=token)
        """Guard of routes that change something, for which a login's session is not enough."""
        self._settings = settings
        self._clock = clock
        self._sessions = Sessions()

    def routers(self) -> Iterable[APIRouter]:
        return () if self._keys is None else (login_router(self._keys, self._sessions, self._clock),)

    def before(self, app: ASGIApp, record: Callable[[AuditEvent], None], metrics: CollectorRegistry) -> ASGIApp:
        """Wrap the app in authentication; `record` receives the audit events of changes."""
        if self._keys is None:
            return app
        hosts = own_hosts(self._settings)
        gate = KeyGate(app, self._keys, self._clock, need=_need, hosts=hosts, sessions=self._sessions)
        return AuditDoor(
            gate, self._keys, self._clock, service="metrics", audited=changes, publish=record, metrics=metrics
        )


def _need(_method: str, path: str) -> Role | None:
    return None if is_public(path) or path in PUBLIC else "operator"


def login_router(table: KeyTable, sessions: Sessions, clock: Clock) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/login")
    async def form() -> Response:
        """Return the form if the suite has keys, else redirect to the page."""
        if table.is_open:
            return _to("/")
        body = (FOLDER / "login.html").read_bytes()
        return Response(body, media_type="text/html", headers=HEADERS | {"content-security-policy": _POLICY})

    @router.post("/login")
    async def login(request: Request) -> Response:
        """Begin a session. Raise InvalidApiKey or PermissionDenied."""
        if table.is_open:
            return _to("/")
        key, now_s = (await _key(request)).encode(), clock.now_ns() / 1e9
        if not key:
            raise InvalidApiKey("the form has no key")
        table.caller(b"Bearer " + key, now_s).check_role("operator")
        answer, secure = _to("/"), request.url.scheme == "https"
        # A session cookie: the browser forgets it when it closes. Strict: no other site's request carries it. Without
        # a path it is the folder of the address that was asked for, so other pages behind the same proxy do not get it.
        token = sessions.begin(key, now_s)
        answer.set_cookie(COOKIE, token, path=None, httponly=True, samesite="strict", secure=secure)
        answer.set_cookie(LOGGED_IN, "1", path=None, samesite="strict", secure=secure)
        return answer

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        sessions.end(request.headers.get("cookie", "").encode("latin-1"))
        answer = _to("/login")
        for cookie in (COOKIE, LOGGED_IN):
            answer.set_cookie(cookie, path=None, max_age=0, expires=0)
        return answer

    return router


async def _key(request: Request) -> str:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is over {MAX_BODY_BYTES} bytes", param="body")
    return parse_qs(body.decode("latin-1")).get("key", [""])[0].strip()


def _to(path: str) -> Response:
    return Response(status_code=303, headers={"location": path, "cache-control": "no-store"})
