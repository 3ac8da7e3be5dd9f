"""Test in virtual time that a worker's measured chunk keeps its promise: prompts fill its steps, however late they
come."""

import asyncio
import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from random import Random
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import REQUESTS
from libs.perfmodel.profiles import profile
from libs.policy.worker.saturation import MOST_TOKENS, knee_of
from load.chaos.clients import ClientCall, send
from load.chaos.cluster import Cluster, Stores
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net

SIM_PROFILE = "llama3.1-8b-h100-aic"
SECONDS = 10.0
DEFAULT_TOKENS = 512
PLATEAU_SHARE = 0.75
MEDIAN_TOKENS, SPREAD, MOST_PROMPT_TOKENS = 600, 0.8, 4096
GATEWAY, PREFILL = "g0", "p0"
# Until gateway and workers have found one another.
SETTLE_S = 3.0
REPORT_S = 1.0


def ttft_s(
    load: Sequence[tuple[float, int]], *, sim_profile: str, chunk_tokens: int, late_s: float = 0.0
) -> list[float]:
    """Return the TTFT of each (arrival in s, prompt tokens), with one prefill worker of this chunk size.

    Every message from and to that worker takes up to `late_s` longer, as on busy cores.
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
    await asyncio.sleep(REPORT_S)
    if cluster.wrong:
        raise AssertionError(cluster.wrong)
    return [event.ttft_ns / 1e9 for event in stores.records(REQUESTS) if isinstance(event, RequestEvent)]


async def _ask(net: Net, client: Node, number: int, at_s: float, prompt_tokens: int) -> None:
    await asyncio.sleep(at_s)
    prompt = tuple(f"{number} {at_s} ".ljust(prompt_tokens, "x")[:prompt_tokens].encode())
    ask = ClientCall(number, prompt, 1, temperature=0.0, seed=0, n=1, stream=False, stop="", leaves_after_s=None)
    outcome = await send(net, client, GATEWAY, ask)
    if outcome is None or outcome.kind != "ok":
        raise AssertionError(f"a prompt was not answered: {outcome}")


def arrivals(tokens_per_s: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """Draw Poisson arrivals of prompts with log-normal lengths."""
    random, found, at_s = np.random.default_rng(seed), [], 0.0
    lengths = np.clip(random.lognormal(np.log(MEDIAN_TOKENS), SPREAD, 100_000), 16, MOST_PROMPT_TOKENS)
    per_s = tokens_per_s / float(lengths.mean())
    for length in lengths:
        at_s += random.exponential(1 / per_s)
        if at_s > seconds:
            break
        found.append((at_s, int(length)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 0.02, 0.04])
def test_at_high_load_the_measured_chunk_has_a_better_ttft_than_small_and_large_chunks(late_s: float) -> None:
    choice, plateau = knee_of(profile(SIM_PROFILE).step_time, MOST_TOKENS)
    load = arrivals(PLATEAU_SHARE * plateau, SECONDS, seed=2)

    def mean_s(chunk_tokens: int) -> float:
        return mean(ttft_s(load, sim_profile=SIM_PROFILE, chunk_tokens=chunk_tokens, late_s=late_s))

    best = mean_s(choice)
    assert best <= 1.05 * mean_s(MOST_TOKENS)
    assert best <= 0.75 * mean_s(DEFAULT_TOKENS)
