"""The page: its static files and the runbook, and the login that exchanges an operator's key for a session cookie.

An EventSource can send a cookie but no header. Files are served without a build step, foreign resources or inline
scripts.
"""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from markdown_it import MarkdownIt
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from libs.contracts.errors import BodyTooLarge, InvalidApiKey
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.keys.audit import AuditMiddleware, changes
from libs.keys.book import Role
from libs.keys.gate import COOKIE, ChangeGuard, KeyGate, Sessions, is_public, own_hosts
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import is_loopback

FOLDER: Final = Path(__file__).parents[1] / "page"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page(StaticFiles):
    """The folder's files with security headers; `/` is index.html."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER, html=True)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


RUNBOOK: Final = Path(__file__).resolve().parents[3] / "docs" / "runbook"
FRAME: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="../icon.svg"><link rel="stylesheet" href="../style.css"></head>
<body><header><h1><a href="../">Fulcrum</a></h1><span>runbook</span></header>
<main class="prose"><article class="panel">{body}</article></main></body></html>
"""


def runbook_router() -> APIRouter:
    router = APIRouter()

    @router.get("/runbook/{name}", response_class=HTMLResponse, include_in_schema=False)
    async def runbook(name: str) -> HTMLResponse:
        """Return the runbook page of an alert as HTML."""
        known = sorted(path.stem for path in RUNBOOK.glob("*.md"))
        if name not in known:
            raise HTTPException(404, f"there is no runbook page {name[:80]!r}; known: {', '.join(known)}")
        return HTMLResponse(page(name), headers=HEADERS)

    return router


def page(name: str) -> str:
    """Render one page as HTML. Raise FileNotFoundError if the documentation is not installed."""
    text = (RUNBOOK / f"{name}.md").read_text()
    return FRAME.format(title=escape(name), body=MarkdownIt("commonmark").enable("table").render(text))


PUBLIC: Final = frozenset({"/login", "/logout", "/style.css", "/icon.svg"})
"""Paths that may be read without a session."""
REPORTS_PATH: Final = "/v1/observed/steps"
"""The path to which observed servers send their telemetry, several times a second."""
LOGGED_IN: Final = "fulcrum_logged_in"
"""The cookie that tells the page's script that a session exists; the session's own cookie is hidden from scripts."""
MAX_BODY_BYTES: Final = 4096
_POLICY: Final = CONTENT_SECURITY_POLICY.replace("form-action 'none'", "form-action 'self'")


class AccessControl:
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

    def admit_report(self, authorization: str, what: str) -> None:
        """Admit this machine's processes if there are no keys, otherwise only callers that `guard` admits."""
        local = is_loopback(f"{self._settings.host}:0")
        if not (local and (self._keys is None or self._keys.is_open)):
            self.guard.admit(authorization, what)

    def routers(self) -> Iterable[APIRouter]:
        return () if self._keys is None else (login_router(self._keys, self._sessions, self._clock),)

    def before(self, app: ASGIApp, record: Callable[[AuditEvent], None], metrics: CollectorRegistry) -> ASGIApp:
        """Wrap the app in authentication; `record` receives the audit events of changes."""
        if self._keys is None:
            return app
        hosts = own_hosts(self._settings)
        gate = KeyGate(app, self._keys, self._clock, need=_need, hosts=hosts, sessions=self._sessions)
        return AuditMiddleware(
            gate, self._keys, self._clock, service="metrics", audited=_audited, publish=record, metrics=metrics
        )


def _audited(method: str, path: str) -> bool:
    """Return whether a request is recorded: changes by people, but not the telemetry of observed servers."""
    return changes(method, path) and path != REPORTS_PATH


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
        # A session cookie: the browser forgets it when it closes. Strict: no other site's request carries it. Without a
        # path it applies to the folder of the requested address, so other pages behind the same proxy do not receive
        # it.
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
