"""Tests of metrics and planner as processes over a real broker and Redis."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, WORKER_STATE_READY, Assignment, Load, Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.contracts.topics import REQUESTS, STEPS
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.stores.registry import RedisRegistry
from libs.testing.servers.stores import KafkaServer, RedisServer, embedded_kafka, embedded_redis
from libs.testing.suites.control import START_S, control

pytestmark = pytest.mark.alone

TELEMETRY_S = 0.1
MS = 1_000_000


class FakeWorker:
    """A worker that registers and reports steps that fill a quarter of its time; it computes nothing."""

    def __init__(self, kafka: str, redis: str, cluster: str) -> None:
        self._clock = SystemClock()
        self._bus = KafkaBus(kafka, cluster, "decode-0")
        self._registry = RedisRegistry(redis, cluster)
        self._worker = Worker(
            id="decode-0",
            incarnation=self._clock.now_ns(),
            node="node-a",
            pid=os.getpid(),
            address="127.0.0.1:1",
            engine="sim",
            device="sim:h100",
            gpus=2,
            state=WORKER_STATE_READY,
            assignment=Assignment(model="sim", role=ROLE_MIXED, epoch=1),
        )

    async def run(self) -> None:
        await self._registry.announce(self._worker, lease_ms=60_000)
        await self._bus.start()
        try:
            await self._report()
        finally:
            await self._bus.close()
            await self._registry.close()

    async def _report(self) -> None:
        covered_to, sequence = self._clock.now_ns(), 0
        while True:
            await asyncio.sleep(TELEMETRY_S)
            covered_from, covered_to, sequence = covered_to, self._clock.now_ns(), sequence + 1
            end = covered_from + (covered_to - covered_from) // 4
            batch = StepBatch(
                worker_id=self._worker.id,
                incarnation=self._worker.incarnation,
                sequence=sequence,
                node=self._worker.node,
                gpus=self._worker.gpus,
                engine=self._worker.engine,
                assignment=self._worker.assignment,
                covered_from_unix_ns=covered_from,
                covered_to_unix_ns=covered_to,
                steps=step_columns([StepRow(covered_from, end, decode_sequences=3, decode_kv_tokens=99)]),
                load=Load(running=3, waiting=1, waiting_prefill_tokens=64),
            )
            self._bus.publish(STEPS, batch)
            self._bus.publish(
                REQUESTS,
                RequestEvent(
                    request_id=f"r{sequence}",
                    model="sim",
                    outcome=OUTCOME_OK,
                    arrival_unix_ns=covered_from - 30 * MS,
                    output_tokens=3,
                    ttft_ns=10 * MS,
                    decode_ns=20 * MS,
                ),
            )


@asynccontextmanager
async def fake_worker(kafka: str, redis: str, cluster: str) -> AsyncIterator[None]:
    tasks = TaskOwner()
    tasks.spawn("fake worker", FakeWorker(kafka, redis, cluster).run())
    try:
        yield
        assert tasks.error is None
    finally:
        await tasks.close()


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.kafka)])
def stores(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The addresses (kafka, redis) for settings."""
    kafka: KafkaServer = request.getfixturevalue(f"{request.param}_kafka_server")
    redis: RedisServer = request.getfixturevalue(f"{request.param}_redis_server")
    return kafka.servers, redis.url


async def test_a_workers_reports_are_served_and_sigterm_ends_both_services_with_0(stores, cluster):
    async with (
        control("metrics", *stores, cluster) as metrics,
        control("planner", *stores, cluster) as planner,
        fake_worker(*stores, cluster),
    ):
        occupancy = await metrics.until("/v1/occupancy", lambda body: body["coverage"] > 0.99, window="2s")
        assert occupancy["gpus"] == 2
        assert occupancy["decode"] == pytest.approx(0.25, abs=0.03)
        assert occupancy["idle"] == pytest.approx(0.75, abs=0.03)
        assert occupancy["ratio"] == 0
        (worker,) = occupancy["workers"]
        assert (worker["id"], worker["role"], worker["running"], worker["waiting"]) == ("decode-0", "decode", 3, 1)
        summary = (await metrics.http.get("/v1/requests/summary", params={"window": "1m"})).json()
        assert summary["models"][0]["summary"]["ttft_s"]["p50"] == 0.01

        (listed,) = await planner.until("/v1/workers", lambda body: body and body[0]["coverage"] > 0.99)
        assert (listed["id"], listed["pid"], listed["running"], listed["state"]) == (
            "decode-0",
            os.getpid(),
            3,
            "ready",
        )
        first = (await planner.http.get("/v1/decisions", params={"limit": "1"})).json()[0]
        assert (first["action"], first["mode"]) == ("keep", "auto")
        assert first["reason"] == "sim keeps its roles: no worker has said how long its steps take"
        assert first["pools"][0]["busy"] == pytest.approx(0.25, abs=0.03)  # window boundaries may fall within steps
        # One per second while nothing changes, delivered by the broker to every subscriber.
        await planner.until("/v1/decisions", lambda body: body[0]["sequence"] >= first["sequence"] + 2, limit="1")
        assert "fulcrum_decisions_seen_total" in (await metrics.http.get("/metrics")).text

        for service in (metrics, planner):
            assert (await service.http.get("/readyz")).json() == {"status": "ready"}
            assert (await service.http.get("/openapi.json")).status_code == 200
        assert await metrics.stop() == 0
        assert await planner.stop() == 0


async def test_a_planner_that_is_off_lists_workers_and_decides_nothing(
    embedded_kafka_server, embedded_redis_server, cluster
):
    stores = (embedded_kafka_server.servers, embedded_redis_server.url)
    async with (
        control("metrics", *stores, cluster),
        control("planner", *stores, cluster, FULCRUM_PLANNER_MODE="off") as planner,
        fake_worker(*stores, cluster),
    ):
        await planner.until("/v1/workers", lambda body: body and body[0]["running"] == 3)
        assert (await planner.http.get("/v1/decisions")).json() == []
        assert await planner.stop() == 0


async def test_both_services_survive_a_store_outage_with_their_state_and_name_the_store(cluster):
    with embedded_kafka() as kafka, embedded_redis() as redis:
        stores = (kafka.servers, redis.url)
        async with control("metrics", *stores, cluster) as metrics, control("planner", *stores, cluster) as planner:
            async with fake_worker(*stores, cluster):
                await metrics.until("/readyz", lambda body: body == {"status": "ready"})
                await metrics.until("/v1/occupancy", lambda body: body["workers"])
                await planner.until("/v1/workers", lambda body: body and body[0]["running"] == 3)
                kafka.server.kill()
                redis.server.kill()
                await metrics.until("/readyz", lambda body: "the broker is away" in body.get("reason", ""))
                await planner.until("/readyz", lambda body: "the registry has been silent" in body.get("reason", ""))
                await planner.until("/readyz", lambda body: "no telemetry has come" in body.get("reason", ""))
                assert [each["id"] for each in (await planner.http.get("/v1/workers")).json()] == ["decode-0"]
                assert (await metrics.http.get("/v1/occupancy")).json()["workers"][0]["coverage"] == 0
            kafka.server.start()
            redis.server.start()
            async with fake_worker(*stores, cluster):
                for service in (metrics, planner):
                    await service.until("/readyz", lambda body: body == {"status": "ready"})
                await metrics.until("/v1/occupancy", lambda body: body["coverage"] > 0.99)
            assert await metrics.stop() == 0
            assert await planner.stop() == 0


async def test_both_services_start_without_their_stores_and_report_that_no_data_has_come(tmp_path, cluster):
    stores = ("127.0.0.1:1", "redis://127.0.0.1:1/0")
    async with control("metrics", *stores, cluster) as metrics, control("planner", *stores, cluster) as planner:
        assert "nothing has arrived from the broker yet" in (await metrics.http.get("/readyz")).json()["reason"]
        assert "registry has not answered yet" in (await planner.http.get("/readyz")).json()["reason"]
        assert (await planner.http.get("/v1/workers")).json() == []
        assert await metrics.stop() == 0
        assert await planner.stop() == 0


async def test_a_port_in_use_is_one_clear_line_and_exit_code_2(tmp_path, cluster):
    stores = ("127.0.0.1:1", "redis://127.0.0.1:1/0")
    async with control("metrics", *stores, cluster) as metrics:
        port = str(metrics.http.base_url.port)
        env = {**os.environ, "FULCRUM_KAFKA": stores[0], "FULCRUM_REDIS": stores[1]}
        for name in ("metrics", "planner"):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{name}",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**env, f"FULCRUM_{name.upper()}_PORT": port},
            )
            async with asyncio.timeout(START_S):
                out, err = await process.communicate()
            assert process.returncode == 2
            assert json.loads(out)["event"] == "failed"
            assert f"port {port} on 127.0.0.1 is in use" in err.decode().strip()
            assert len(err.decode().strip().splitlines()) == 1


@pytest.mark.parametrize("stores", [pytest.param("real", marks=pytest.mark.kafka)], indirect=True)
async def test_history_has_no_gap_and_no_duplicate_after_a_stop_and_a_kill(stores, cluster, tmp_path):
    env = {"FULCRUM_METRICS_HISTORY_FILE": str(tmp_path / "history.sqlite")}
    bounds: dict[str, int] = {}

    def seconds(body: Any) -> list[float]:
        """Return the coverage of whole seconds from the first to the last requested one."""
        return [
            coverage
            for start_ms, coverage in zip(body["starts_unix_ms"], body["coverage"], strict=True)
            if bounds["from_ms"] <= start_ms < bounds["to_ms"]
        ]

    def now_ms() -> int:
        return SystemClock().now_ns() // MS

    whole = {"window": "1s", "span": "1m"}
    async with fake_worker(*stores, cluster):
        async with control("metrics", *stores, cluster, **env) as metrics:
            await metrics.until("/v1/occupancy", lambda body: body["coverage"] > 0.99, window="500ms")
            bounds |= {"from_ms": -(-now_ms() // 1000) * 1000, "to_ms": now_ms() // 1000 * 1000 + 5000}
            await metrics.until("/v1/occupancy/history", lambda body: seconds(body)[3:] > [0.99], **whole)
            assert await metrics.stop() == 0
        async with control("metrics", *stores, cluster, **env) as metrics:
            await metrics.until("/v1/occupancy", lambda body: body["coverage"] > 0.99, window="500ms")
            metrics.process.kill()
            await metrics.process.wait()
        async with control("metrics", *stores, cluster, **env) as metrics:
            bounds["to_ms"] = now_ms() // 1000 * 1000
            requested = (bounds["to_ms"] - bounds["from_ms"]) // 1000
            found = await metrics.until(  # data reported before are there at once, the rest once it is read again
                "/v1/occupancy/history", lambda body: seconds(body)[requested - 1 :] > [0.99], **whole
            )
    assert len(seconds(found)) == requested > 3
    assert seconds(found) == [1.0] * len(seconds(found))
