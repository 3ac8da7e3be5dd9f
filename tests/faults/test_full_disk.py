"""Test of a full disk under Redis's append-only file: reads continue, writes fail as an outage, both recover."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.runtime.net.ports import held_port
from libs.stores.kvindex import PrefixQuery, RedisKvIndex
from libs.stores.registry import RedisRegistry, RegistryDown
from libs.testing.servers.server import Server
from libs.testing.servers.stores import answers_ping, redis_command, running

pytestmark = [pytest.mark.redis, pytest.mark.alone]

DISK_MIB = 4
WAIT_S = 30.0
LEASE_MS = 120_000
BLOCKS = [bytes([number]) * 16 for number in range(10)]
MORE_BLOCKS = [bytes([number]) * 16 for number in range(10, 20)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of `DISK_MIB`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounting = ("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder))
    done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


async def until_writes_are(redis: Redis, *, accepted: bool) -> None:
    """Write every 50 ms until that is accepted, or refused. Redis notices a full disk at its next write to the file."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await redis.set("probe", bytes(512))
                outcome = True
            except RedisError:
                outcome = False
            if outcome is accepted:
                return
            await asyncio.sleep(0.05)


async def held(index: RedisKvIndex, blocks: list[bytes]) -> int:
    ((found,),) = await index.longest_prefix([PrefixQuery("m", [blocks], ["a"])])
    return found.get("a", 0)


async def test_lookups_continue_and_writes_recover_once_there_is_room_again(small_disk: Path, tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("a full disk needs redis-server on the PATH")
    with held_port() as port:
        command = [*redis_command(Path(binary), port=port, folder=small_disk), "--appendonly", "yes"]
        server = Server("Redis", command, log=tmp_path / "log", ready=lambda _: answers_ping(port))
        url = f"redis://127.0.0.1:{port}/0"
        with running(server):
            redis: Redis = Redis.from_url(url)
            index, registry = RedisKvIndex(url, "c", lookup_timeout_s=5), RedisRegistry(url, "c")
            worker = Worker(id="a", incarnation=1, address="127.0.0.1:1")
            try:
                await registry.announce(worker, lease_ms=LEASE_MS)
                await index.renew("m", "a", lease_ms=LEASE_MS)
                await index.publish("m", "a", stored=BLOCKS, removed=())
                fill(small_disk / "filler")
                await until_writes_are(redis, accepted=False)
                assert await held(index, BLOCKS) == len(BLOCKS)
                assert [each.id for each in await registry.workers()] == ["a"]
                await index.publish("m", "a", stored=MORE_BLOCKS, removed=())
                assert index.stats().change_errors == 1
                assert await held(index, MORE_BLOCKS) == 0
                with pytest.raises(RegistryDown):
                    await registry.announce(worker, lease_ms=LEASE_MS)

                (small_disk / "filler").unlink()
                await until_writes_are(redis, accepted=True)
                await registry.announce(worker, lease_ms=LEASE_MS)
                await index.renew("m", "a", lease_ms=LEASE_MS)
                assert await held(index, MORE_BLOCKS) == len(MORE_BLOCKS)
            finally:
                await index.close()
                await registry.close()
                await redis.aclose()
