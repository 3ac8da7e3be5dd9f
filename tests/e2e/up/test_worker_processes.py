"""Tests of both worker services as processes, with the embedded Redis and broker and the sim engine."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from libs.bus.embedded import broker_command, embedded_broker
from libs.bus.kafka import KafkaBus
from libs.contracts.hashing import block_hashes, chain_root
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Worker
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.topics import STEPS
from libs.runtime.net.ports import held_port
from libs.stores.kvindex import PrefixQuery, RedisKvIndex
from libs.stores.registry import RedisRegistry
from libs.testing.servers.stores import embedded_redis_server, redis_command
from libs.testing.workers.hosts import gateway_probe, submit
from libs.worker.settings import WorkerSettings

pytestmark = pytest.mark.alone

START_S = 30.0
STOP_S = 10.0
PROMPT = [(7 * i) % 256 for i in range(100)]


@dataclass
class Child:
    """A process that reports its progress on stdout."""

    process: asyncio.subprocess.Process
    events: list[dict[str, Any]]

    async def status(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            async for line in self.process.stdout:
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event:
                    return self.events[-1]
        raise AssertionError(f"no {event!r}, exit code {await self.process.wait()}: {self.events}")

    async def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()


@asynccontextmanager
async def child(*command: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    try:
        yield Child(process, [])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def worker_process(role: str, env: dict[str, str]) -> AbstractAsyncContextManager[Child]:
    return child(*module(f"services.{role}"), env={**env, "FULCRUM_WORKER_ID": f"{role}-0"})


@dataclass(frozen=True)
class Remote:
    """The addresses of a worker process."""

    settings: WorkerSettings
    address: str


@asynccontextmanager
async def stores(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Run the embedded Redis and broker, and yield the workers' settings for them."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        await stack.enter_async_context(child(*redis_command(embedded_redis_server(), port=port, folder=folder)))
        broker_port = stack.enter_context(held_port())
        command = broker_command(embedded_broker(), port=broker_port, folder=folder / "kafka")
        await (await stack.enter_async_context(child(*command))).status("ready")
        yield {
            "FULCRUM_REDIS": f"redis://127.0.0.1:{port}/0",
            "FULCRUM_KAFKA": f"127.0.0.1:{broker_port}",
            "FULCRUM_CLUSTER": "test",
            "FULCRUM_TOKEN": "secret",
            "FULCRUM_WORKER_ENGINE": "sim",
            "FULCRUM_WORKER_SIM_SPEEDUP": "50",
            "FULCRUM_WORKER_LEASE_MS": "600",
        }


async def listed(registry: RedisRegistry, ids: list[str]) -> list[Worker]:
    """Return the registry's list once it names exactly `ids`."""
    async with asyncio.timeout(STOP_S):
        async for workers in registry.watch(poll_ms=50):
            if [worker.id for worker in workers] == ids:
                return workers
    raise AssertionError("unreachable")


async def test_two_services_serve_a_request_and_leave_on_sigterm(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(stores(tmp_path))
        registry = RedisRegistry(env["FULCRUM_REDIS"], "test")
        stack.push_async_callback(registry.close)
        index = RedisKvIndex(env["FULCRUM_REDIS"], "test", lookup_timeout_s=1.0)
        stack.push_async_callback(index.close)
        bus = KafkaBus(env["FULCRUM_KAFKA"], "test", client_id="test")
        await bus.start()
        stack.push_async_callback(bus.close)
        prefill = await stack.enter_async_context(worker_process("prefill", env))
        decode = await stack.enter_async_context(worker_process("decode", env))
        addresses = [(await service.status("ready"))["grpc"] for service in (decode, prefill)]
        workers = await listed(registry, ["decode-0", "prefill-0"])
        assert [worker.address for worker in workers] == addresses
        assert all(worker.state == WORKER_STATE_READY and worker.model_revision for worker in workers)

        settings = WorkerSettings.model_validate({"engine": "sim", "cluster": "test"})
        async with (
            gateway_probe(Remote(settings, addresses[0])) as to_decode,
            gateway_probe(Remote(settings, addresses[1])) as to_prefill,
        ):
            await to_prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
            kv = (await to_prefill.event(1, "prefilled")).kv
            rest = submit(1, pb.PHASE_DECODE, [*PROMPT, *to_prefill.tokens[1]], prompt_tokens=len(PROMPT))
            rest.kv.CopyFrom(kv)
            await to_decode.submit(rest)
            assert (await to_decode.event(1, "finished")).output_tokens == 8

        await _reported_on_kafka(bus)
        await _found_in_index(index, workers[1])
        assert [await service.stop() for service in (prefill, decode)] == [0, 0]
        assert await registry.workers() == []


async def _reported_on_kafka(bus: KafkaBus) -> None:
    """Read the steps of both workers and the transfer between them."""
    seen: set[str] = set()
    async with asyncio.timeout(STOP_S):
        async for record in bus.subscribe([STEPS], from_start=True):
            batch: Any = record.value
            seen |= {batch.worker_id} if batch.steps.start_unix_ns else set()
            seen |= {f"from {transfer.from_worker_id}" for transfer in batch.kv_transfers}
            if seen == {"prefill-0", "decode-0", "from prefill-0"}:
                return


async def _found_in_index(index: RedisKvIndex, worker: Worker) -> None:
    root = chain_root(model_revision=worker.model_revision, kv_layout=worker.capabilities.kv_layout)
    hashes = block_hashes(root, PROMPT, worker.capabilities.block_size_tokens)
    assert hashes
    ((found,),) = await index.longest_prefix([PrefixQuery("sim", [hashes], [worker.id])])
    assert found == {worker.id: len(hashes)}


async def test_a_killed_worker_is_gone_when_its_lease_ends_and_returns_under_its_name(tmp_path: Path) -> None:
    async with stores(tmp_path) as env, worker_process("prefill", env) as first:
        registry = RedisRegistry(env["FULCRUM_REDIS"], "test")
        await first.status("ready")
        (before,) = await listed(registry, ["prefill-0"])
        assert await first.stop(signal.SIGKILL) == -signal.SIGKILL
        await listed(registry, [])
        async with worker_process("prefill", env) as second:
            await second.status("ready")
            (after,) = await listed(registry, ["prefill-0"])
            assert after.incarnation > before.incarnation
        await registry.close()


@pytest.fixture
def nobodys_ports() -> Iterator[tuple[int, int]]:
    """Yield ports on which no store listens."""
    with held_port() as one, held_port() as other:
        yield one, other


async def test_a_worker_serves_and_stops_while_redis_and_kafka_are_away(nobodys_ports: tuple[int, int]) -> None:
    redis_port, kafka_port = nobodys_ports
    env = {
        "FULCRUM_REDIS": f"redis://127.0.0.1:{redis_port}/0",
        "FULCRUM_KAFKA": f"127.0.0.1:{kafka_port}",
        "FULCRUM_WORKER_ENGINE": "sim",
        "FULCRUM_WORKER_SIM_SPEEDUP": "50",
    }
    async with child(*module("services.decode"), env={**env, "FULCRUM_WORKER_ROLE": "mixed",
                                                      "FULCRUM_WORKER_BUDGET_TOKENS": "64"}) as service:  # fmt: skip
        address = (await service.status("ready"))["grpc"]
        async with gateway_probe(Remote(WorkerSettings.model_validate({"engine": "sim"}), address)) as gateway:
            await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT))
            await gateway.event(1, "finished")
        assert await service.stop() == 0


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FULCRUM_WORKER_MODEL_PATH", "/nowhere", "model folder /nowhere does not exist"),
        ("FULCRUM_WORKER_ENGINE", "abacus", "FULCRUM_WORKER_ENGINE"),
        ("FULCRUM_WORKER_PORT", "in use", "in use"),
    ],
)
async def test_a_worker_that_cannot_start_prints_the_reason_in_one_line(variable: str, value: str, said: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        env = {"FULCRUM_WORKER_ENGINE": "sim", variable: port if value == "in use" else value}
        async with worker_process("prefill", env) as service:
            assert said in (await service.status("failed"))["error"]
            async with asyncio.timeout(STOP_S):
                assert await service.process.wait() == 2
