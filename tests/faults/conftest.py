"""Fixtures of a gateway in this process over scripted or real workers; only the stores are fakes."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import pytest

from libs.bus.kafka import KafkaBus
from libs.bus.kafka_work import KafkaWork
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.tasks import TaskOwner
from libs.stores.kvindex import KvIndex, PrefixQuery
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.servers.stores import KafkaServer
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus, RecordingKvIndex
from services.gateway.batch.run import BatchPorts
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, RunningGateway, open_gateway
from services.gateway.settings import GatewaySettings

KV_LEASE_MS = 10_000
"""Bound on the time until blocks held for a receiver are free after its gateway has left."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """A whole suite of processes on the sim engine, with a spare of everything that clients depend on. It is slow
    enough to be observed at every stage: a prompt of 1,500 tokens takes 0.2 s, and about as long to pull.
    """
    shape = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--gateways", "2")
    slow = {"FULCRUM_WORKER_SIM_SPEEDUP": "0.25", "FULCRUM_WORKER_SIM_LINK_GBPS": "40"}
    env = {"FULCRUM_KAFKA_BUFFER_RECORDS": "20", "FULCRUM_WORKER_KV_LEASE_MS": str(KV_LEASE_MS), **slow}
    with running_suite(tmp_path_factory.mktemp("suite"), *shape, env=env) as found:
        yield found


class HintingKvIndex(RecordingKvIndex):
    """A KV index in which a worker holds that many leading blocks of every prompt."""

    def __init__(self, held: Mapping[str, int]) -> None:
        super().__init__()
        self.held = held
        self.look_ups = 0

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        self.look_ups += 1
        return [
            [{worker: self.held[worker] for worker in query.worker_ids if worker in self.held} for _ in query.prompts]
            for query in queries
        ]


@dataclass
class LocalGateway:
    """A gateway under test, with what tests send and inspect."""

    running: RunningGateway
    registry: ListedRegistry
    bus: RecordingBus
    index: HintingKvIndex
    tasks: TaskOwner
    http: httpx.AsyncClient
    standing: int
    """Tasks that run from start to end, links to workers apart."""

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def live(self) -> int:
        """Return the choices that have not ended."""
        return self.running.dispatcher.live

    @property
    def waiting(self) -> int:
        """Return the choices in the queue."""
        return self.running.dispatcher.waiting

    @property
    def open(self) -> int:
        """Return the requests that are being read or answered."""
        return len(self.running.stalls)

    @property
    def connected(self) -> set[str]:
        """Return the ids of workers whose stream is open."""
        return {link.id for link in self.running.fleet.links if link.connected}

    def events(self) -> list[RequestEvent]:
        """Return the request events so far."""
        return [value for value in self.bus.published if isinstance(value, RequestEvent)]

    async def complete(self, tokens: int, **fields: Any) -> httpx.Response:
        """Send one text completion of that many tokens."""
        body = {"model": "sim", "prompt": "hello", "max_tokens": tokens, **fields}
        return await self.http.post("/v1/completions", json=body)

    def idle(self) -> bool:
        """Return whether nothing is left of any request: no choice, no leg, no reserved credit and no task."""
        links = list(self.running.fleet.links)
        reserved = sum(link.prefill.reserved + link.decode.reserved for link in links)  # counted twice if held twice
        left = self.live + self.waiting + sum(len(link.running) + link.decode.reserved for link in links) + reserved
        return left == 0 and len(self.tasks) == self.standing + len(links)


class OpenGateway(Protocol):
    """Factory of such a gateway."""

    def __call__(self, *workers: Worker, held: Mapping[str, int] = ..., **settings: Any) -> Any:
        """An async context manager that yields a LocalGateway connected to `workers`; `held`: blocks by worker."""
        ...


@asynccontextmanager
async def _open(
    workers: Iterable[Worker],
    settings: dict[str, Any],
    held: Mapping[str, int],
    kv_index: KvIndex | None,
    batch: BatchPorts | None,
) -> AsyncIterator[LocalGateway]:
    values = GatewaySettings.model_validate({"port": 0, "drain_s": 1, **settings})
    registry, bus, tasks = ListedRegistry(workers), RecordingBus(), TaskOwner()
    sock = bind(values.host, 0, "FULCRUM_GATEWAY_PORT", stall_s=values.client_stall_s)
    catalog = load_catalog(values.models)
    index = HintingKvIndex(held)
    ports = GatewayPorts(bus, registry, kv_index or index, batch)
    try:
        async with (
            open_gateway(
                settings=values, ports=ports, catalog=catalog, sock=sock, clock=SystemClock(), tasks=tasks
            ) as running,
            httpx.AsyncClient(base_url=running.url, timeout=20, verify=False) as http,
        ):
            standing = len(tasks) - len(running.fleet.links)
            gateway = LocalGateway(running, registry, bus, index, tasks, http, standing)
            wanted = {worker.id for worker in workers}
            await until(lambda: gateway.connected >= wanted, what=f"links to {wanted}")
            yield gateway
    finally:
        await tasks.close()
    if tasks.error is not None:
        raise tasks.error


@pytest.fixture
def open_gateway_over() -> OpenGateway:
    """`async with open_gateway_over(worker, ..., max_waiting=2) as gateway`."""
    return lambda *workers, held=(), kv_index=None, batch=None, **settings: _open(
        list(workers), settings, dict(held), kv_index, batch
    )


@pytest.fixture
async def work(embedded_kafka_server: KafkaServer, cluster: str) -> KafkaWork:
    """A gateway's, over the embedded broker, with the topics that its bus makes."""
    bus = KafkaBus(embedded_kafka_server.servers, cluster, "maker")
    await bus.start()
    await bus.close()
    return KafkaWork(embedded_kafka_server.servers, cluster, "gateway")
