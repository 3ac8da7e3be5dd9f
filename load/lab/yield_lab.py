"""What a batch job costs people by policy alone: gateway, workers and engine core as they are, in virtual time, where
no process takes another one's CPU."""

import asyncio
import io
import os
from collections.abc import Awaitable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import structlog

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import REQUESTS
from load.chaos.clients import Ask, send
from load.chaos.cluster import Cluster
from load.chaos.endless_job import EndlessJob
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net
from load.chaos.stores import Stores
from services.gateway.batch.run import BatchPorts

GATEWAY = "g0"
SETTLE_S = 5.0
"""Before people come: everybody has found everybody, and lines run."""
TELL_S = 1.0


@dataclass(frozen=True, slots=True)
class Scene:
    """The people, the job and the cluster."""

    people: tuple[int, int]
    """Tokens of prompt and answer."""
    line: tuple[int, int]
    per_s: float
    seconds: float
    decode_workers: int


@dataclass(slots=True)
class Seen:
    """What people saw, and what was left to lines."""

    ttft_ms: list[float] = field(default_factory=list)
    lines_per_s: float = 0.0


def run_scene(scene: Scene, *, batch: bool, seed: int) -> Seen:
    """The same seed has the same people come at the same moments."""
    loop = SimLoop(Random(f"{seed} turns"))
    structlog.configure(processors=[_drop])
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            net = Net(loop, Random(f"{seed} network"), Log(loop, None))
            stores = Stores(loop, Random(f"{seed} stores"))
            job: Any = EndlessJob(*scene.line)
            ports = BatchPorts(job, job) if batch else None
            cluster = Cluster(loop, net, stores, engine={"engine": "sim"}, batch=ports)
            return cluster.run(_run(net, stores, cluster, job, scene, seed=seed))
    finally:
        structlog.reset_defaults()


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


async def _run(net: Net, stores: Stores, cluster: Cluster, job: EndlessJob, scene: Scene, *, seed: int) -> Seen:
    loop = cluster.loop
    cluster.start_gateway(GATEWAY)
    cluster.start_worker("p0", "prefill")
    for number in range(scene.decode_workers):
        cluster.start_worker(f"d{number}", "decode")
    await asyncio.sleep(SETTLE_S)
    answered, begun_s = job.answered, loop.time()
    client = Node("client")
    loop.add(client)
    await asyncio.gather(*(loop.spawn(client, asking) for asking in _people(net, client, scene, seed)))
    seen = Seen(lines_per_s=(job.answered - answered) / (loop.time() - begun_s))
    if job.failed or cluster.wrong:
        raise AssertionError(f"{job.failed} lines failed; {cluster.wrong}")
    await asyncio.sleep(TELL_S)
    events = [event for event in stores.records(REQUESTS) if isinstance(event, RequestEvent)]
    seen.ttft_ms = [event.ttft_ns / 1e6 for event in events if event.service_class != BATCH_CLASS]
    return seen


def _people(net: Net, client: Node, scene: Scene, seed: int) -> list[Awaitable[None]]:
    chance, at_s = Random(f"{seed} people"), 0.0
    found: list[Awaitable[None]] = []
    for number in count():
        at_s += chance.expovariate(scene.per_s)
        if at_s > scene.seconds:
            break
        found.append(_ask(net, client, number, at_s, scene.people))
    return found


async def _ask(net: Net, client: Node, number: int, at_s: float, shape: tuple[int, int]) -> None:
    await asyncio.sleep(at_s)
    prompt = tuple(f"{number} {at_s} ".ljust(shape[0], "x").encode())
    ask = Ask(number, prompt, shape[1], temperature=0.0, seed=0, n=1, stream=True, stop="", leaves_after_s=None)
    outcome = await send(net, client, GATEWAY, ask)
    if outcome is None or outcome.kind != "ok":
        raise AssertionError(f"a person was not answered: {outcome}")
