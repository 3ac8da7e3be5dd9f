"""Tests of services behind an HTTPS proxy with a path prefix: none of their links leaves the prefix."""

import re
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from tests.unit.keys.doors_rig import Served, serving

PUBLIC: Final = "https://public.example/llm/"
HTML: Final = {"accept": "text/html"}
ADDRESSES: Final = re.compile(r"""(?:href|src|action)="([^"#]+)"|url: '([^']+)'""")


class Proxy(httpx.AsyncBaseTransport):
    """A proxy for PUBLIC that calls the service without the prefix, under another host name."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        requested = str(request.url)
        assert requested.startswith(PUBLIC), f"{requested} leads past the proxy"
        inner = httpx.URL("http://127.0.0.1:8002/" + requested.removeprefix(PUBLIC))
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        content = await request.aread()
        return await self._inner.handle_async_request(
            httpx.Request(request.method, inner, headers=headers, content=content)
        )


def browser(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=Proxy(served.app), base_url=PUBLIC, follow_redirects=True)


@pytest.mark.parametrize("path", ["", "index.html", "v1/status", "runbook/FulcrumImbalance", "a/b%2Fc/d?x=y"])
async def test_a_visitor_without_a_session_is_redirected_to_the_login_behind_the_prefix(path: str) -> None:
    async with serving("metrics") as served, browser(served) as http:
        found = await http.get(path, headers=HTML)
        assert (found.status_code, str(found.url)) == (200, PUBLIC + "login")
        assert "http:" not in found.text


async def test_a_session_belongs_to_the_prefix_and_ends_there() -> None:
    async with serving("metrics") as served, browser(served) as http:
        found = await http.post("login", data={"key": served.secrets["operator"]})
        assert (found.status_code, str(found.url)) == (200, PUBLIC)
        assert {cookie.path for cookie in http.cookies.jar} == {"/llm"}
        assert (await http.get("v1/alerts")).status_code == 200
        assert str((await http.post("logout")).url) == PUBLIC + "login"
        assert not list(http.cookies.jar)
        assert (await http.get("v1/alerts")).status_code == 401


@pytest.mark.parametrize("path", ["", "login", "runbook/FulcrumImbalance", "docs", "redoc"])
async def test_everything_that_a_page_links_to_exists_behind_the_prefix(path: str) -> None:
    async with serving("metrics") as served, browser(served) as http:
        http.headers["authorization"] = f"Bearer {served.secrets['operator']}"
        page = await http.get(path)
        named = {one or other for one, other in ADDRESSES.findall(page.text)}
        assert named
        for each in named:
            address = urljoin(str(page.url), each)
            assert (await http.get(address)).status_code in (200, 405), address


async def test_the_page_requests_nothing_at_the_hosts_root() -> None:
    async with serving("metrics") as served, browser(served) as http:
        http.headers["authorization"] = f"Bearer {served.secrets['operator']}"
        left, seen = ["js/main.js"], set[str]()
        while left:
            script = left.pop()
            text = (await http.get(script)).text
            seen.add(script)
            assert not re.search(r"""["'`](?:/|https?:/)[a-z]""", text), script
            imports = re.findall(r"""from "(\.[^"]+)"|import "(\.[^"]+)""", text)
            found = {urlsplit(urljoin(PUBLIC + script, one or other)).path for one, other in imports}
            left += [each for path in found if (each := path.removeprefix("/llm/")) not in seen]
        assert len(seen) > 30


@pytest.mark.parametrize("service", ["metrics", "planner"])
async def test_the_description_of_the_api_names_its_own_folder(service: str) -> None:
    async with serving(service) as served, browser(served) as http:
        (server,) = (await http.get("openapi.json")).json()["servers"]
        assert urljoin(PUBLIC + "openapi.json", server["url"]) == PUBLIC


@pytest.mark.parametrize("path", ["healthz/", "docs/?a=b", "static-offline-docs", "v1/workers/", "v1/decisions/"])
async def test_a_superfluous_or_missing_slash_leads_to_the_same_page(path: str) -> None:
    async with serving("planner") as served, browser(served) as http:
        http.headers["authorization"] = f"Bearer {served.secrets['operator']}"
        found = await http.get(path)
        assert found.history[0].status_code == 307
        assert not urlsplit(found.history[0].headers["location"]).netloc
        there, query = path.partition("?")[::2]
        expected = there.strip("/") if there.endswith("/") else there + "/"
        assert str(found.url) == PUBLIC + expected + (f"?{query}" if query else "")


async def test_a_path_that_looks_like_a_host_does_not_redirect_to_one() -> None:
    async with serving("planner") as served:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport) as http:
            http.headers["authorization"] = f"Bearer {served.secrets['operator']}"
            found = await http.get("http://127.0.0.1//evil.example/%2e%2e/healthz/")
            assert "location" not in found.headers or found.headers["location"].startswith("../")


@pytest.mark.parametrize(("scheme", "secure"), [("https", True), ("http", False)])
async def test_a_session_cookie_is_secure_if_the_client_came_by_https(scheme: str, secure: bool) -> None:
    async with serving("metrics") as served:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://127.0.0.1") as http:
            await http.post("/login", data={"key": served.secrets["operator"]})
            assert {cookie.secure for cookie in http.cookies.jar} == {secure}
