"""The page's login: an operator's key once, a session from then on, which an EventSource can send where it can send no
header."""

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
from libs.keys.change_guard import ChangeGuard
from libs.keys.gate import KeyGate, is_public
from libs.keys.hosts import own_hosts
from libs.keys.sessions import COOKIE, Sessions
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.http.settings import HttpSettings
from services.metrics.http.static import CONTENT_SECURITY_POLICY, FOLDER, HEADERS

PUBLIC: Final = frozenset({"/login", "/logout", "/style.css", "/icon.svg"})
"""What somebody who has no session yet may see."""
LOGGED_IN: Final = "fulcrum_logged_in"
"""Cookie by which the page's script knows that there is a session to end: it cannot read the session's own."""
MAX_BODY_BYTES: Final = 4096
_POLICY: Final = CONTENT_SECURITY_POLICY.replace("form-action 'none'", "form-action 'self'")


class Door:
    """Who may see the metrics service's answers: operators, where there are keys."""

    def __init__(self, keys: KeyTable | None, settings: HttpSettings, clock: Clock, *, token: str) -> None:
        """keys: None lets everybody in. token: the suite's, which counts as an admin's key."""
        self._keys = keys
        self.guard = ChangeGuard(keys, clock, token=token)
        """Before what changes something: a login's session is not enough for that."""
        self._settings = settings
        self._clock = clock
        self._sessions = Sessions()

    def routers(self) -> Iterable[APIRouter]:
        """The login's routes."""
        return () if self._keys is None else (login_router(self._keys, self._sessions, self._clock),)

    def before(self, app: ASGIApp, record: Callable[[AuditEvent], None], metrics: CollectorRegistry) -> ASGIApp:
        """The app behind the door; `record` takes who changed what."""
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
    """`/login` and `/logout`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/login")
    async def form() -> Response:
        """The form, for a suite that has keys; the page itself where there are none."""
        if table.is_open:
            return _to("/")
        body = (FOLDER / "login.html").read_bytes()
        return Response(body, media_type="text/html", headers=HEADERS | {"content-security-policy": _POLICY})

    @router.post("/login")
    async def login(request: Request) -> Response:
        """Begin a session. Raises InvalidApiKey, PermissionDenied."""
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
        """End the session."""
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
