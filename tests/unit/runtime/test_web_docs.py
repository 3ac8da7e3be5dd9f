"""Test that /docs works on a machine without the internet."""

import re

import httpx
from prometheus_client import CollectorRegistry

from libs.runtime.web import make_web_app


async def test_the_documentation_page_loads_nothing_from_elsewhere() -> None:
    app = make_web_app("a", "b", not_ready=lambda: None, metrics=CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        page = (await client.get("/docs")).text
        sources = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert sources
        for source in sources:
            assert source.startswith("./"), "whatever prefix a proxy has before it"
            assert (await client.get(source)).status_code == 200
