"""Test of a batch job over three Kafka brokers, one of which is killed twice."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from libs.contracts.topics import BATCH_RESULTS
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
from libs.testing.batch.records import sent, until_in_step
from libs.testing.servers.replicated import KafkaCluster, kafka_cluster
from libs.testing.servers.stores import KafkaUnavailable
from libs.testing.suites.processes import until_whole
from libs.testing.suites.suite import RunningSuite, running_suite
from tests.programs import skip_or_fail_in_ci

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(900)]

LINES = 2_000
TOKENS = 16
END_S = 240.0
START_S = 180.0


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaCluster]:
    try:
        context = kafka_cluster()
        found = context.__enter__()
    except KafkaUnavailable as error:
        skip_or_fail_in_ci(error)
    else:
        yield found
        context.__exit__(None, None, None)


async def kill_brokers(kafka: KafkaCluster, http: httpx.AsyncClient, suite: RunningSuite, batch_id: str) -> int:
    """Kill two brokers, each until the job has progressed without it. All copies are in sync in between."""
    cluster, kills = suite.ready["cluster"], 0
    for share, server in zip((0.1, 0.4), list(kafka.brokers.values())[:2], strict=True):
        batch = await until_answered(http, suite.ready["gateways"], batch_id, lines=int(LINES * share), timeout_s=END_S)
        assert batch["status"] not in ENDED, f"the job ended before kill {kills + 1}"
        server.kill()
        kills += 1
        lines = done(batch) + LINES // 10
        batch = await until_answered(http, suite.ready["gateways"], batch_id, lines=lines, timeout_s=END_S)
        assert batch["status"] not in ENDED
        server.start()
        await until_in_step(kafka.servers, cluster)
    return kills


async def test_killed_brokers_lose_no_line_and_no_telemetry(kafka: KafkaCluster, cluster: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=TOKENS)
    slow = {"FULCRUM_WORKER_SIM_SPEEDUP": "0.25"}
    env = {"FULCRUM_CLUSTER": cluster, "FULCRUM_GATEWAY_FILES_FOLDER": str(tmp_path / "files"), **slow}
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "2", "--gateways", "2", "--kafka", kafka.servers)
    loop = asyncio.get_running_loop()
    with running_suite(tmp_path, *shape, env=env, start_s=START_S) as suite:
        urls = suite.ready["gateways"]
        async with httpx.AsyncClient(timeout=30) as http:
            made = await until_in_step(kafka.servers, cluster)
            assert BATCH_RESULTS.name(cluster) in made
            began_s = loop.time()
            batch_id = await submit(http, urls[0], tmp_path / "lines.jsonl")
            kills = await kill_brokers(kafka, http, suite, batch_id)
            batch = await until_answered(http, urls, batch_id, timeout_s=END_S)
            took_s = loop.time() - began_s
            assert (batch["status"], done(batch)) == ("completed", LINES)
            await until_whole(http, suite)
            files = await answered(http, urls[0], batch)
    assert not shown(unanswered(files, LINES))
    assert not shown(unanswered(await committed(kafka.servers, cluster), LINES))
    steps, decisions = await sent(kafka.servers, cluster)
    assert steps and decisions
    for numbers in steps.values():
        assert set(numbers) == set(range(min(numbers), max(numbers) + 1))  # a batch may come twice, none is missing
    for numbers in decisions.values():
        assert set(numbers) == set(range(min(numbers), max(numbers) + 1))
    batches = sum(map(len, steps.values()))
    repeats = batches - sum(len(set(numbers)) for numbers in steps.values())
    print(
        f"{LINES} lines, {kills} kills in {took_s:.0f} s; {batches} telemetry batches of {len(steps)} workers,"
        f" {repeats} sent twice; {sum(map(len, decisions.values()))} decisions"
    )
