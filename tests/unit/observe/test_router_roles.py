"""Tests over HTTP of role changes at a router that fails during them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from libs.observe import router_roles
from libs.observe.roles import FleetAway, FleetWorker, MoveRefused
from libs.observe.router_roles import RouterRoles

pytestmark = pytest.mark.system

URLS = {"http://p0": "prefill", "http://d0": "decode", "http://d1": "decode"}


class Router:
    """The part of sglang-router's API that changes roles."""

    def __init__(self) -> None:
        self.servers = dict(URLS)
        self.adds = True
        self.deleted = Event()
        self.drips = False

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "DELETE":
            self.servers.pop(path.removeprefix("/workers/").replace("_", "://"))
            self.deleted.set()
        elif method == "POST":
            if not self.adds:
                return 503, {}
            self.servers[body["url"]] = body["worker_type"]
        listed = [
            {"url": url, "worker_type": role, "id": url.replace("://", "_")} for url, role in self.servers.items()
        ]
        return 200, {"workers": listed}


@contextmanager
def _serving(router: Router) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            read = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, found = router.answer(self.command, self.path, json.loads(read) if read else None)
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body) + 1000 * router.drips))
            self.end_headers()
            self.wfile.write(body)
            while router.drips:
                self.wfile.write(b" ")
                drip.wait(0.05)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - the names that http.server asks for

        def log_message(self, *_: object) -> None:
            pass

    drip = Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        Thread(target=http.serve_forever, args=(0.05,)).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            router.drips = False
            http.shutdown()


@asynccontextmanager
async def fleet(router: Router) -> AsyncIterator[RouterRoles]:
    with _serving(router) as url:
        roles = RouterRoles(url, lambda: {each: each.rpartition("/")[2] for each in URLS})
        try:
            yield roles
        finally:
            await roles.close()


async def worker(roles: RouterRoles, name: str) -> FleetWorker:
    return next(each for each in await roles.workers() if each.name == name)


async def test_a_server_that_the_router_refused_to_add_is_restored_at_the_next_read() -> None:
    router = Router()
    async with fleet(router) as roles:
        router.adds = False
        with pytest.raises(MoveRefused, match="d0: the router did not take it as prefill and lacks it now"):
            await roles.set_role(await worker(roles, "d0"), "prefill", "")
        assert "http://d0" not in router.servers
        with pytest.raises(FleetAway, match="the router lacks http://d0, which a change of role removed"):
            await roles.workers()
        router.adds = True
        assert {each.name: each.role for each in await roles.workers()} == {
            "d0": "decode",
            "d1": "decode",
            "p0": "prefill",
        }


async def test_a_server_that_never_returns_blocks_the_others_for_a_bounded_number_of_reads() -> None:
    router = Router()
    async with fleet(router) as roles:
        router.adds = False
        with pytest.raises(MoveRefused):
            await roles.set_role(await worker(roles, "d0"), "prefill", "")
        for _ in range(router_roles.MOST_TRIES):
            with pytest.raises(FleetAway):
                await roles.workers()
        assert [each.name for each in await roles.workers()] == ["d1", "p0"]


async def test_a_server_whose_move_is_cancelled_halfway_is_restored_when_the_roles_are_closed() -> None:
    router = Router()
    async with fleet(router) as roles:
        router.adds = False
        found = await worker(roles, "d0")
        moving = asyncio.create_task(roles.set_role(found, "prefill", ""))
        assert await asyncio.to_thread(router.deleted.wait, 5)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        router.adds = True
    assert router.servers == URLS


async def test_a_router_that_answers_byte_by_byte_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_roles, "CALL_S", 0.3)
    router = Router()
    async with fleet(router) as roles:
        router.drips = True
        async with asyncio.timeout(5):
            with pytest.raises(FleetAway, match="does not answer: TimeoutError"):
                await roles.workers()
