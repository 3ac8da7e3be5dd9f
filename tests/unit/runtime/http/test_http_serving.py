"""Tests of valid and invalid HTTP input: read as meant or refused in the API's shape, and bounded."""

import asyncio
import json
import logging
import re
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from libs.runtime.http import ConnectionGuard, HttpBounds, bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.testing.wait import until
from tests.unit.runtime.http.http_rig import bodies, echo, exchange, served, web_app

pytestmark = pytest.mark.system
GARBAGE = b"\x00\x01 no request\r\n\r\n"
REQUEST = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


def error(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_bytes_that_are_not_http_are_refused_in_the_shape_of_the_api() -> None:
    answer = exchange(web_app(), GARBAGE)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error(answer)["code"] == "invalid_request"


def test_an_unknown_path_is_answered_in_the_same_shape() -> None:
    answer = exchange(web_app(), b"GET /nowhere HTTP/1.1\r\nconnection: close\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert error(answer) | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": None, "code": "not_found",
    }  # fmt: skip


@pytest.mark.parametrize("begun", [False, True], ids=["before its answer", "in its answer"])
@pytest.mark.parametrize("pipelined", [1, 3])
def test_garbage_after_requests_closes_the_connection_without_an_error(
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
        answer = exchange(app, REQUEST * pipelined + GARBAGE)
    assert gone
    assert not caplog.records
    assert b"rest" not in answer
    assert answer.startswith(b"HTTP/1.1 200 " if begun and b"part" in answer else b"HTTP/1.1 400 ")


def test_an_answers_head_is_sent_with_its_body_or_alone_if_that_is_late() -> None:
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


# ------------------------------------------------------------ heads without end


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"x" * 17_000),
        b"GET / HTTP/1.1\r\nhost: x\r\nx-large: %b\r\n\r\n" % (b"x" * 17_000),
        b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % (b"x-many: %b\r\n" % (b"x" * 1000) * 66),
        b"GET / HTTP/1.1\r\nhost: x\r\nx-endless: %b" % (b"x" * 1_000_000),
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 100_000,
        b"\r\n" * 200_000,
    ],
    ids=["target", "one header", "all headers", "a header without end", "headers without end", "blank lines"],
)
def test_heads_over_a_bound_are_refused_with_an_answer(sent: bytes) -> None:
    answer = exchange(web_app(), sent)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error(answer)["code"] == "headers_too_large"


def test_a_head_within_the_bounds_is_accepted() -> None:
    large = b"".join(b"x-%d: %b\r\n" % (number, b"x" * 15_000) for number in range(4))
    answer = exchange(echo, b"GET /kept HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + large + b"\r\n")
    assert answer.endswith(b"\r\n\r\nGET /kept \n")


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nx-trailer: " + b"x" * 1_000_000, b"0\r\n" + b"x: y\r\n" * 100_000, b"5;" + b"x" * 1_000_000],
    ids=["a trailer", "trailers", "a chunk's extension"],
)
def test_framing_bytes_between_the_parts_of_a_body_are_bounded(endless: bytes) -> None:
    sent = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n" + endless
    answer = exchange(echo, sent)
    assert re.match(rb"HTTP/1.1 4\d\d ", answer)


def test_trailers_do_not_become_headers() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        seen.extend(scope["headers"])

    sent = (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\nx-tenant: y\r\n\r\n"
    )
    assert bodies(exchange(app, sent)) == [b"POST / \n"]
    assert b"x-tenant" not in dict(seen)


# ------------------------------------------------------------ bounds on connections and on requests that wait


def test_pipelined_requests_are_bounded_and_the_rest_is_refused_after_their_answers() -> None:
    most = HttpBounds().max_pipelined
    sent = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(7500))
    *answered, last = bodies(exchange(echo, sent))
    assert answered == [b"GET /%d \n" % number for number in range(most + 1)]
    assert json.loads(last)["error"]["code"] == "too_many_pipelined"


def test_connections_over_a_bound_are_refused_with_an_answer_until_others_have_ended() -> None:
    async def run() -> None:
        guard = ConnectionGuard(HttpBounds(max_connections=3, max_connections_per_address=2))
        async with served(echo, guard=guard) as sock:
            host, port = sock.getsockname()

            async def connect(local: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                return await asyncio.open_connection(host, port, local_addr=(local, 0))

            async def refused(local: str) -> dict[str, Any]:
                reader, writer = await connect(local)
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in answer
                return error(answer)

            async def answered(local: str) -> asyncio.StreamWriter:
                reader, writer = await connect(local)
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.read(4096)).endswith(b"GET / \n")
                return writer

            held = [await answered("127.0.0.2") for _ in range(2)]
            assert "127.0.0.2" in (await refused("127.0.0.2"))["message"]
            held.append(await answered("127.0.0.3"))
            assert (await refused("127.0.0.4"))["code"] == "too_many_connections"
            assert _samples(guard) == {
                "fulcrum_http_connections": 3, "fulcrum_http_refused_total too_many_connections": 2,
            }  # fmt: skip
            held.pop().close()
            await until(lambda: _samples(guard)["fulcrum_http_connections"] == 2, what="room")
            held.append(await answered("127.0.0.4"))
            for writer in held:
                writer.close()
            await until(lambda: _samples(guard)["fulcrum_http_connections"] == 0, what="no connection")

    uvloop.run(run())


def _samples(guard: ConnectionGuard) -> dict[str, float]:
    found = (sample for family in guard.collect() for sample in family.samples)
    return {" ".join((sample.name, *sample.labels.values())): sample.value for sample in found}


# ------------------------------------------------------------ HTTP/1.0


def test_an_http_1_0_client_gets_no_chunks_and_a_closed_connection_instead_of_a_length() -> None:
    async def streams(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one ", b"", b"two "):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"three"})

    head, _, body = exchange(streams, b"GET / HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one two three"
    assert exchange(echo, b"GET /known HTTP/1.0\r\n\r\n").endswith(
        b"content-length: 12\r\nconnection: close\r\n\r\nGET /known \n"
    )
