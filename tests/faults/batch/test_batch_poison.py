"""Test of a batch line that fails on every engine, however often it is tried."""

import json
from pathlib import Path
from typing import Any

import httpx

from libs.bus.kafka_work import KafkaWork
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.filestore.local import LocalFiles
from libs.testing.batch.jobs import answered, submit, unanswered, until_answered, write_lines
from libs.testing.workers.scripted import scripted_worker
from services.gateway.batch.line_request import MAX_ATTEMPTS
from services.gateway.batch.run import BatchPorts

LINES = 40
POISON = 7
REROUTES = 2


def is_poison(submit: pb.Submit) -> bool:
    return submit.request_id.startswith("batch_") and submit.request_id.endswith(f"-{POISON}")


async def test_a_line_on_which_the_engine_always_fails_gets_an_error_and_all_others_an_answer(
    work: KafkaWork, cluster: str, tmp_path: Path, open_gateway_over: Any
) -> None:
    batch_ports = BatchPorts(work, LocalFiles(tmp_path / "files", max_bytes=10**7))
    write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=2)
    async with scripted_worker("m0", "mixed") as one, scripted_worker("m1", "mixed") as other:
        one.fails = other.fails = is_poison
        async with open_gateway_over(
            one.worker, other.worker, batch=batch_ports, max_reroutes=REROUTES, cluster=cluster
        ) as gateway:
            batch_id = await submit(gateway.http, gateway.url, tmp_path / "lines.jsonl")
            batch = await until_answered(gateway.http, [gateway.url], batch_id)
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": LINES, "completed": LINES - 1, "failed": 1}
            assert not list(unanswered(await answered(gateway.http, gateway.url, batch), LINES))
            error = json.loads((await errors(gateway.http, batch)).splitlines()[0])
            assert gateway.live == 0
    assert (error["custom_id"], error["error"]["line"]) == (f"line-{POISON}", POISON + 1)
    assert error["error"]["code"] == "sequence_failed"
    assert "ENGINE" in error["error"]["message"], "it names the reason"
    tried = [submit for worker in (one, other) for submit in worker.submits if is_poison(submit)]
    assert len(tried) == MAX_ATTEMPTS * (REROUTES + 1)


async def errors(http: httpx.AsyncClient, batch: dict[str, Any]) -> str:
    return (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text
