"""Test in virtual time of a capacity plan carried out by the real planner, metrics service and workers."""

import asyncio
import io
import os
from contextlib import redirect_stdout
from random import Random
from typing import Any
from unittest.mock import patch

import structlog

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_SCALE
from libs.contracts.topics import CAPACITY
from libs.demand.wire import plan_message
from libs.model.info import SIM_NAME
from libs.policy.capacity import CapacityPlan, PoolHour
from libs.testing.memory.actuator import MemoryActuator
from load.chaos.clients import ClientCall, check, send
from load.chaos.cluster import Cluster, Stores
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net

SETTLE_S = 8.0
STARTED_S = 20.0
HOUR_S = 3600.0
MODEL = SIM_NAME


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


def plan(cluster: Cluster, prefill: int, decode: int) -> CapacityPlan:
    """Return a plan that needs that many workers for an hour from now on."""
    start_s = cluster.clock.now_ns() / 1e9
    pools = {
        "prefill": (PoolHour(prefill, prefill, prefill, prefill, 0.0),),
        "decode": (PoolHour(decode, decode, decode, decode, 0.0),),
    }
    return CapacityPlan((start_s,), HOUR_S, pools, {}, 0.95, 0)  # type: ignore[arg-type]


async def _ask(net: Net, loop: SimLoop, number: int) -> list[str]:
    client = Node(f"client-{number}")
    loop.add(client)
    prompt = tuple(97 + number * 7 % 26 for _ in range(40))
    ask = ClientCall(number, prompt, 20, temperature=0.0, seed=number, n=1, stream=True, stop="", leaves_after_s=None)
    outcome = await loop.spawn(client, send(net, client, "g0", ask))
    assert outcome is not None and outcome.kind == "ok"
    return check(outcome)


async def _run(net: Net, cluster: Cluster) -> None:
    loop, actuator = cluster.loop, cluster.actuator
    assert isinstance(actuator, MemoryActuator)
    cluster.start_gateway("g0")
    cluster.start_metrics("m0")
    cluster.start_planner("planner-0")
    cluster.start_worker("p0", "prefill")
    cluster.start_worker("d0", "decode")
    await asyncio.sleep(SETTLE_S)
    assert await _ask(net, loop, 1) == []  # its steps teach the planner the capacity of a worker
    await asyncio.sleep(SETTLE_S)
    assert actuator.worker_ids == []
    sent = plan_message(plan(cluster, 2, 2), MODEL, "m0", cluster.clock.now_ns())
    cluster.processes["m0"].bus.publish(CAPACITY, sent)
    await asyncio.sleep(STARTED_S)
    assert sorted(actuator.worker_ids) == ["spare-1", "spare-2"]
    assert {"spare-1", "spare-2"} <= {each.node.name for each in cluster.workers()}
    (why,) = {each.reason_code for each in cluster.processes["planner-0"].decided if each.action == ACTION_SCALE}
    assert why == "forecast"
    assert await _ask(net, loop, 2) == []
    assert cluster.wrong == []


def test_workers_are_ready_before_the_forecast_load_arrives() -> None:
    loop = SimLoop(Random("forecast turns"))
    structlog.configure(processors=[_drop])
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            net = Net(loop, Random("forecast network"), Log(loop, None))
            cluster = Cluster(loop, net, Stores(loop, Random("forecast stores")))
            cluster.actuator = MemoryActuator(
                2,
                on_start=lambda name: cluster.start_worker(name, "standby"),
                on_end=cluster.stop,
            )
            cluster.run(_run(net, cluster))
    finally:
        structlog.reset_defaults()
