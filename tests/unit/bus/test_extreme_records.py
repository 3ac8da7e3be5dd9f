"""Well-formed records with one field at an end of its type: services live, and others are served beside them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from google.protobuf.message import Message

from libs.bus.codec import SCHEMA_HEADER, encode
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandCount
from libs.contracts.topics import (
    ALL,
    AUDIT,
    DECISIONS,
    DEMAND,
    QUEUES,
    REQUESTS,
    SILENCES,
    STEPS,
    WINDOWS,
    Topic,
)
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.testing.memory.broker import Incoming, MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.messages import extremes, plain
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus
from libs.runtime.transport import SystemTransport
from services.metrics.demand.file import DemandFile
from services.metrics.history.file import HistoryFile
from services.metrics.run import MetricsPorts, open_metrics
from services.metrics.settings import MetricsSettings
from libs.telemetry.windows.rollups import TIERS

CLUSTER: Final = "extreme"
MOST_CPU_S: Final = 60.0
"""Of all records of a topic, on any machine: one share took 19 s of a gateway, and one silence must not."""
METRICS_READS: Final = (STEPS, QUEUES, REQUESTS, DECISIONS, DEMAND, WINDOWS, SILENCES, AUDIT)


def known(now_ns: int) -> dict[str, Any]:
    """What makes a plain message one that a consumer takes."""
    moments = ("covered_to_unix_ns", "arrival_unix_ns", "told_unix_ns", "decided_unix_ns", "made_unix_ns",
               "changed_unix_ns", "at_unix_ns", "started_unix_ns", "end_unix_ns")  # fmt: skip
    return {
        **dict.fromkeys(moments, now_ns),
        "start_unix_ns": now_ns // 10**8 * 10**8,
        "covered_from_unix_ns": now_ns - 10**8,
        "until_unix_ns": now_ns + 3_600 * 10**9,
        "incarnation": now_ns,
        "output_tokens": 3,
        "fulcrum.telemetry.v1.StepColumns.start_unix_ns": (now_ns - 10**7).to_bytes(8, "little"),
        "fulcrum.telemetry.v1.StepColumns.end_unix_ns": now_ns.to_bytes(8, "little"),
    }


def records(topic: Topic, now_ns: int) -> Iterator[tuple[str, bytes]]:
    """Each extreme of a topic on the wire."""
    for name, message in extremes(plain(topic.value, known(now_ns))):
        yield name, message.SerializeToString()


class Broker(MemoryBroker):
    """Takes records of strangers."""

    def put(self, topic: Topic, value: bytes) -> None:
        schema = ((SCHEMA_HEADER, topic.value.DESCRIPTOR.full_name.encode()),)
        self.append(Incoming(topic.name(CLUSTER), b"k", value, schema, time.time_ns()))


class CapturingTransport(SystemTransport):
    """Keeps the app that would be served."""

    app: Any = None

    @asynccontextmanager
    async def http(self, app: Any, _sock: Any, **_: Any) -> AsyncIterator[str]:  # type: ignore[override]
        self.app = app
        yield "http://127.0.0.1"


@asynccontextmanager
async def metrics(folder: Path, broker: Broker) -> AsyncIterator[tuple[httpx.AsyncClient, TaskOwner, MemoryBus]]:
    """A metrics service that keeps history, one of two that share the work."""
    settings = MetricsSettings.model_validate({"cluster": CLUSTER, "shared": True})
    tasks, transport = TaskOwner(), CapturingTransport(settings)
    bus = MemoryBus(broker, CLUSTER)
    ports = MetricsPorts(
        bus,
        HistoryFile(folder / "history", CLUSTER, TIERS[1:]),
        DemandFile(str(folder / "demand"), CLUSTER),
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        opening: Any = open_metrics(
            settings=settings, ports=ports, sock=None, clock=SystemClock(), tasks=tasks, transport=transport  # type: ignore[arg-type]
        )
        await stack.enter_async_context(opening)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(transport.app), base_url="http://127.0.0.1")
        yield await stack.enter_async_context(http), tasks, bus


def of_others(now_ns: int, number: int) -> list[tuple[Topic, Message]]:
    """What an honest gateway publishes of another tenant."""
    count = DemandCount(model="honest", service_class="online", tenant="b", requests=number, known_requests=number)
    return [
        (REQUESTS, REQUESTS.value(request_id=f"r{number}", model="honest", arrival_unix_ns=now_ns, outcome=1)),
        (DEMAND, DEMAND.value(gateway_id="honest", incarnation=1, told_unix_ns=now_ns, counts=[count])),
    ]


@pytest.mark.parametrize("topic", METRICS_READS, ids=lambda topic: topic.stem)
async def test_metrics_lives_with_any_well_formed_record_and_counts_others(topic: Topic, tmp_path: Path) -> None:
    broker = Broker()
    async with metrics(tmp_path, broker) as (http, tasks, bus):
        await until(lambda: broker.partitions(topic.name(CLUSTER)), what="topics")
        await asyncio.sleep(0)
        put, began_s = 0, time.thread_time()
        for name, value in records(topic, time.time_ns()):
            broker.put(topic, value)
            put += 1
            assert tasks.error is None, name
        honest = RecordingBus()
        for each, message in of_others(time.time_ns(), 7):
            broker.put(each, message.SerializeToString())
        text = ""
        while 'fulcrum_requests_total{model="honest",outcome="ok"} 1.0' not in text:
            await asyncio.sleep(0.05)
            assert tasks.error is None
            text = (await http.get("/metrics")).text
        for path in ("/v1/status", "/v1/occupancy", "/v1/demand", "/v1/events", "/v1/alerts", "/v1/audit?limit=1000"):
            answer = await http.get(path)
            assert answer.status_code == 200, (path, answer.text)
        assert tasks.error is None
        assert time.thread_time() - began_s < MOST_CPU_S
        print(topic.stem, put, time.thread_time() - began_s, dict(bus.stats().skipped))
