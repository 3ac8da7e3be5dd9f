"""Batch jobs for tests and soaks: lines to ask, and whether each was answered once, seen from outside."""

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
"""A topic that gives nothing for so long has been read to its end."""


def write_lines(path: Path, count: int, *, max_tokens: int) -> None:
    """A file of lines with custom_ids line-0 and on."""
    with path.open("w") as file:
        for number in range(count):
            body = {"model": "sim", "prompt": f"Line {number}", "max_tokens": max_tokens, "temperature": 0}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


async def submit(http: httpx.AsyncClient, url: str, path: Path) -> str:
    """Upload the file and begin a job; its id."""
    with path.open("rb") as file:
        form = {"purpose": "batch"}
        uploaded = await http.post(f"{url}/v1/files", data=form, files={"file": (path.name, file)})
    uploaded.raise_for_status()
    asked = {"input_file_id": uploaded.json()["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    created = await http.post(f"{url}/v1/batches", json=asked)
    created.raise_for_status()
    return str(created.json()["id"])


async def retrieve(http: httpx.AsyncClient, url: str, batch_id: str) -> dict[str, Any] | None:
    """The job; None while the gateway is away, or has not read of it yet."""
    try:
        answer = await http.get(f"{url}/v1/batches/{batch_id}")
    except httpx.TransportError:
        return None
    batch: dict[str, Any] | None = answer.json() if answer.is_success else None
    return batch


async def until_answered(
    http: httpx.AsyncClient, urls: Sequence[str], batch_id: str, *, lines: int | None = None, timeout_s: float = 60.0
) -> dict[str, Any]:
    """The job once `lines` lines are answered or it has ended, from whichever gateway answers."""
    async with asyncio.timeout(timeout_s):
        while True:
            for url in urls:
                batch = await retrieve(http, url, batch_id)
                if batch and (batch["status"] in ENDED or (lines is not None and done(batch) >= lines)):
                    return batch
            await asyncio.sleep(POLL_S)


def done(batch: dict[str, Any]) -> int:
    """Lines that are answered."""
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


async def committed(servers: str, cluster: str) -> Counter[str]:
    """How often each custom_id is in the results topic, for a client of its own that reads what is committed."""
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
            found.update(Result.FromString(raw.value).custom_id for batch in batches.values() for raw in batch)
    finally:
        await consumer.stop()
    return found


async def answered(http: httpx.AsyncClient, url: str, batch: dict[str, object]) -> Counter[str]:
    """How often each custom_id is in a job's output and error files together."""
    found: Counter[str] = Counter()
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        async with http.stream("GET", f"{url}/v1/files/{file_id}/content") as content:
            async for text in content.aiter_lines():
                found[json.loads(text)["custom_id"]] += 1
    return found


def unanswered(found: Counter[str], count: int) -> Iterator[str]:
    """What is wrong with a count of answers to `write_lines(count)`, in words; nothing where each has one."""
    expected = {f"line-{number}" for number in range(count)}
    yield from (f"{name}: {times} answers" for name, times in found.items() if times != 1 or name not in expected)
    yield from (f"{name}: no answer" for name in sorted(expected - found.keys()))


def shown(problems: Iterable[str], most: int = 10) -> list[str]:
    """The first of them."""
    return list(problems)[:most]
