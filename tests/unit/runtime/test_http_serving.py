"""What clients send over HTTP, right and wrong: read as it is meant, or refused in the API's shape; and bounded."""

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.runtime.http import ConnectionGuard, HttpBounds, bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.runtime.web import make_web_app
from libs.testing.examples import examples
from libs.testing.wait import until

pytestmark = pytest.mark.system

GARBAGE = b"\x00\x01 no request\r\n\r\n"
REQUEST = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


def _exchange(app: Any, sent: bytes, *, bounds: HttpBounds | None = None) -> bytes:
    """What comes back until the server closes, over the event loop that services run on."""
    return uvloop.run(_send(app, sent, bounds=bounds))


@asynccontextmanager
async def _served(
    app: Any, bounds: HttpBounds | None = None, *, guard: ConnectionGuard | None = None
) -> AsyncIterator[socket.socket]:
    sock = bind("127.0.0.1", 0, "PORT")
    guard = guard or ConnectionGuard(bounds)
    async with serve_http(app, sock, tasks=TaskOwner(), drain_s=1, guard=guard), asyncio.timeout(20):
        yield sock


async def _send(app: Any, *parts: bytes, bounds: HttpBounds | None = None) -> bytes:
    """Each part leaves by itself, once the server has had its turn."""
    async with _served(app, bounds) as sock:
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            writer.write(part)
            for _ in range(5):
                await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
        return answer


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


# ------------------------------------------------------------ upgrades that nobody takes up

UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\n",
    "unknown": b"connection: keep-alive, Upgrade\r\nupgrade: x\r\n",
}
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED_SMUGGLED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's line and body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    shown = f"{scope['method']} {scope['path']} ".encode() + body + b"\n"
    length = (b"content-length", str(len(shown)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": shown})


def _bodies(answers: bytes) -> list[bytes]:
    """Of answers one after the other, each with its length."""
    found = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        found.append(answers[:length])
        answers = answers[length:]
    return found


def _split_at(cuts: Sequence[int], sent: bytes) -> list[bytes]:
    edges = [0, *sorted({cut % len(sent) for cut in cuts}), len(sent)]
    return [part for first, last in pairwise(edges) if (part := sent[first:last])]


@settings(deadline=None, max_examples=examples(60))
@given(
    upgrade=st.sampled_from(sorted(UPGRADES)),
    chunked=st.booleans(),
    expects=st.booleans(),
    cuts=st.lists(st.integers(0, 1000), max_size=4),
)
def test_a_body_behind_an_ignored_upgrade_is_the_requests_own_however_it_is_cut(
    upgrade: str, chunked: bool, expects: bool, cuts: list[int]
) -> None:
    """The body looks like a request: whoever reads it as one is smuggled past."""
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(SMUGGLED)
    head = b"POST /first HTTP/1.1\r\nhost: x\r\n" + UPGRADES[upgrade] + framing + b"\r\n\r\n"
    sent = head + (CHUNKED_SMUGGLED if chunked else SMUGGLED) + b"GET /last HTTP/1.1\r\nconnection: close\r\n\r\n"
    answers = uvloop.run(_send(_echo, *_split_at(cuts, sent)))
    assert _bodies(answers) == [b"POST /first " + SMUGGLED + b"\n", b"GET /last \n"]


@pytest.mark.parametrize("upgrade", sorted(UPGRADES))
def test_requests_without_a_body_that_offer_an_upgrade_are_answered_in_turn(upgrade: str) -> None:
    request = b"GET /%d HTTP/1.1\r\nhost: x\r\n" + UPGRADES[upgrade] + b"\r\n"
    sent = b"".join(request % number for number in range(5)) + b"GET /end HTTP/1.1\r\nconnection: close\r\n\r\n"
    assert _bodies(_exchange(_echo, sent)) == [*(b"GET /%d \n" % number for number in range(5)), b"GET /end \n"]


def test_a_tunnel_is_refused() -> None:
    answer = _exchange(_web_app(), b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\nconnection: close\r\n\r\n" + SMUGGLED)
    assert re.match(rb"HTTP/1.1 4\d\d ", answer)
    assert answer.count(b"HTTP/1.1 ") == 1


# ------------------------------------------------------------ heads without end


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * 17_000),
        b"GET / HTTP/1.1\r\nx-large: %b\r\n\r\n" % (b"x" * 17_000),
        b"GET / HTTP/1.1\r\n%b\r\n" % (b"x-many: %b\r\n" % (b"x" * 1000) * 66),
        b"GET / HTTP/1.1\r\nx-endless: %b" % (b"x" * 1_000_000),
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
        b"\r\n" * 200_000,
    ],
    ids=["target", "one header", "all headers", "a header without end", "headers without end", "blank lines"],
)
def test_heads_over_a_bound_are_refused_by_an_answer(sent: bytes) -> None:
    answer = _exchange(_web_app(), sent)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert _error(answer)["code"] == "headers_too_large"


def test_a_head_within_the_bounds_is_read() -> None:
    large = b"".join(b"x-%d: %b\r\n" % (number, b"x" * 15_000) for number in range(4))
    answer = _exchange(_echo, b"GET /kept HTTP/1.1\r\nconnection: close\r\n" + large + b"\r\n")
    assert answer.endswith(b"\r\n\r\nGET /kept \n")


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nx-trailer: " + b"x" * 1_000_000, b"0\r\n" + b"x: y\r\n" * 100_000, b"5;" + b"x" * 1_000_000],
    ids=["a trailer", "trailers", "a chunk's extension"],
)
def test_what_stands_between_the_parts_of_a_body_is_bounded(endless: bytes) -> None:
    sent = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n" + endless
    answer = _exchange(_echo, sent)
    assert re.match(rb"HTTP/1.1 4\d\d ", answer)


def test_trailers_are_no_headers() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _echo(scope, receive, send)
        seen.extend(scope["headers"])

    sent = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\nx-tenant: y\r\n\r\n"
    assert _bodies(_exchange(app, sent)) == [b"POST / \n"]
    assert b"x-tenant" not in dict(seen)


def test_a_refused_client_gets_its_answer_however_much_it_still_sends() -> None:
    """Closing at once would reset the connection, and the answer would be lost on the way."""

    async def run() -> bytes:
        async with _served(_web_app()) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET / HTTP/1.1\r\n")
            for _ in range(100):
                writer.write(b"x: " + b"y" * 100_000)
                await writer.drain()
            answer = await reader.read()
            writer.close()
            return answer

    assert uvloop.run(run()).startswith(b"HTTP/1.1 431 ")


# ------------------------------------------------------------ bounds on time


SOON = HttpBounds(head_s=0.2, body_s=0.2, idle_s=0.2, linger_s=0.2)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"GET / HTT", 408),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408),
        (b"\r\n\r\n", 408),
        (b"POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\nhalf", 408),
        (b"POST / HTTP/1.1\r\ncontent-length: 10\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhalf", 408),
        (b"GET / HTTP/1.1\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\nGET / HT", 200),
    ],
    ids=[
        "nothing",
        "half a line",
        "half a head",
        "blank",
        "half a body",
        "half an upgrade",
        "idle",
        "half of the next",
    ],
)
def test_a_client_that_stops_sending_loses_its_connection(sent: bytes, status: int | None) -> None:
    answer = _exchange(_echo, sent, bounds=SOON)
    assert answer.startswith(b"HTTP/1.1 %d " % status if status else b"") and bool(answer) == bool(status)
    if sent.endswith(b"GET / HT"):
        assert b"HTTP/1.1 408 " in answer


def test_a_client_that_goes_on_sending_a_refused_body_loses_its_connection() -> None:
    async def refuses(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run() -> None:
        async with _served(refuses, SOON) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n")
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 413 ")
            with suppress(ConnectionError):
                while not (reader.at_eof() or writer.is_closing()):
                    writer.write(b"more")
                    await writer.drain()
                    await asyncio.sleep(0.02)  # a client that drips
            writer.transport.abort()

    uvloop.run(run())


def test_half_a_head_behind_a_slow_answer_waits_for_it() -> None:
    """The connection is not read meanwhile: that it does not come is no fault of the client's."""

    async def run() -> None:
        late = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                await late.wait()
            await _echo(scope, receive, send)

        guard = ConnectionGuard(HttpBounds(head_s=0.1, idle_s=0.1))
        async with _served(app, guard=guard) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            bystander, waiting = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET /slow HTTP/1.1\r\n\r\nGET /next HTTP/1.1\r\n")
            assert await bystander.read() == b""  # it sent nothing: the time for a head is over
            late.set()
            assert (await reader.read(4096)).endswith(b"GET /slow \n")
            writer.write(b"connection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"GET /next \n")
            writer.close()
            waiting.close()

    uvloop.run(run())


# ------------------------------------------------------------ bounds on connections and on requests that wait


def test_no_more_than_so_many_pipelined_requests_wait_and_the_rest_is_refused_after_their_answers() -> None:
    most = HttpBounds().max_pipelined
    sent = b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(7500))
    *answered, last = _bodies(_exchange(_echo, sent))
    assert answered == [b"GET /%d \n" % number for number in range(most + 1)]
    assert json.loads(last)["error"]["code"] == "too_many_pipelined"


def test_connections_over_a_bound_are_refused_by_an_answer_until_others_have_ended() -> None:
    async def run() -> None:
        guard = ConnectionGuard(HttpBounds(max_connections=3, max_connections_per_address=2))
        async with _served(_echo, guard=guard) as sock:
            host, port = sock.getsockname()

            async def connect(local: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                return await asyncio.open_connection(host, port, local_addr=(local, 0))

            async def refused(local: str) -> dict[str, Any]:
                reader, writer = await connect(local)
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in answer
                return _error(answer)

            async def answered(local: str) -> asyncio.StreamWriter:
                reader, writer = await connect(local)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
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


def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection_for_a_length() -> None:
    async def streams(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one ", b"", b"two "):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"three"})

    head, _, body = _exchange(streams, b"GET / HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one two three"
    assert _exchange(_echo, b"GET /known HTTP/1.0\r\n\r\n").endswith(
        b"content-length: 12\r\nconnection: close\r\n\r\nGET /known \n"
    )
