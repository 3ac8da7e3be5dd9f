"""Clients that people have, unmodified, against suites: each that agents are written with streams, has a tool called
and a schema filled, on simulated tokens and on a real model's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.testing.suites.suite import RunningSuite
from load.clients.asking import AGENT_CLIENTS, CLIENTS, ask, suite_on

# Beside other work the real model takes minutes for what clients wait a minute for.
pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["sim", pytest.param("torch", marks=pytest.mark.torch)])
def suite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningSuite, str]]:
    with suite_on(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.mark.parametrize("client", [*CLIENTS, *AGENT_CLIENTS])
def test_a_client_gets_what_it_asks_for(suite: tuple[RunningSuite, str], client: str, tmp_path: Path) -> None:
    running, model = suite
    if client in CLIENTS and model != "sim":
        pytest.skip("it asks for text alone, of the sim engine")
    outcome, said = ask(client, running.gateway, model, tmp_path)
    if outcome == "not here" and os.environ.get("CI", "").lower() not in ("1", "true"):
        pytest.skip(said)
    assert outcome == "answered", said
