"""A trace through gateway, workers and engine as they are, in virtual time and without faults."""

import asyncio
import gc
import io
import json
import os
import random as global_random
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent
from libs.contracts.topics import REQUESTS
from libs.lab.experiment import DEFAULT_BLOCK_TOKENS
from libs.lab.traces.request import Trace
from libs.model.info import SIM_EOS, SIM_VOCAB_SIZE, sim_tokenizer
from libs.policy.roles import Role
from load.chaos.clients import Ask, send
from load.chaos.cluster import Cluster
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net
from load.chaos.stores import Stores
from load.lab.fidelity import ClusterShape, Replay, Served, prompt_ids

# Before the first request, for processes to find one another.
SETTLE_S: Final = 3.0
# After the last answer, for events to be published.
TELL_S: Final = 2.0
KV_LEASE_MS: Final = 30_000
CONTEXT_TOKENS: Final = 131_072
TELEMETRY_MS: Final = 100
GATEWAY: Final = "g0"
# Round trip: the mean of `load.chaos.stores`.
EVEN_STORE_MS: Final = 0.75
# The mean of `load.chaos.net`: 0.1 ms, and 0.2 ms more in the mean.
MEAN_HOP_MS: Final = 0.3


class EvenNet(Net):
    """A network on which every message takes equally long, as in the lab."""

    def __init__(self, loop: SimLoop, random: Random, log: Log, hop_ms: float) -> None:
        super().__init__(loop, random, log)
        self.hop_s = hop_ms / 1e3

    def delay_s(self, one: Node, other: Node) -> float:
        return self.hop_s


class EvenStores(Stores):
    """Stores on which every call takes equally long."""

    async def _travel(self) -> None:
        await self._pass(EVEN_STORE_MS / 2 / 1e3)

    async def _travel_late(self) -> None:
        await self._travel()


def sim_replay(place: ClusterShape, trace: Trace, *, seed: int = 0, hop_ms: float | None = None) -> Replay:
    """Replay the trace on the simulated cluster; `seed` draws delays of the network and turns of processes.

    With `hop_ms` every message takes exactly that long.
    """
    global_random.seed(seed)
    loop = SimLoop(Random(f"{seed} turns"))
    structlog.configure(processors=[_drop])
    gc.disable()  # finalizers would run at random moments
    try:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            model = write_model(Path(folder) / "sim")
            models = {"FULCRUM_GATEWAY_MODELS": json.dumps({"sim": str(model)})}
            with patch.object(os, "getpid", lambda: 1), patch.dict(os.environ, models):
                chance, log = Random(f"{seed} network"), Log(loop, None)
                net = Net(loop, chance, log) if hop_ms is None else EvenNet(loop, chance, log, hop_ms)
                stores = (Stores if hop_ms is None else EvenStores)(loop, Random(f"{seed} stores"))
                cluster = Cluster(loop, net, stores, engine=_engine(place, trace, model))
                return cluster.run(_run(net, stores, cluster, place, trace))
    finally:
        gc.enable()
        structlog.reset_defaults()


def write_model(folder: Path) -> Path:
    """Create a model folder for the sim engine: the built-in vocabulary, with `CONTEXT_TOKENS` of context."""
    folder.mkdir()
    config = {"max_position_embeddings": CONTEXT_TOKENS, "vocab_size": SIM_VOCAB_SIZE, "eos_token_id": SIM_EOS}
    (folder / "config.json").write_text(json.dumps(config))
    sim_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"")  # the sim engine never reads its content
    return folder


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


def _engine(place: ClusterShape, trace: Trace, model: Path) -> dict[str, Any]:
    budgets = {budget for role, budget in place.roles if budget}
    return {
        "engine": "sim",
        "model_path": str(model),
        "sim_profile": place.profile.name,
        "sim_kv_memory_mb": place.profile.kv_memory_bytes // 2**20,
        "sim_link_gbps": place.link_gbps,
        "prefill_chunk_tokens": place.chunk_tokens,
        "max_sequences": place.max_sequences,
        "block_size_tokens": trace.block_tokens or DEFAULT_BLOCK_TOKENS,
        "kv_lease_ms": KV_LEASE_MS,
        "telemetry_ms": TELEMETRY_MS,
    } | ({"budget_tokens": budgets.pop()} if budgets else {})


async def _run(net: Net, stores: Stores, cluster: Cluster, place: ClusterShape, trace: Trace) -> Replay:
    cluster.start_gateway(GATEWAY)
    for index, (role, budget) in enumerate(place.roles):
        cluster.start_worker(f"w{index}", "prefill" if role is Role.PREFILL else "mixed" if budget else "decode")
    await asyncio.sleep(SETTLE_S)
    if isinstance(net, EvenNet):
        await asyncio.sleep(_until_in_phase_s(cluster, net, trace))
    client = Node("client")
    cluster.loop.add(client)
    prompts = prompt_ids(trace)
    places = {each.number: place for place, each in enumerate(trace.requests)}

    async def ask(number: int) -> None:
        request = trace.requests[places[number]]
        await asyncio.sleep(request.arrival_ns / 1e9)
        prompt = tuple(prompts[places[number]])
        asked = Ask(
            number, prompt, request.output_tokens, temperature=0.0, seed=0, n=1, stream=False, stop="",
            leaves_after_s=None,
        )  # fmt: skip
        outcome = await send(net, client, GATEWAY, asked)
        if outcome is None or outcome.kind != "ok":
            raise AssertionError(f"request {number} was not answered: {outcome.kind if outcome else 'refused'}")

    await asyncio.gather(*(cluster.loop.spawn(client, ask(each.number)) for each in trace.requests))
    preemptions = sum(each.worker.host.engine.load().preemptions for each in cluster.workers() if each.worker)
    await asyncio.sleep(TELL_S)
    if cluster.wrong or net.faults:
        raise AssertionError((cluster.wrong, net.faults))
    events = [event for event in stores.records(REQUESTS) if isinstance(event, RequestEvent)]
    served = {
        int(event.request_id.removeprefix("request-")): _served(event)
        for event in events
        if event.outcome == OUTCOME_OK
    }
    return Replay(served, preemptions)


def _until_in_phase_s(cluster: Cluster, net: EvenNet, trace: Trace) -> float:
    """Return the delay after which the trace's first request reaches the gateway just as workers publish telemetry
    with their load, as in the lab.
    """
    arrives_s = cluster.loop.time() + trace.requests[0].arrival_ns / 1e9 + net.hop_s
    begun_s = min(each.served_s or 0.0 for each in cluster.workers())
    return (begun_s - arrives_s) % (TELEMETRY_MS / 1e3)


def _served(event: RequestEvent) -> Served:
    later = event.output_tokens - 1
    return Served(
        event.arrival_unix_ns,
        event.ttft_ns,
        event.decode_ns / later if later else 0.0,
        event.prefill_worker,
        event.decode_worker,
        event.cached_tokens,
    )
