"""Tests of a container's health check on serving, failing and absent services."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import FastAPI, Response
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from libs.runtime.http import bind
from libs.runtime.net.ports import held_port
from libs.runtime.net.rpc import make_server
from libs.runtime.settings import CommonSettings

pytestmark = pytest.mark.system


async def healthcheck(url: str) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "libs.runtime.healthcheck", url, env=os.environ
    )
    return await process.wait()


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    app = FastAPI()

    @app.get("/{status}")
    def answer(status: int) -> Response:
        return Response(status_code=status)

    with bind("127.0.0.1", 0, "PORT") as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        serving = asyncio.create_task(server.serve([sock]))
        yield sock.getsockname()[1]
        server.should_exit = True
        await serving


async def test_http_must_answer_200(http_port: int) -> None:
    assert await healthcheck(f"http://127.0.0.1:{http_port}/200") == 0
    assert await healthcheck(f"http://127.0.0.1:{http_port}/503") == 1


async def test_grpc_must_report_serving() -> None:
    server, port = make_server(CommonSettings(), "127.0.0.1:0")
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert await healthcheck(f"grpc://127.0.0.1:{port}") == 0
    await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await healthcheck(f"grpc://127.0.0.1:{port}") == 1
    await server.stop(None)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_an_absent_service_is_unhealthy(scheme: str) -> None:
    with held_port() as port:
        assert await healthcheck(f"{scheme}://127.0.0.1:{port}") == 1
