"""Tests of a Redis Cluster node: why it cannot work, and the error with which every service refuses it."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.launch.options import SuiteOptions
from libs.launch.preflight import check
from libs.runtime.net.ports import held_port
from libs.runtime.redis import make_redis, refuse_cluster
from libs.stores.registry import RedisRegistry, RegistryDown
from libs.testing.servers.server import Server
from libs.testing.servers.stores import (
    RedisServer,
    RedisUnavailable,
    answers_ping,
    folder_of_store,
    redis_command,
    running,
)
from tests.programs import skip_or_fail_in_ci

pytestmark = pytest.mark.redis

SLOTS_S = 20.0


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A node that holds all slots; more calls fail on a cluster of several."""
    binary = shutil.which("redis-server")
    if binary is None:
        skip_or_fail_in_ci(RedisUnavailable("a Redis Cluster needs redis-server on the PATH"))
        return
    with held_port() as port, folder_of_store() as folder:
        command = [*redis_command(Path(binary), port=port, folder=folder), "--cluster-enabled", "yes"]
        server = Server("Redis node", command, log=folder / "log", ready=lambda _: answers_ping(port))
        with running(server):
            url = f"redis://127.0.0.1:{port}/0"
            asyncio.run(take_all_slots(url))
            yield url


async def take_all_slots(url: str) -> None:
    redis: Any = make_redis(url, timeout_ms=1000)
    for slots in range(0, 16_384, 4_096):
        await redis.execute_command("CLUSTER", "ADDSLOTS", *range(slots, slots + 4_096))
    async with asyncio.timeout(SLOTS_S):
        while b"cluster_state:ok" not in await redis.execute_command("CLUSTER", "INFO", NEVER_DECODE=True):
            await asyncio.sleep(0.05)
    await redis.aclose()


async def test_a_worker_cannot_register_in_a_redis_cluster(node: str) -> None:
    registry = RedisRegistry(node, "test")
    with pytest.raises(RegistryDown, match="slot"):
        await registry.announce(Worker(id="w", address="host:1"), lease_ms=1000)
    await registry.close()


async def test_every_service_refuses_a_redis_cluster_and_names_what_works(node: str) -> None:
    secret = node.replace("redis://", "redis://default:hush@")
    for url in (node, secret):
        with pytest.raises(StartupError) as caught:
            await refuse_cluster(url)
            await refuse_cluster(node)  # without a password that the node accepts, its mode is unknown
        assert "is a Redis Cluster" in caught.value.message and "redis+sentinel://" in caught.value.message
        assert "hush" not in caught.value.message
    with pytest.raises(StartupError, match="is a Redis Cluster"):
        await check(SuiteOptions(redis=node, gateway_port=0), "127.0.0.1")


async def test_a_plain_redis_and_one_that_is_away_are_not_refused(redis: RedisServer) -> None:
    await refuse_cluster(redis.url)
    await refuse_cluster("redis://127.0.0.1:1/0")
