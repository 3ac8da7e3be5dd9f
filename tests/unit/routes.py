"""The routes of an app, for tests that check every one of them."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Mount


def routes(within: Sequence[BaseRoute]) -> set[tuple[str, str]]:
    """Return method and path of each, included routers' too; MOUNT for mounted apps."""
    found: set[tuple[str, str]] = set()
    for route in within:
        included = getattr(route, "original_router", None)
        if included is not None:  # FastAPI's, of a router
            found |= routes(included.routes)
            continue
        methods = {"MOUNT"} if isinstance(route, Mount) else getattr(route, "methods", None) or {"?"}
        found |= {(method, getattr(route, "path", "?")) for method in methods - {"HEAD"}}
    return found


class Head(NamedTuple):
    """The parts of an app's answer before its body, and the length of the body it sent."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def request_head(app: Any, method: str, path: str, headers: dict[str, str]) -> Head:
    """Call an ASGI app, and for GET read only the first part of the answer, as some never end."""
    found: list[Any] = []
    first = asyncio.Event()
    path, _, query = path.partition("?")

    async def receive() -> Any:
        if found and found[-1] == "request":
            await asyncio.Event().wait()
        found.append("request")
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        found.append(message)
        if message["type"] == "http.response.body":
            first.set()

    raw = [(b"host", b"127.0.0.1"), *((name.encode(), value.encode()) for name, value in headers.items())]
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": raw, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    task = asyncio.create_task(app(scope, receive, send))
    waiting = [task] if method == "HEAD" else [task, asyncio.create_task(first.wait())]
    async with asyncio.timeout(10):
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    messages = [each for each in found if each != "request"]
    body = b"".join(each.get("body", b"") for each in messages[1:])
    return Head(messages[0]["status"], dict(messages[0]["headers"]), body)


async def head_differs(app: Any, path: str, headers: dict[str, str]) -> str:
    """Return the differences between HEAD and GET; empty if there are none. Live figures may differ in length."""
    by_get, by_head = await request_head(app, "GET", path, headers), await request_head(app, "HEAD", path, headers)
    if by_head.body:
        return "a body"
    if by_head.status != by_get.status:
        return f"{by_head.status} in place of {by_get.status}"
    if by_head.headers.keys() != by_get.headers.keys():
        return f"headers {by_head.headers} in place of {by_get.headers}"
    same = (b"content-type", b"location", b"cache-control", b"allow")
    return str([name for name in same if by_head.headers.get(name) != by_get.headers.get(name)] or "")
