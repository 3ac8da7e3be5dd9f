"""HTTP that is none: refused in the API's shape, and whatever was being answered is given up quietly."""

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.runtime.web import make_web_app

GARBAGE = b"\x00\x01 no request\r\n\r\n"
REQUEST = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


def _exchange(app: Any, sent: bytes) -> bytes:
    """What comes back until the server closes, over the event loop that services run on."""
    return uvloop.run(_send(app, sent))


async def _send(app: Any, sent: bytes) -> bytes:
    async with AsyncExitStack() as stack:
        sock = bind("127.0.0.1", 0, "PORT")
        await stack.enter_async_context(serve_http(app, sock, tasks=TaskOwner(), drain_s=1))
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        stack.callback(writer.close)
        writer.write(sent)
        async with asyncio.timeout(5):
            return await reader.read()


def _web_app() -> Any:
    return make_web_app("test", "test", not_ready=lambda: None, metrics=CollectorRegistry())


def _error(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_bytes_that_are_no_http_are_refused_in_the_shape_of_the_api() -> None:
    answer = _exchange(_web_app(), GARBAGE)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert _error(answer)["code"] == "invalid_request"


def test_a_path_that_is_not_there_answers_in_the_same_shape() -> None:
    answer = _exchange(_web_app(), b"GET /nowhere HTTP/1.1\r\nconnection: close\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert _error(answer) | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": None, "code": "not_found",
    }  # fmt: skip


@pytest.mark.parametrize("begun", [False, True], ids=["before its answer", "in its answer"])
@pytest.mark.parametrize("pipelined", [1, 3])
def test_garbage_behind_requests_ends_them_without_a_fault(
    begun: bool, pipelined: int, caplog: pytest.LogCaptureFixture
) -> None:
    gone = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.append(True)
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"rest"})

    with caplog.at_level(logging.ERROR):
        answer = _exchange(app, REQUEST * pipelined + GARBAGE)
    assert gone
    assert not caplog.records
    assert b"rest" not in answer
    assert answer.startswith(b"HTTP/1.1 200 " if begun and b"part" in answer else b"HTTP/1.1 400 ")


def test_an_answers_head_comes_with_its_body_or_by_itself_where_that_is_late() -> None:
    async def run() -> None:
        late = asyncio.Event()

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            if scope["path"] == "/late":
                await late.wait()
            await send({"type": "http.response.body", "body": b"body"})

        async with AsyncExitStack() as stack:
            sock = bind("127.0.0.1", 0, "PORT")
            await stack.enter_async_context(serve_http(app, sock, tasks=TaskOwner(), drain_s=1))
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            stack.callback(writer.close)
            async with asyncio.timeout(5):
                writer.write(b"GET /now HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.read(4096)).endswith(b"\r\n\r\nbody")
                writer.write(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.read(4096)).endswith(b"\r\n\r\n")
                late.set()
                assert await reader.read(4096) == b"body"

    uvloop.run(run())
