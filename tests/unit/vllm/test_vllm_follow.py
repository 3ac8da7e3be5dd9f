"""Tests of a follower node that only computes: it ends with node 0 and says so."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity
from libs.engine.vllm import core
from libs.runtime.net.ports import held_port
from libs.testing.servers.proxy import vanish

pytestmark = pytest.mark.system

IDENTITY = EngineIdentity("follower", 1, "127.0.0.1:1")


def config(port: int) -> EngineConfig:
    arguments = {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1"}
    return EngineConfig(Path("/nowhere"), "m", vllm_arguments=arguments | {"master_port": port})


class Computing:
    """Stands in for vLLM's processes: it computes until they die, or the test is over."""

    def __init__(self) -> None:
        self.followed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.died = asyncio.Event()
        self._over = asyncio.run_coroutine_threadsafe(self.died.wait(), self._loop)

    def follow(self, _config: EngineConfig, _identity: EngineIdentity) -> None:
        self._loop.call_soon_threadsafe(self.followed.set)
        self._over.result()

    def end(self) -> None:
        self._over.cancel()


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port on which node 0 may start to listen."""
    with held_port() as found:
        yield found


async def test_a_follower_ends_with_node_0_even_if_that_starts_later(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    computing, connected = Computing(), asyncio.Event()
    monkeypatch.setattr(core, "import_launch", lambda: computing)

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await leaving.wait()
        writer.close()

    leaving = asyncio.Event()
    waiting = asyncio.create_task(core.follow(config(port), IDENTITY, asyncio.Event()))
    await computing.followed.wait()
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        await connected.wait()
        assert not waiting.done()
        leaving.set()
        async with asyncio.timeout(5):
            with pytest.raises(StartupError, match="node 0 has ended"):
                await waiting
    computing.end()


async def test_a_follower_ends_on_a_stop_signal(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    computing, stopping = Computing(), asyncio.Event()
    monkeypatch.setattr(core, "import_launch", lambda: computing)
    waiting = asyncio.create_task(core.follow(config(port), IDENTITY, stopping))
    await computing.followed.wait()
    stopping.set()
    async with asyncio.timeout(5):
        await waiting
    computing.end()


async def test_a_follower_fails_once_its_engine_process_has_died(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    computing = Computing()
    monkeypatch.setattr(core, "import_launch", lambda: computing)
    waiting = asyncio.create_task(core.follow(config(port), IDENTITY, asyncio.Event()))
    await computing.followed.wait()
    computing.died.set()
    async with asyncio.timeout(5):
        with pytest.raises(StartupError, match="have ended"):
            await waiting


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux drops what comes")
async def test_a_follower_ends_once_node_0_has_vanished_from_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    computing, connected = Computing(), asyncio.Event()
    monkeypatch.setattr(core, "import_launch", lambda: computing)
    monkeypatch.setattr(core, "VANISHED_S", 1)

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        vanish(writer.get_extra_info("socket"))
        connected.set()
        await over.wait()
        writer.transport.abort()

    over = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        waiting = asyncio.create_task(core.follow(config(port), IDENTITY, asyncio.Event()))
        await connected.wait()
        async with asyncio.timeout(20):
            with pytest.raises(StartupError, match="node 0 has ended"):
                await waiting
        over.set()
    computing.end()
