"""Targets of the gateway's bench: Fulcrum on the sim engine, a bare endpoint, a peer. Each runs as processes on
loopback.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from libs.testing.suites.suite import running_suite
from load.gateway.http_load import PATH, Requests, Shape
from load.measure import OTHERS, Kinds, processes_below
from load.peers.dynamo_suite import LOOPBACK, running_dynamo

GATEWAY, PREFILL, DECODE = "gateway", "prefill", "decode"
_SERVICES = {f"services.{kind}": kind for kind in (GATEWAY, PREFILL, DECODE)}
_MAX_SPEED = {
    "FULCRUM_WORKER_SIM_PROFILE": "instant",
    "FULCRUM_WORKER_MAX_SEQUENCES": "256",  # as the peer's mocker
    "FULCRUM_LOG_LEVEL": "warning",
}
PEER_START_S = 60.0
BARE_START_S = 20.0

Counters = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    model: str
    addresses: Sequence[tuple[str, int]]
    kinds: Kinds
    counters: Counters = dict
    """Counters of the target itself, which only rise."""

    @property
    def url(self) -> str:
        """Return the URL of the first address."""
        host, port = self.addresses[0]
        return f"http://{host}:{port}"


@asynccontextmanager
async def fulcrum(
    folder: Path, *, model: Path | None, gateways: int, prefill: int, decode: int
) -> AsyncIterator[Target]:
    """Start a whole suite on an engine that takes no time."""
    counts = {"gateways": gateways, "prefill": prefill, "decode": decode}
    arguments = ["--engine", "sim", *(word for name, count in counts.items() for word in (f"--{name}", str(count)))]
    arguments += ["--model", str(model)] if model else []
    starting = running_suite(folder, *arguments, env={**_MAX_SPEED, "FULCRUM_CACHE": str(folder / "cache")})
    suite = await asyncio.to_thread(starting.__enter__)
    try:
        urls = [urlsplit(url) for url in suite.ready["gateways"]]
        with Redis.from_url(suite.ready["redis"]) as redis:
            yield Target(
                name="fulcrum",
                model=suite.ready["model"],
                addresses=[(str(url.hostname), int(url.port or 0)) for url in urls],
                kinds=processes_below(suite.process.pid, _SERVICES),
                counters=lambda: {**_redis_counters(redis), **_grpc_counters(suite.ready["gateways"])},
            )
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)


def _redis_counters(redis: "Redis") -> dict[str, float]:
    # Counts are of the whole suite: each read that Redis counts is a round trip of some process.
    stats = redis.info("stats")
    moved = stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
    return {"redis_trips": stats["total_reads_processed"], "redis_bytes": moved}


def _grpc_counters(gateways: Sequence[str]) -> dict[str, float]:
    """Return frames and bytes of the streams between gateways and workers."""
    found = {"grpc_frames": 0.0, "grpc_bytes": 0.0}
    for url in gateways:
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
            for name, metric in (("grpc_frames", "frames"), ("grpc_bytes", "frame_bytes")):
                if family.name == f"fulcrum_gateway_{metric}":
                    found[name] += sum(s.value for s in family.samples if s.name.endswith("_total"))
    return found


@asynccontextmanager
async def bare(folder: Path, recorded: Target, shapes: Sequence[Shape]) -> AsyncIterator[Target]:
    """Start FastAPI that answers each shape with the bytes that `recorded` answered."""
    for shape in shapes:
        kind = "stream" if shape.stream else "whole"
        (folder / f"{shape.tokens}-{kind}.json").write_text(json.dumps(await _record(recorded, shape)))
    command = [sys.executable, "-m", "load.gateway.bare", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 (returns at once)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(BARE_START_S):
            line = json.loads(await asyncio.to_thread(process.stdout.readline))
        address = (LOOPBACK, int(urlsplit(line["http"]).port or 0))
        yield Target("bare FastAPI", recorded.model, [address], {GATEWAY: [psutil.Process(process.pid)]})
    finally:
        process.kill()
        process.wait()


async def _record(target: Target, shape: Shape) -> list[str]:
    """Record the body of one answer, in the parts in which it arrived."""
    _, _, body = Requests(target.model, shape).next().partition(b"\r\n\r\n")
    async with (
        httpx.AsyncClient() as client,
        client.stream(
            "POST", target.url + PATH, content=body, headers={"content-type": "application/json"}
        ) as response,
    ):
        response.raise_for_status()
        parts = [part.decode() async for part in response.aiter_raw()]
    return parts if shape.stream else ["".join(parts)]


@asynccontextmanager
async def dynamo(model: Path) -> AsyncIterator[Target]:
    """Start Dynamo's frontend over two mockers; the frontend stands in the gateway's column."""
    with running_dynamo(model, "tiny") as (port, pids):
        frontend, *mockers = map(psutil.Process, pids)
        kinds = {GATEWAY: [frontend], PREFILL: [mockers[0]], DECODE: [mockers[1]]}
        target = Target("dynamo", "tiny", [(LOOPBACK, port)], {**kinds, OTHERS: []})
        await _until_it_answers(target)
        yield target


async def _until_it_answers(target: Target) -> None:
    _, _, body = Requests(target.model, Shape(2, stream=False)).next().partition(b"\r\n\r\n")
    async with asyncio.timeout(PEER_START_S), httpx.AsyncClient() as client:
        while True:
            try:
                response = await client.post(
                    target.url + PATH, content=body, headers={"content-type": "application/json"}
                )
                if response.is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
