"""Batch jobs for tests and soaks: lines to send, and checks from outside that each was answered once."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from aiokafka import AIOKafkaConsumer

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result
from libs.contracts.topics import BATCH_RESULTS

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
POLL_S = 0.05
QUIET_MS = 3_000
"""The silence after which a topic counts as read to its end."""


def write_lines(path: Path, count: int, *, max_tokens: int) -> None:
    """Write a file of lines with custom_ids from line-0 on."""
    with path.open("w") as file:
        for number in range(count):
            body = {"model": "sim", "prompt": f"Line {number}", "max_tokens": max_tokens, "temperature": 0}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


async def submit(http: httpx.AsyncClient, url: str, path: Path) -> str:
    """Upload the file, start a job and return its id."""
    with path.open("rb") as file:
        form = {"purpose": "batch"}
        uploaded = await http.post(f"{url}/v1/files", data=form, files={"file": (path.name, file)})
    uploaded.raise_for_status()
    body = {"input_file_id": uploaded.json()["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    created = await http.post(f"{url}/v1/batches", json=body)
    created.raise_for_status()
    return str(created.json()["id"])


async def retrieve(http: httpx.AsyncClient, url: str, batch_id: str) -> dict[str, Any] | None:
    """Return the job; None while the gateway is away or does not know it yet."""
    try:
        answer = await http.get(f"{url}/v1/batches/{batch_id}")
    except httpx.TransportError:
        return None
    batch: dict[str, Any] | None = answer.json() if answer.is_success else None
    return batch


async def until_answered(
    http: httpx.AsyncClient, urls: Sequence[str], batch_id: str, *, lines: int | None = None, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Wait until `lines` lines are answered or the job has ended, and return the job from whichever gateway answers."""
    async with asyncio.timeout(timeout_s):
        while True:
            for url in urls:
                batch = await retrieve(http, url, batch_id)
                if batch and (batch["status"] in ENDED or (lines is not None and done(batch) >= lines)):
                    return batch
            await asyncio.sleep(POLL_S)


def done(batch: dict[str, Any]) -> int:
    """Return the number of answered lines."""
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


async def committed(servers: str, cluster: str, batch_id: str = "") -> Counter[str]:
    """Return how often each custom_id is in the results topic, for a client that reads only committed records. The
    results are those of one job, or of all.
    """
    consumer = AIOKafkaConsumer(
        BATCH_RESULTS.name(cluster),
        bootstrap_servers=servers,
        group_id=None,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    found: Counter[str] = Counter()
    await consumer.start()
    try:
        while batches := await consumer.getmany(timeout_ms=QUIET_MS):
            results = [Result.FromString(raw.value) for batch in batches.values() for raw in batch]
            found.update(each.custom_id for each in results if batch_id in ("", each.job_id))
    finally:
        await consumer.stop()
    return found


async def answered(http: httpx.AsyncClient, url: str, batch: dict[str, object]) -> Counter[str]:
    """Return how often each custom_id is in a job's output and error files together."""
    found: Counter[str] = Counter()
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        async with http.stream("GET", f"{url}/v1/files/{file_id}/content") as content:
            async for text in content.aiter_lines():
                found[json.loads(text)["custom_id"]] += 1
    return found


def unanswered(found: Counter[str], count: int) -> Iterator[str]:
    """Describe what is wrong with the counts of answers to `write_lines(count)`; empty if each line has one."""
    expected = {f"line-{number}" for number in range(count)}
    yield from (f"{name}: {times} answers" for name, times in found.items() if times != 1 or name not in expected)
    yield from (f"{name}: no answer" for name in sorted(expected - found.keys()))


def shown(problems: Iterable[str], most: int = 10) -> list[str]:
    """Format the first few names."""
    return list(problems)[:most]
