"""Tests of requests from other origins: which may read answers, and that a preflight needs no key."""

import httpx
import pytest
from pydantic import ValidationError
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from services.gateway.routes import cross_origin
from services.gateway.settings import GatewaySettings

PAGE = "https://chat.example.com"


async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that requires a key."""
    has_key = b"authorization" in dict(scope["headers"])
    await PlainTextResponse("hello", 200 if has_key else 401)(scope, receive, send)


def client(origins: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(cross_origin(keyed, origins))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


@pytest.mark.parametrize("origins", [PAGE, f"https://other.example.com , {PAGE}", "*"])
async def test_an_allowed_origin_sends_a_preflight_and_reads_the_answer(origins: str) -> None:
    async with client(origins) as http:
        asking = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        preflight = await http.options("/v1/chat/completions", headers=asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in preflight.headers, "cookies are never taken"
        refused = await http.post("/v1/chat/completions", headers={"origin": PAGE})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] in (PAGE, "*")
        answered = await http.post("/v1/chat/completions", headers={"origin": PAGE, "authorization": "Bearer k"})
        assert answered.status_code == 200 and "x-request-id" in answered.headers["access-control-expose-headers"]


async def test_other_origins_read_nothing() -> None:
    async with client(PAGE) as http:
        headers = {"origin": "https://evil.example.com", "access-control-request-method": "POST"}
        assert (await http.options("/v1/models", headers=headers)).status_code == 400
        answered = await http.post("/v1/models", headers={**headers, "authorization": "Bearer k"})
        assert "access-control-allow-origin" not in answered.headers


@pytest.mark.parametrize(
    "origins", ["chat.example.com", "https://chat.example.com/path", "https://*.example.com", "a b"]
)
def test_an_invalid_origin_is_refused_at_the_start(origins: str) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings.model_validate({"cors_origins": origins})
