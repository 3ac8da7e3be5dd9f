"""Test over a real broker of jobs whose lines, submissions and answers are Kafka records."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from libs.contracts.topics import BATCH_SUBMIT
from libs.testing.batch.jobs import ENDED, ENDPOINT
from libs.testing.servers.stores import KafkaServer
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.suite, pytest.mark.kafka]

LINES = 400
END_S = 60.0


def line(number: int) -> bytes:
    body = {"model": "sim" if number else "nope", "prompt": f"Line {number}", "max_tokens": 2}
    value = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(value, indent=1 if number % 2 else None).encode()


async def values(servers: str, topic: str, count: int) -> Counter[str]:
    """Count each custom_id in a topic, as a reader of committed records."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=servers, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await consumer.start()
    found: Counter[str] = Counter()
    try:
        while found.total() < count:
            batches = await consumer.getmany(timeout_ms=5000)
            assert batches, f"{found.total()} of {count} came"
            for batch in batches.values():
                for record in batch:
                    custom_id = json.loads(record.value)["custom_id"]
                    assert record.key.decode() == custom_id
                    found[custom_id] += 1
        assert not await consumer.getmany(timeout_ms=500)
    finally:
        await consumer.stop()
    return found


def ended(suite: RunningSuite, tenant: str) -> dict[str, Any]:
    """Return the youngest job of a tenant, once it has ended."""
    deadline_s = time.monotonic() + END_S
    while time.monotonic() < deadline_s:
        for batch in httpx.get(f"{suite.gateway}/v1/batches").json()["data"]:
            if batch["fulcrum"]["tenant"] == tenant and batch["status"] in ENDED:
                found: dict[str, Any] = batch
                return found
        time.sleep(0.1)
    raise AssertionError(f"no job of {tenant!r} has ended")


async def test_a_job_submitted_as_a_record_reads_a_topic_and_answers_on_a_topic(
    real_kafka_server: KafkaServer, cluster: str, tmp_path: Path
) -> None:
    servers, lines_topic, good, bad = real_kafka_server.servers, f"{cluster}-in", f"{cluster}-out", f"{cluster}-err"
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 3, 1) for name in (lines_topic, good, bad)])
    small, typo = f"{cluster}-small", f"{cluster}-typo"
    await admin.create_topics([NewTopic(small, 1, 1, topic_configs={"max.message.bytes": "300"})])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    for number in range(LINES):
        await producer.send(lines_topic, line(number), key=str(number).encode())
    await producer.flush()
    env = {
        "FULCRUM_GATEWAY_BATCH_TOPICS": f"{cluster}-*",
        "FULCRUM_CLUSTER": cluster,
        "FULCRUM_GATEWAY_FILES_FOLDER": str(tmp_path / "files"),
    }
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "1", "--kafka", servers)
    with running_suite(tmp_path, *shape, env=env) as suite:
        topics = ("--output-topic", good, "--error-topic", bad)
        done = suite.fulcrum(
            "batch", "submit", "--topic", lines_topic, "--endpoint", ENDPOINT, *topics, "--wait", "--json"
        )
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert (figures["total"], figures["completed"], figures["failed"]) == (LINES, LINES - 1, 1)
        assert await values(servers, good, LINES - 1) == Counter(f"line-{number}" for number in range(1, LINES))
        assert await values(servers, bad, 1) == Counter(["line-0"])

        missing = suite.fulcrum("batch", "submit", "--topic", f"{cluster}-none", "--endpoint", ENDPOINT, "--wait")
        assert (missing.returncode, "topic_not_found" in missing.stderr) == (1, True)

        foreign = suite.fulcrum("batch", "submit", "--topic", "payments", "--endpoint", ENDPOINT, "--wait")
        assert (foreign.returncode, "FULCRUM_GATEWAY_BATCH_TOPICS" in foreign.stderr) == (1, True), foreign.stderr

        body = {"input_topic": lines_topic, "endpoint": ENDPOINT, "metadata": {"tenant": "ann", "priority": "3"}}
        misspelt = {**body, "output_topic": typo, "metadata": {"tenant": "typo"}}
        answer = httpx.post(f"{suite.gateway}/v1/batches", json=misspelt, timeout=30)
        shown = answer.json()["error"]
        assert (answer.status_code, shown["code"], shown["param"]) == (404, "topic_not_found", "output_topic")
        unfit = {**body, "output_topic": small, "metadata": {"tenant": "small"}}
        for record in (b"{no job", *(json.dumps(job).encode() for job in (misspelt, unfit, body))):
            await producer.send_and_wait(BATCH_SUBMIT.name(cluster), record)
        await producer.stop()
        misspelt_job = ended(suite, "typo")
        assert misspelt_job["status"] == "failed"
        assert misspelt_job["errors"]["data"][0]["code"] == "topic_not_found"
        unfit_job = ended(suite, "small")
        assert unfit_job["request_counts"]["completed"] + unfit_job["request_counts"]["failed"] == LINES
        errors = httpx.get(f"{suite.gateway}/v1/files/{unfit_job['error_file_id']}/content").text.splitlines()
        codes = Counter(json.loads(text)["error"]["code"] for text in errors)
        # The number of lines submitted before the topic refused depends on speed; the others name the reason.
        assert codes.keys() <= {"topic_refused", "model_not_found"}
        assert codes.total() == unfit_job["request_counts"]["failed"]
        assert not await values(servers, small, 0)
        refused = ended(suite, "")
        assert (refused["status"], refused["errors"]["data"][0]["code"]) == ("failed", "invalid_request")
        mine = ended(suite, "ann")
        assert mine["request_counts"] == {"total": LINES, "completed": LINES - 1, "failed": 1}
        assert mine["fulcrum"]["priority"] == 3
