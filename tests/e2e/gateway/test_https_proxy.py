"""Tests of HTTPS by Caddy before a whole suite, as in docs/security-network.md, with OpenAI's own client."""

import os
import re
import shutil
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest

from libs.runtime.net.authority import issue
from libs.runtime.net.ports import held_port
from libs.runtime.paths import cache_dir
from libs.testing.servers.server import Server
from libs.testing.servers.stores import listens, running
from libs.testing.suites.suite import RunningSuite, running_suite

CADDY = shutil.which("caddy", path=f"{os.environ['PATH']}:{cache_dir() / 'tools'}")

pytestmark = [
    pytest.mark.suite,
    pytest.mark.skipif(CADDY is None, reason="needs Caddy: run `make test-https`"),
]

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("https")


@pytest.fixture(scope="module")
def suite(folder: Path) -> Iterator[RunningSuite]:
    with running_suite(folder, "--engine", "sim", env={"FULCRUM_CACHE": str(folder / "cache")}) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(folder: Path, suite: RunningSuite) -> Iterator[str]:
    assert CADDY is not None
    tls = folder / "tls"
    issue(tls, "local", now=datetime.now(UTC), names=("localhost",), roles=("gateway",), days=1)
    with held_port() as port:
        lines = f"""
            {{
                admin off
                auto_https off
                storage file_system {folder}/caddy
            }}
            https://localhost:{port} {{
                tls {tls}/gateway.pem {tls}/gateway.pem
                reverse_proxy {suite.gateway.removeprefix("http://")} {{
                    flush_interval -1
                }}
            }}
        """
        config = folder / "Caddyfile"
        config.write_text(lines)
        command = (CADDY, "run", "--adapter", "caddyfile", "--config", str(config))
        with running(Server("Caddy", command, log=folder / "caddy.log", ready=lambda _: listens(port))):
            yield f"https://localhost:{port}"


@pytest.fixture(scope="module")
def client(folder: Path, proxy: str) -> Iterator[openai.OpenAI]:
    trusted = ssl.create_default_context(cafile=folder / "tls" / "ca.pem")
    with (
        httpx.Client(verify=trusted, trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0, http_client=http) as found,
    ):
        yield found


def test_a_request_over_https_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=12)
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_a_stream_is_passed_on_token_by_token(client: openai.OpenAI, suite: RunningSuite) -> None:
    stream = client.chat.completions.create(
        model="sim", messages=MESSAGES, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        assert next(iter(stream)).choices
        # A buffering proxy would pass the first token on only at the end of the answer, most of a minute later.
        answer = httpx.get(f"{suite.gateway}/metrics", trust_env=False).text
        assert re.search(r"^fulcrum_gateway_live [1-9]", answer, re.M), answer


def test_a_client_that_does_not_trust_the_authority_gets_nothing(proxy: str) -> None:
    with httpx.Client(trust_env=False) as http, pytest.raises(httpx.ConnectError):
        http.get(f"{proxy}/v1/models")
