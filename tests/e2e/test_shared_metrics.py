"""Test of two metrics services that share the telemetry of a cluster, beside one that reads all of it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_from_name
from libs.contracts.step_row import StepRow, step_columns
from libs.contracts.topics import STEPS
from libs.runtime.tasks import TaskOwner
from libs.testing.servers.stores import KafkaServer
from libs.testing.suites.control import SEEN_S, Control, control
from libs.testing.wait import until

pytestmark = pytest.mark.alone

WORKERS = 12
PERIOD_MS = 100
MS = 1_000_000
BACK_WITHIN_S = 15.0
"""Silent for 1.5 s, looked at every second, then telemetry is read again: 3 to 4 s, more where others compute."""
COUNTED_MS = 2_000
BATCHES = 'fulcrum_telemetry_batches_total{result="counted"}'


def batch(number: int, sequence: int, end_ms: int) -> StepBatch:
    """100 ms of a worker: one step of its own length, and a longer one every third time."""
    prefill = number % 3 == 0
    busy_ms = 10 + 5 * number + 20 * (sequence % 3 == 0)
    role, _ = role_from_name("prefill" if prefill else "decode")
    return StepBatch(
        worker_id=f"worker-{number:02}", incarnation=1, sequence=sequence, node=f"node-{number // 4}", engine="sim",
        gpus=1 + number % 2, assignment=Assignment(model="sim", role=role, epoch=1),
        covered_from_unix_ns=(end_ms - PERIOD_MS) * MS, covered_to_unix_ns=end_ms * MS, load=Load(running=number),
        steps=step_columns([
            StepRow(
                (end_ms - PERIOD_MS) * MS, (end_ms - PERIOD_MS + busy_ms) * MS,
                prefill_tokens=64 * prefill, prefill_sequences=int(prefill), decode_sequences=0 if prefill else 4,
            )
        ]),
    )  # fmt: skip


async def tell(bus: KafkaBus) -> None:
    """Send the telemetry of all workers, each at its own offset, until cancelled."""
    began_ms = time.time_ns() // MS
    for sequence in range(1, 1_000_000):
        for number in range(WORKERS):
            end_ms = began_ms + sequence * PERIOD_MS + number * PERIOD_MS // WORKERS
            await asyncio.sleep(max(end_ms - time.time_ns() / MS, 0) / 1e3)
            bus.publish(STEPS, batch(number, sequence, end_ms))


REDIS = "redis://127.0.0.1:1/0"


def sharing(kafka: KafkaServer, cluster: str, name: str) -> AbstractAsyncContextManager[Control]:
    env = {"FULCRUM_METRICS_SHARED": "true", "FULCRUM_METRICS_ID": name}
    return control("metrics", kafka.servers, REDIS, cluster, **env)


@asynccontextmanager
async def services(kafka: KafkaServer, cluster: str) -> AsyncIterator[tuple[Control, Control, Control]]:
    """One service that reads everything, and two that share."""
    tasks, bus = TaskOwner(), KafkaBus(kafka.servers, cluster, "workers")
    await bus.start()
    tasks.spawn("telemetry", tell(bus))
    try:
        async with (
            control("metrics", kafka.servers, REDIS, cluster) as alone,
            sharing(kafka, cluster, "metrics-a") as first,
            sharing(kafka, cluster, "metrics-b") as second,
        ):
            yield alone, first, second
    finally:
        await tasks.close()
        await bus.close()


async def batches(service: Control) -> float:
    """Return the number of batches that it has read and counted so far."""
    lines = (await service.http.get("/metrics")).text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(BATCHES)), 0.0)


async def until_shared(alone: Control, sharing: tuple[Control, ...]) -> None:
    """Wait until each of them reads a part, has read the existing records, and knows the others."""
    read: list[float] = []
    try:
        async with asyncio.timeout(SEEN_S):
            while not read or min(read[1:]) == 0 or sum(read[1:]) > 1.5 * read[0]:
                began_ms = now_ms()
                before = [await batches(service) for service in (alone, *sharing)]
                await until(lambda began_ms=began_ms: now_ms() > began_ms + COUNTED_MS)
                read = [await batches(s) - start for s, start in zip((alone, *sharing), before, strict=True)]
    except TimeoutError:
        raise AssertionError(f"batches read by one alone and by each that shares: {read}") from None


async def figures(service: Control, end_ms: int, span: str, scope: str) -> dict[str, Any]:
    """Return its data of the 100 ms windows of a span."""
    query = {"window": "100ms", "span": span, "scope": scope, "end_unix_ms": str(end_ms)}
    answer: dict[str, Any] = (await service.http.get("/v1/occupancy/history", params=query)).json()
    return {name: answer[name] for name in ("starts_unix_ms", "gpus", "coverage", "gpu_ns", "roles")}


async def all_equal(services: tuple[Control, ...], end_ms: int, span: str) -> None:
    """Check that all services report the same whole nanoseconds of a span, for the cluster and for parts of it."""
    for scope in ("cluster", "pool:prefill", "pool:decode", "node:node-1", "worker:worker-03", "worker:worker-04"):
        reported: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(SEEN_S):
                while (
                    not reported
                    or min(reported[0]["coverage"]) < 0.999
                    or any(each != reported[0] for each in reported)
                ):
                    reported = [await figures(service, end_ms, span, scope) for service in services]
        except TimeoutError:
            raise AssertionError(f"{scope} differs or is not whole: {reported}") from None
        assert reported[0]["gpus"][0] > 0


def now_ms() -> int:
    return time.time_ns() // MS


@pytest.mark.timeout(150)
async def test_two_services_share_the_telemetry_and_one_takes_over_from_the_other(
    embedded_kafka_server: KafkaServer, cluster: str
) -> None:
    async with services(embedded_kafka_server, cluster) as (alone, first, second):
        for service in (alone, first, second):
            await service.until("/v1/occupancy", lambda reported: reported["gpus"] == WORKERS * 3 // 2, window="3s")
        await until_shared(alone, (first, second))
        await all_equal((alone, first, second), now_ms(), "2s")
        workers = (await first.http.get("/v1/occupancy")).json()["workers"]
        assert [worker["running"] for worker in workers] == list(range(WORKERS))

        second.process.kill()
        await second.process.wait()
        killed_ms = now_ms()
        await until(lambda: now_ms() > killed_ms + 1_000)
        await all_equal((alone, first), killed_ms + 1_000, "3s")
        assert now_ms() - killed_ms < BACK_WITHIN_S * 1e3
        print(f"whole again {(now_ms() - killed_ms) / 1e3:.1f} s after kill -9")

        began_ms = now_ms()
        async with sharing(embedded_kafka_server, cluster, "metrics-b") as again:
            await until(lambda: now_ms() > began_ms + COUNTED_MS)
            # The restarted one knows the time before its start too.
            await all_equal((alone, first, again), began_ms + COUNTED_MS, "4s")
