"""Test in virtual time of how soon a frozen or stuck worker is routed around: gateway, workers and engine core share
a clock, and one of two workers freezes at a time drawn from a seed."""

import asyncio
import io
import os
from contextlib import redirect_stdout
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import structlog

from load.chaos.clients import ClientCall, Outcome, check, send
from load.chaos.cluster import Cluster, Stores
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net

NOTICED_S = 0.5
"""A frozen worker is routed around within this time, and no client waits longer for it."""
SETTLE_S = 3.0
STILL_S = 3.0
LOOK_S = 0.001
MET_S = 0.1
"""The worker has running requests then: otherwise no client waits that long."""
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
REQUESTS = 40
PER_S = 20.0
TOKENS = 60
SEEDS = range(2)


@dataclass
class Seen:
    """The results of one run."""

    longest_wait_s: float
    left_after_s: float


def run(seed: int, still: str, *, pings: bool) -> Seen:
    """`still`: the frozen worker; `pings`: whether its connections stay alive, like those of a process whose loop
    alone is stuck."""
    loop = SimLoop(Random(f"{seed} turns"))
    structlog.configure(processors=[_drop])
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            net = Net(loop, Random(f"{seed} network"), Log(loop, None))
            cluster = Cluster(loop, net, Stores(loop, Random(f"{seed} stores")))
            return cluster.run(_run(net, cluster, seed, still, pings=pings))
    finally:
        structlog.reset_defaults()


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


async def _run(net: Net, cluster: Cluster, seed: int, still: str, *, pings: bool) -> Seen:
    loop = cluster.loop
    cluster.start_gateway("g0")
    for name, role in ROLES.items():
        cluster.start_worker(name, role)
    await asyncio.sleep(SETTLE_S)
    client, random = Node("client"), Random(f"{seed} people")
    loop.add(client)
    asking = [loop.spawn(client, _ask(net, client, number, random.randbytes(60))) for number in range(REQUESTS)]
    await asyncio.sleep(random.uniform(0.5, 1.5))
    left_after_s = await _stand_still(cluster, still, pings=pings)
    outcomes = await asyncio.gather(*asking)
    assert [fault for outcome in outcomes for fault in check(outcome)] == []
    assert {outcome.kind for outcome in outcomes} == {"ok"}
    assert cluster.wrong == []
    return Seen(max(outcome.longest_wait_s for outcome in outcomes), left_after_s)


async def _stand_still(cluster: Cluster, name: str, *, pings: bool) -> float:
    """Return the time until its gateway has given it up."""
    loop, gateway = cluster.loop, cluster.processes["g0"].gateway
    assert gateway is not None
    (link,) = [link for link in gateway.fleet.links if link.id == name]
    if pings:
        cluster.processes[name].node.frozen = True
    else:
        cluster.freeze(name)
    began_s = loop.time()
    loop.after(STILL_S, cluster.thaw, name)
    while link.connected:
        await asyncio.sleep(LOOK_S)
    return loop.time() - began_s


async def _ask(net: Net, client: Node, number: int, opening: bytes) -> Outcome:
    await asyncio.sleep(number / PER_S)
    prompt = tuple(97 + byte % 26 for byte in opening)
    ask = ClientCall(
        number, prompt, TOKENS, temperature=0.8, seed=number, n=1, stream=True, stop="", leaves_after_s=None
    )
    outcome = await send(net, client, "g0", ask)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("pings", [False, True], ids=["frozen", "stuck"])
@pytest.mark.parametrize("still", ["p0", "d0"])
def test_clients_wait_at_most_half_a_second_for_a_frozen_worker(still: str, pings: bool) -> None:
    for seed in SEEDS:
        seen = run(seed, still, pings=pings)
        assert MET_S < seen.longest_wait_s <= NOTICED_S
        assert seen.left_after_s <= NOTICED_S
