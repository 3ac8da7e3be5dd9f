"""Tests of a batch job while its processes are killed: every line is answered once, on the topic and in the files."""

from pathlib import Path

import httpx
import pytest

from libs.testing.batch.jobs import (
    ENDED,
    answered,
    committed,
    done,
    shown,
    submit,
    unanswered,
    until_answered,
    write_lines,
)
from libs.testing.servers.stores import KafkaServer
from libs.testing.suites.processes import kill, until_whole
from libs.testing.suites.suite import running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.kafka]

LINES = 1000
TOKENS = 16
END_S = 90.0


async def test_killed_gateways_and_workers_lose_no_line_and_answer_none_twice(
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
            for victim, lines in (("gateway-1", LINES // 5), ("decode-1", LINES // 2)):
                batch = await until_answered(http, urls, batch_id, lines=lines, timeout_s=END_S)
                assert batch["status"] not in ENDED
                await kill(suite, victim)
            batch = await until_answered(http, urls, batch_id, timeout_s=END_S)
            assert batch["status"] == "completed"
            await until_whole(http, suite)
            files = await answered(http, urls[0], batch)
        assert not shown(unanswered(files, LINES))
        assert not shown(unanswered(await committed(kafka, cluster), LINES))


async def test_a_job_resumes_after_everything_was_killed_and_restarted(
    real_kafka_server: KafkaServer, cluster: str, tmp_path: Path
) -> None:
    """The broker, which keeps its data on disk, and Redis, which keeps nothing, are killed too."""
    write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=TOKENS)
    env = {"FULCRUM_CLUSTER": cluster, "FULCRUM_GATEWAY_FILES_FOLDER": str(tmp_path / "files")}
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "1", "--kafka", real_kafka_server.servers)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    async with httpx.AsyncClient(timeout=30) as http:
        with running_suite(first, *shape, env=env) as suite:
            batch_id = await submit(http, suite.gateway, tmp_path / "lines.jsonl")
            batch = await until_answered(http, [suite.gateway], batch_id, lines=LINES // 3, timeout_s=END_S)
            assert batch["status"] not in ENDED
            suite.process.kill()  # and with it all its processes
            suite.process.wait()
            real_kafka_server.server.kill()
        real_kafka_server.server.start()
        with running_suite(second, *shape, env=env) as suite:
            batch = await until_answered(http, [suite.gateway], batch_id, timeout_s=END_S)
            assert (batch["status"], done(batch)) == ("completed", LINES)
            files = await answered(http, suite.gateway, batch)
    assert not shown(unanswered(files, LINES))
    assert not shown(unanswered(await committed(real_kafka_server.servers, cluster), LINES))
