"""Test of turns between tenants' jobs, and by priority within a tenant, through a gateway and a broker."""

import asyncio
from pathlib import Path
from typing import Any

from libs.bus.kafka_work import KafkaWork
from libs.filestore.local import LocalFiles
from libs.policy.batch import MAX_OPEN_LINES
from libs.testing.batch.jobs import ENDPOINT, until_answered
from libs.testing.workers.scripted import scripted_worker
from services.gateway.batch.run import BatchPorts

LINES = 3_000
"""Lines of each of five jobs: twice what the other tenant has in all. That tenant's job ends before them, though
turns are not even at every moment."""
URGENT_LINES = 500
OTHER_LINES = MAX_OPEN_LINES + 2_500
"""Lines of the job that an urgent one overtakes: however fast they are dealt, some are left when the urgent job
arrives. Shares wait in eight partitions, which are read unevenly on a busy machine, so ten of them follow the urgent
job's."""
ENDED_S = 220.0
"""Bound on all jobs: 17,000 lines over the embedded broker took 98 s on a machine with four times its cores' work."""


async def test_many_jobs_of_one_tenant_delay_neither_another_tenants_job_nor_an_urgent_one(
    work: KafkaWork, cluster: str, tmp_path: Path, open_gateway_over: Any
) -> None:
    ports = BatchPorts(work, LocalFiles(tmp_path / "files", max_bytes=10**8))
    async with (
        scripted_worker("m0", "mixed") as worker,
        open_gateway_over(worker.worker, batch=ports, cluster=cluster) as gateway,
    ):

        async def upload(lines: int) -> str:
            # Lines that are refused cost no worker anything, and are dealt like any other.
            text = "\n".join(f'{{"custom_id": "{number}"}}' for number in range(lines)).encode()
            form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", text)}}
            return str((await gateway.http.post("/v1/files", **form)).json()["id"])

        async def submit(tenant: str, file_id: str, priority: int = 0) -> str:
            body = {"input_file_id": file_id, "endpoint": ENDPOINT, "priority": priority}
            answer = await gateway.http.post("/v1/batches", json=body, headers={"x-fulcrum-tenant": tenant})
            return str(answer.json()["id"])

        files = [await upload(lines) for lines in (LINES, OTHER_LINES, URGENT_LINES)]
        anns = [await submit("ann", files[0]) for _ in range(5)]
        bobs, urgent = await submit("bob", files[1]), await submit("bob", files[2], priority=9)
        ended: list[str] = []

        async def until_ended(batch_id: str, lines: int) -> None:
            batch = await until_answered(gateway.http, [gateway.url], batch_id, timeout_s=ENDED_S)
            assert batch["request_counts"]["failed"] == lines
            ended.append(batch_id)

        jobs = {**dict.fromkeys(anns, LINES), bobs: OTHER_LINES, urgent: URGENT_LINES}
        await asyncio.gather(*(until_ended(batch_id, lines) for batch_id, lines in jobs.items()))
    assert ended.index(urgent) < ended.index(bobs) < ended.index(anns[-1])
