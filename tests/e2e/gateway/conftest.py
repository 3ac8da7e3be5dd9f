"""Fixtures of a gateway with one simulated worker, and its clients."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.tasks import TaskOwner
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus, RecordingKvIndex
from libs.testing.workers.scripted import ScriptedWorker, scripted_worker
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, open_gateway
from services.gateway.settings import GatewaySettings


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker("m0", "mixed") as found:
        yield found


@pytest.fixture
async def url(worker: ScriptedWorker, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    settings = GatewaySettings.model_validate({"port": 0, "drain_s": 1})
    ports = GatewayPorts(RecordingBus(), ListedRegistry([worker.worker]), RecordingKvIndex())
    sock, tasks = bind(settings.host, 0, "FULCRUM_GATEWAY_PORT"), TaskOwner()
    catalog = getattr(request, "param", load_catalog)(settings.models)
    async with open_gateway(
        settings=settings, ports=ports, catalog=catalog, sock=sock, clock=SystemClock(), tasks=tasks
    ) as running:
        await until(running.fleet.views, what="the worker")
        yield running.url
    await tasks.close()


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found
