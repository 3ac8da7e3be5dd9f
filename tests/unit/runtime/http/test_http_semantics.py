"""Tests of a service's own addresses, of HEAD, and of what is believed of a proxy."""

import asyncio
from typing import Any
from urllib.parse import urljoin

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.responses import StreamingResponse

from libs.runtime.http import ConnectionGuard
from libs.runtime.http.semantics import HttpSemantics, relative
from libs.runtime.http.settings import HttpSettings
from tests.unit.routes import request_head
from tests.unit.runtime.http.http_rig import echo, served

segments = st.lists(st.sampled_from(["a", "b-c", "x:y", "%2F", "v1", "é"]), min_size=1, max_size=4)


@given(requested=segments, target=segments, slash=st.booleans(), prefix=st.sampled_from(["", "/llm", "/a/b"]))
def test_a_reference_leads_to_its_target_under_any_prefix_and_scheme(
    requested: list[str], target: list[str], slash: bool, prefix: str
) -> None:
    path, wanted = "/" + "/".join(requested) + "/" * slash, "/" + "/".join(target)
    for origin in ("", "http://127.0.0.1:8000"):
        found = relative({"raw_path": path.encode(), "path": path, "headers": []}, f"{origin}{wanted}?q=1")
        assert urljoin(f"https://public{prefix}{path}", found) == f"https://public{prefix}{wanted}?q=1"


async def test_head_ends_an_answer_before_its_body_is_made() -> None:
    made = []

    async def parts() -> Any:
        while True:
            made.append(1)
            yield b"part"
            await asyncio.sleep(0)

    found = await request_head(HttpSemantics(StreamingResponse(parts(), headers={"x": "y"})), "HEAD", "/", {})
    assert (found.status, found.headers[b"x"], found.body, made) == (200, b"y", b"", [])


async def test_an_app_that_fails_under_head_fails_as_under_get() -> None:
    async def fails(_scope: Any, _receive: Any, _send: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await HttpSemantics(fails)({"type": "http", "method": "HEAD", "path": "/"}, Any, Any)  # type: ignore[arg-type]


@pytest.mark.system
@pytest.mark.parametrize(
    ("proxies", "scheme"), [("", "http"), ("10.0.0.0/8, ::1", "http"), ("127.0.0.0/8", "https"), ("127.0.0.1", "https")]
)
def test_the_scheme_is_taken_from_a_trusted_proxy(proxies: str, scheme: str) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["scheme"])
        await echo(scope, receive, send)

    async def run(guard: ConnectionGuard) -> None:
        async with served(app, guard=guard) as sock:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-forwarded-proto: https\r\nconnection: close\r\n\r\n")
            await reader.read()
            writer.close()

    uvloop.run(run(HttpSettings.model_validate({"http_trusted_proxies": proxies}).http_guard()))
    assert seen == [scheme]


@pytest.mark.parametrize("wrong", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.0/33", "127.0.0.1:80"])
def test_proxies_are_given_as_addresses_and_networks(wrong: str) -> None:
    with pytest.raises(ValidationError):
        HttpSettings.model_validate({"http_trusted_proxies": wrong})


def test_an_ipv4_address_is_recognised_on_an_ipv6_socket() -> None:
    guard = HttpSettings.model_validate({"http_trusted_proxies": "10.0.0.0/8"}).http_guard()
    assert guard.proxies == ("10.0.0.0/8", "::ffff:10.0.0.0/104")
