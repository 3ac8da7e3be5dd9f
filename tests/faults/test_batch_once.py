"""A batch job while gateways and workers are killed: every line is answered once, on the topic and in the files."""

import asyncio
from pathlib import Path

import httpx
import pytest

from libs.testing.batch import ENDED, answered, committed, shown, submit, unanswered, write_lines
from libs.testing.processes import kill, until_whole
from libs.testing.stores import KafkaServer
from libs.testing.suite import running_suite

pytestmark = [pytest.mark.suite, pytest.mark.kafka]

LINES = 600
TOKENS = 16
END_S = 90.0


async def status(http: httpx.AsyncClient, urls: list[str], batch_id: str) -> dict[str, object]:
    """From whichever gateway answers."""
    async with asyncio.timeout(END_S):
        while True:
            for url in urls:
                try:
                    answer = await http.get(f"{url}/v1/batches/{batch_id}")
                    if answer.is_success:
                        found: dict[str, object] = answer.json()
                        return found
                except httpx.TransportError:
                    pass
            await asyncio.sleep(0.05)


def done(batch: dict[str, object]) -> int:
    counts = batch["request_counts"]
    assert isinstance(counts, dict)
    return int(counts["completed"])


async def test_killed_gateways_and_workers_cost_no_line_and_answer_none_twice(
    real_kafka_server: KafkaServer, cluster: str, tmp_path: Path
) -> None:
    kafka = real_kafka_server.servers
    write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=TOKENS)
    env = {"FULCRUM_CLUSTER": cluster, "FULCRUM_GATEWAY_FILES_FOLDER": str(tmp_path / "files")}
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "2", "--gateways", "2", "--kafka", kafka)
    with running_suite(tmp_path, *shape, env=env) as suite:
        urls = suite.ready["gateways"]
        async with httpx.AsyncClient(timeout=30) as http:
            batch_id = await submit(http, urls[0], tmp_path / "lines.jsonl")
            victims = iter(("gateway-1", "decode-1"))
            at = iter((LINES // 5, LINES // 2, LINES * 2))
            next_at = next(at)
            async with asyncio.timeout(END_S):
                # A gateway that is started again has its port anew only where it was asked for: the first one.
                while (batch := await status(http, urls, batch_id))["status"] not in ENDED:
                    if done(batch) >= next_at:
                        await kill(suite, next(victims))
                        next_at = next(at)
                    await asyncio.sleep(0.05)
            assert batch["status"] == "completed"
            assert next(victims, None) is None, "all were killed before the end"
            await until_whole(http, suite)
            files = await answered(http, urls[0], batch)
        assert not shown(unanswered(files, LINES))
        assert not shown(unanswered(await committed(kafka, cluster), LINES))
