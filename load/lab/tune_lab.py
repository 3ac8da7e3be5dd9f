"""How a chunk size changes TTFT: the live gateway, workers and engine core in virtual time, where no process takes
another one's CPU and a hand-over takes exactly its set time."""

import asyncio
import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from random import Random
from typing import Any
from unittest.mock import patch

import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import REQUESTS
from load.chaos.clients import Ask, send
from load.chaos.cluster import Cluster
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net
from load.chaos.stores import Stores

GATEWAY, PREFILL = "g0", "p0"
SETTLE_S = 3.0
"""Before anybody comes: everybody has found everybody."""
TELL_S = 1.0


def ttft_s(
    load: Sequence[tuple[float, int]], *, sim_profile: str, chunk_tokens: int, late_s: float = 0.0
) -> list[float]:
    """Of each (moment in s, prompt tokens), with one prefill worker of this chunk size.

    `late_s`: every message from and to that worker takes 0 to so much longer, as where cores are busy.
    """
    loop = SimLoop(Random("turns"))
    structlog.configure(processors=[_drop])
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            engine = {"engine": "sim", "sim_profile": sim_profile, "prefill_chunk_tokens": chunk_tokens}
            net, stores = Net(loop, Random("network"), Log(loop, None)), Stores(loop, Random("stores"))
            cluster = Cluster(loop, net, stores, engine=engine)
            return cluster.run(_run(net, stores, cluster, load, late_s))
    finally:
        structlog.reset_defaults()


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


async def _run(
    net: Net, stores: Stores, cluster: Cluster, load: Sequence[tuple[float, int]], late_s: float
) -> list[float]:
    cluster.start_gateway(GATEWAY)
    cluster.start_worker(PREFILL, "prefill")
    cluster.start_worker("d0", "decode")
    await asyncio.sleep(SETTLE_S)
    net.slow_s[PREFILL] = late_s
    client = Node("client")
    cluster.loop.add(client)
    asking = (_ask(net, client, number, *arrival) for number, arrival in enumerate(load))
    await asyncio.gather(*(cluster.loop.spawn(client, each) for each in asking))
    await asyncio.sleep(TELL_S)
    if cluster.wrong:
        raise AssertionError(cluster.wrong)
    return [event.ttft_ns / 1e9 for event in stores.records(REQUESTS) if isinstance(event, RequestEvent)]


async def _ask(net: Net, client: Node, number: int, at_s: float, prompt_tokens: int) -> None:
    await asyncio.sleep(at_s)
    prompt = tuple(f"{number} {at_s} ".ljust(prompt_tokens, "x")[:prompt_tokens].encode())
    ask = Ask(number, prompt, 1, temperature=0.0, seed=0, n=1, stream=False, stop="", leaves_after_s=None)
    outcome = await send(net, client, GATEWAY, ask)
    if outcome is None or outcome.kind != "ok":
        raise AssertionError(f"a prompt was not answered: {outcome}")
