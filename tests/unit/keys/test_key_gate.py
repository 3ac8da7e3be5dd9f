"""Tests of the key gate of a REST API: refusals, accepted host names, sessions of people and the age of keys."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry

from libs.contracts.errors import (
    InvalidApiKey,
    PermissionDenied,
    StartupError,
    StoreUnavailable,
    Unauthenticated,
    WrongHost,
)
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.keys import gate as key_gate
from libs.keys.book import KeySet, Role, StoredKeySet, draw_key
from libs.keys.gate import COOKIE, SESSION_S, HostCheck, Sessions, follow_keys, start_keys
from libs.keys.store import FileKeys
from libs.keys.table import Caller, KeyTable
from libs.runtime.http.settings import HttpSettings
from libs.runtime.web import make_web_app
from libs.testing.batch.work import running
from libs.testing.wait import ManualClock, until
from services.metrics.http.login import AccessControl

HTML = {"accept": "text/html,*/*"}


class World:
    """A metrics service's app behind its door."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.recorded: list[AuditEvent] = []
        self.revoke_after: tuple[int, KeySet] = (-1, KeySet())
        self.table = KeyTable(open_without_keys=True)
        self.table.replace(KeySet(), self.now_s)
        door = AccessControl(self.table, HttpSettings(**settings), self.clock, token="suite")
        self.door = door
        app: FastAPI = make_web_app("t", "t", not_ready=lambda: None, metrics=CollectorRegistry())
        for router in door.routers():
            app.include_router(router)

        @app.get("/v1/status")
        async def status() -> str:
            return "all"

        @app.get("/v1/stream")
        async def stream() -> StreamingResponse:
            return StreamingResponse(self.numbers())

        transport = httpx.ASGITransport(door.before(app, self.recorded.append, CollectorRegistry()))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8002")

    async def numbers(self) -> AsyncIterator[str]:
        for number in range(3):
            if number == self.revoke_after[0]:
                self.table.replace(self.revoke_after[1], self.now_s)
            yield f"{number}\n"

    @property
    def now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    def key(self, role: Role) -> tuple[str, KeySet]:
        secret, key = draw_key("a", now_s=self.now_s, role=role)
        book = KeySet().with_key(key, self.now_s)
        self.table.replace(book, self.now_s)
        return secret, book


async def test_without_keys_every_request_is_accepted() -> None:
    world = World()
    assert (await world.http.get("/v1/status")).status_code == 200
    assert (await world.http.get("/v1/status", headers={"authorization": "Bearer any"})).status_code == 200
    assert (await world.http.get("/login")).headers["location"] == "./"


async def test_with_a_key_set_requests_need_an_operator_and_probes_do_not() -> None:
    world = World()
    operator, _ = world.key("operator")
    answer = await world.http.get("/v1/status")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert "fulcrum keys create" in error["message"] and error["param"] is None
    headers = {"authorization": f"Bearer {operator}"}
    assert (await world.http.get("/v1/status", headers=headers)).status_code == 200
    for path in ("/healthz", "/health", "/readyz", "/docs", "/openapi.json"):
        assert (await world.http.get(path)).status_code == 200, path
    user, _ = world.key("user")
    refused = await world.http.get("/v1/status", headers={"authorization": f"Bearer {user}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")


async def test_a_person_logs_in_once_and_is_logged_out_when_the_key_is_revoked() -> None:
    world = World()
    secret, book = world.key("operator")
    sent = await world.http.get("/", headers=HTML)
    assert (sent.status_code, sent.headers["location"]) == (303, "./login")
    assert "form-action 'self'" in (await world.http.get("/login")).headers["content-security-policy"]
    assert (await world.http.post("/login", data={"key": "sk-wrong"})).status_code == 401
    assert COOKIE not in world.http.cookies
    answer = await world.http.post("/login", data={"key": secret})
    cookie = answer.headers.get_list("set-cookie")[0]
    assert answer.status_code == 303 and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert secret not in cookie
    assert (await world.http.get("/v1/status")).status_code == 200
    world.table.replace(book.without_key(book.keys[0].id, world.now_s), world.now_s)
    assert (await world.http.get("/v1/status")).status_code == 401


async def test_a_session_ends_after_its_lifetime_and_with_a_logout() -> None:
    world = World()
    secret, _ = world.key("operator")
    await world.http.post("/login", data={"key": secret})
    world.clock.advance_ms(SESSION_S * 1000)
    assert (await world.http.get("/v1/status")).status_code == 401
    await world.http.post("/login", data={"key": secret})
    kept = world.http.cookies[COOKIE]
    await world.http.post("/logout")
    assert (await world.http.get("/v1/status", headers={"cookie": f"{COOKIE}={kept}"})).status_code == 401


async def test_a_stream_ends_when_the_key_behind_it_is_revoked() -> None:
    world = World()
    secret, book = world.key("operator")
    lines: list[str] = []
    headers = {"authorization": f"Bearer {secret}"}
    async with world.http.stream("GET", "/v1/stream", headers=headers) as answer:
        lines = [line async for line in answer.aiter_lines()]
    assert lines == ["0", "1", "2"]

    world.revoke_after = 1, book.without_key(book.keys[0].id, world.now_s)
    async with world.http.stream("GET", "/v1/stream", headers=headers) as answer:
        lines = [line async for line in answer.aiter_lines()]
    assert lines == ["0"]


async def test_a_users_key_or_an_endless_form_starts_no_session() -> None:
    world = World()
    secret, _ = world.key("user")
    assert (await world.http.post("/login", data={"key": secret})).status_code == 403
    assert (await world.http.post("/login", content=b"key=" + b"x" * 9000)).status_code == 413


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_gate, "MAX_SESSIONS", 2)
    found = Sessions()
    tokens = [found.begin(b"k", 0.0) for _ in range(3)]
    kept = [found.digest(f"a=b; {COOKIE}={token}".encode(), 1.0) is not None for token in tokens]
    assert kept == [False, True, True]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "a.localhost", "gpu.lan:1"]
)
def test_loopback_names_and_configured_names_are_accepted(host: str) -> None:
    check = HostCheck("gpu.lan, other")
    check.check(host.encode(), None)
    check.check(None, f"https://{host}".encode())


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", "0.0.0.0", ":80"]
)
def test_a_page_under_another_host_name_gets_nothing(name: str) -> None:
    with pytest.raises(WrongHost, match="FULCRUM_HTTP_HOSTS"):
        HostCheck("").check(name.encode(), None)
    with pytest.raises(WrongHost):
        HostCheck("").check(b"localhost", f"http://{name}".encode())


@pytest.mark.parametrize("origin", [b"null", b"file://", b"http://[", b"chrome-extension://abc"])
def test_a_foreign_origin_is_refused(origin: bytes) -> None:
    with pytest.raises(WrongHost):
        HostCheck("").check(b"localhost", origin)


async def test_host_names_are_checked_only_on_loopback_without_keys() -> None:
    world, rebound = World(), {"host": "evil.example"}
    answer = await world.http.get("/v1/status", headers=rebound)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")
    secret, _ = world.key("operator")
    answer = await world.http.get("/v1/status", headers={**rebound, "authorization": f"Bearer {secret}"})
    assert answer.status_code == 200
    beyond = World(host="0.0.0.0", allow_plaintext_token=True, token="t")
    assert (await beyond.http.get("/v1/status", headers=rebound)).status_code == 200


async def test_a_listener_beyond_loopback_starts_only_with_a_key_or_as_adr_43_requires(tmp_path: Path) -> None:
    store, clock = FileKeys(tmp_path / "keys.json"), ManualClock()
    with pytest.raises(StartupError, match=r"fulcrum keys create.*FULCRUM_ALLOW_PLAINTEXT_TOKEN"):
        await start_keys(HttpSettings(host="0.0.0.0"), store, clock)
    trusted = HttpSettings(host="0.0.0.0", allow_plaintext_token=True, token="t")
    assert (await start_keys(trusted, store, clock)).is_open
    _, key = draw_key("a", now_s=0)
    await store.change(lambda book: book.with_key(key, 0))
    assert (await start_keys(HttpSettings(host="0.0.0.0"), store, clock)).closed


async def test_an_untrustworthy_key_file_prevents_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{")
    with pytest.raises(StartupError, match="cannot be read"):
        await start_keys(HttpSettings(), FileKeys(path), ManualClock())
    path.write_text("{}")
    path.chmod(0o622)
    with pytest.raises(StartupError, match="chmod 600"):
        await start_keys(HttpSettings(), FileKeys(path), ManualClock())


def admitted(table: KeyTable, secret: str) -> bool:
    try:
        table.caller(f"Bearer {secret}".encode(), 0)
    except InvalidApiKey:
        return False
    return True


class Away:
    """A store that answers when it is let."""

    def __init__(self) -> None:
        self.stored: StoredKeySet | None = None

    async def load(self, known: str = "") -> StoredKeySet | None:
        if self.stored is None:
            raise StoreUnavailable("away")
        return None if known == self.stored.version else self.stored


async def test_the_last_known_keys_apply_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_gate, "FOLLOW_S", 0.001)
    store, clock = Away(), ManualClock()
    table = await start_keys(HttpSettings(keys="redis"), store, clock)  # type: ignore[arg-type]
    assert not table.known
    secret, key = draw_key("a", now_s=0)
    first = KeySet().with_key(key, 0)
    async with running(follow_keys(store, table, clock)):  # type: ignore[arg-type]
        store.stored = StoredKeySet("1", first)
        await until(lambda: table.known)
        store.stored = None
        await asyncio.sleep(0)
        assert table.caller(f"Bearer {secret}".encode(), 0).tenant == "a"
        store.stored = StoredKeySet("2", first.without_key(key.id, 0))
        await until(lambda: not admitted(table, secret))


@pytest.mark.parametrize(("role", "least", "may"), [
    ("user", "operator", False), ("operator", "operator", True), ("operator", "admin", False), ("admin", "admin", True),
])  # fmt: skip
def test_a_change_needs_a_key_of_its_role_or_the_suites_token(role: Role, least: Role, may: bool) -> None:
    world = World()

    def admit(authorization: str) -> Caller:
        return world.door.guard.admit(authorization, "this", least)

    secret, book = world.key(role)
    for wrong in ("", "Bearer ", "Bearer None"):
        with pytest.raises(Unauthenticated, match=least):
            admit(wrong)
    if may:
        assert admit(f"Bearer {secret}").name == book.keys[0].id
    else:
        with pytest.raises(PermissionDenied, match=least):
            admit(f"Bearer {secret}")
    assert admit("Bearer suite").name == "token"


def test_a_service_without_a_token_refuses_an_empty_one() -> None:
    door = AccessControl(None, HttpSettings(), ManualClock(), token="")
    for header in ("", "Bearer "):
        with pytest.raises(Unauthenticated):
            door.guard.admit(header, "this")
