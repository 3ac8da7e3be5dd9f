"""Turns between tenants' jobs, and within a tenant by priority, through a gateway and a broker."""

import asyncio
from pathlib import Path
from typing import Any

from libs.bus.kafka_work import KafkaWork
from libs.filestore.local import LocalFiles
from libs.testing.batch import ENDPOINT, until_answered
from libs.testing.scripted_worker import scripted_worker
from libs.testing.stores import KafkaServer
from services.gateway.batch.run import BatchPorts

LINES = 2_000
"""Of a job; more than two jobs have may not be out at once."""
ENDED_S = 200.0
"""Bound on all jobs: 14,000 lines over the embedded broker took 41 s on a busy machine."""


async def test_one_tenants_many_jobs_hold_up_neither_anothers_nor_an_urgent_one(
    embedded_kafka_server: KafkaServer, cluster: str, tmp_path: Path, open_gateway_over: Any
) -> None:
    work = KafkaWork(embedded_kafka_server.servers, cluster, "gateway")
    ports = BatchPorts(work, LocalFiles(tmp_path / "files", max_bytes=10**8))
    async with (
        scripted_worker("m0", "mixed") as worker,
        open_gateway_over(worker.worker, batch=ports, cluster=cluster) as gateway,
    ):
        # Lines that are refused cost no worker anything, and are dealt like any other.
        text = "\n".join(f'{{"custom_id": "{number}"}}' for number in range(LINES)).encode()
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", text)}}
        file_id = (await gateway.http.post("/v1/files", **form)).json()["id"]

        async def submit(tenant: str, priority: int = 0) -> str:
            asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "priority": priority}
            answer = await gateway.http.post("/v1/batches", json=asked, headers={"x-fulcrum-tenant": tenant})
            return str(answer.json()["id"])

        anns = [await submit("ann") for _ in range(5)]
        bobs, urgent = await submit("bob"), await submit("bob", priority=9)
        ended: list[str] = []

        async def until_ended(batch_id: str) -> None:
            batch = await until_answered(gateway.http, [gateway.url], batch_id, timeout_s=ENDED_S)
            assert batch["request_counts"]["failed"] == LINES
            ended.append(batch_id)

        await asyncio.gather(*(until_ended(batch_id) for batch_id in (*anns, bobs, urgent)))
    assert ended.index(urgent) < ended.index(bobs) < ended.index(anns[-1])
