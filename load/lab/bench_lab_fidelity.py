"""The lab against the system that it simulates: the same trace in both, request by request.

`sim` compares with gateway, workers and engine as they are, in virtual time on a network without faults. With equal
delays of all messages the lab must decide and time alike; with drawn delays it is held against the difference
between two simulations. `live` compares with `fulcrum up` with simulated GPUs, over HTTP in real time; `torch` with
an engine that computes, on this machine's CPU. Those two run several times: unknown constants (the hop, step times,
the workers' CPU time) are calibrated on the first run and judged on the others, beside the difference between runs of
one trace. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent
from libs.contracts.topics import REQUESTS
from libs.lab.experiment import DEFAULT_BLOCK_TOKENS, LOOKUP_MS
from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace
from libs.model.info import SIM_EOS, SIM_VOCAB_SIZE, sim_tokenizer
from libs.policy.roles import Role
from libs.testing.engines.real_model import real_model_folder
from load.chaos.clients import ClientCall, send
from load.chaos.cluster import Cluster, Stores
from load.chaos.loop import Node, SimLoop, replayable
from load.chaos.net import Log, Net
from load.chaos.suite import GATEWAY, KV_LEASE_MS, SETTLE_S, TELEMETRY_MS
from load.lab.fidelity import (
    LIVE,
    SIM_CASES,
    WARM_UP,
    ClusterShape,
    Comparison,
    Constants,
    Live,
    Replay,
    Served,
    as_it_came,
    calibrate,
    compare,
    is_there,
    lab_replay,
    live_trace,
    pooled,
    prompt_ids,
    short,
    table,
    trace_of,
    verdict,
)
from load.lab.fidelity_live import LiveRun, learned_steps, live_replay, settings, sim_settings
from load.setup import bench_suite

# After the last answer, for events to be published.
REPORT_S: Final = 2.0
CONTEXT_TOKENS: Final = 131_072
# Round trip: the mean of `load.chaos.cluster`.
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
    with replayable(seed) as loop, tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "sim")
        with patch.dict(os.environ, {"FULCRUM_GATEWAY_MODELS": json.dumps({"sim": str(model)})}):
            chance, log = Random(f"{seed} network"), Log(loop, None)
            net = Net(loop, chance, log) if hop_ms is None else EvenNet(loop, chance, log, hop_ms)
            stores = (Stores if hop_ms is None else EvenStores)(loop, Random(f"{seed} stores"))
            cluster = Cluster(loop, net, stores, engine=_engine(place, trace, model))
            return cluster.run(_run(net, stores, cluster, place, trace))


def write_model(folder: Path) -> Path:
    """Create a model folder for the sim engine: the built-in vocabulary, with `CONTEXT_TOKENS` of context."""
    folder.mkdir()
    config = {"max_position_embeddings": CONTEXT_TOKENS, "vocab_size": SIM_VOCAB_SIZE, "eos_token_id": SIM_EOS}
    (folder / "config.json").write_text(json.dumps(config))
    sim_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"")  # the sim engine never reads its content
    return folder


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
        call = ClientCall(
            number, prompt, request.output_tokens, temperature=0.0, seed=0, n=1, stream=False, stop="",
            leaves_after_s=None,
        )  # fmt: skip
        outcome = await send(net, client, GATEWAY, call)
        if outcome is None or outcome.kind != "ok":
            raise AssertionError(f"request {number} was not answered: {outcome.kind if outcome else 'refused'}")

    await asyncio.gather(*(cluster.loop.spawn(client, ask(each.number)) for each in trace.requests))
    preemptions = sum(each.worker.host.engine.load().preemptions for each in cluster.workers() if each.worker)
    await asyncio.sleep(REPORT_S)
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


EXAMPLES: Final = """examples:
  python -m load.lab.bench_lab_fidelity sim                               # all cases, some minutes
  python -m load.lab.bench_lab_fidelity sim --only 1p1d mixed             # two of them
  python -m load.lab.bench_lab_fidelity live --seconds 105 --seeds 1 2 2  # calibrated on the first run
"""
# The start of calibration.
FIRST: Final = Constants(1.0, LOOKUP_MS)


def against_sim(only: Sequence[str], *, seeds: int) -> dict[str, Any]:
    """Compare each case in the simulation of the real code and in the lab: with equal delays, then with drawn ones."""
    even, drawn, itself = list[Comparison](), list[Comparison](), list[Comparison]()
    for name, case in SIM_CASES.items():
        if (only and name not in only) or not is_there(case.trace):
            continue
        place, trace, started_s = case.place(), trace_of(case.trace), time.perf_counter()
        count, constants = len(trace.requests), Constants(MEAN_HOP_MS, EVEN_STORE_MS)

        def in_lab(run: Replay, place: ClusterShape = place, trace: Trace = trace) -> Replay:
            return lab_replay(place, as_it_came(trace, run), constants)  # noqa: B023

        run = sim_replay(place, trace, hop_ms=MEAN_HOP_MS)
        even.append(compare(name, run, in_lab(run), count))
        runs = [sim_replay(place, trace, seed=seed) for seed in range(1, seeds + 1)]
        together = pooled(runs)
        drawn.append(compare(name, together, pooled([in_lab(run) for run in runs]), count * seeds))
        itself += [compare(name, one, other, count) for one, other in combinations(runs, 2)]
        print(f"{name}: {time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    for title, rows, second in (
        ("equal delays", even, "lab"),
        ("drawn delays", drawn, "lab"),
        ("drawn delays, twice", itself, "simulation again"),
    ):
        if rows:
            print(f"{title}\n\n{table(rows, 'simulation', second)}\n")
    return {
        "hop_ms": MEAN_HOP_MS,
        "lookup_ms": EVEN_STORE_MS,
        "equal_delays": [row.as_json() for row in even],
        "drawn_delays": [row.as_json() for row in drawn],
        "simulation_against_itself": [row.as_json() for row in itself],
    }


def run_live(link: str, seconds: float, seed: int) -> LiveRun:
    """Run a trace on a fresh suite, after a warm-up only."""
    live = LIVE[link]
    place, trace, before = live.case.place(), live_trace(live, seconds, seed), os.getloadavg()[0]
    model_words = ("--model", str(real_model_folder())) if live.real else ()
    with bench_suite(*live.arguments, *model_words, env=settings(place, trace) | sim_settings(place)) as suite:
        model = suite.ready["model"] or "sim"
        for prompts, each in enumerate((short(generate(WARM_UP, seed=1)), trace), 2):
            replay = live_replay(suite.gateway, model, place, each, prompt_ids(each, seed=prompts))
        learned = learned_steps(Path(suite.env["FULCRUM_CACHE"]), place.profile.step_time)
    replay = replace(replay, learned=learned)
    kept = LiveRun(link, seconds, seed, replay, before, os.getloadavg()[0])
    print(
        f"{link}, seed {seed}: {len(replay.served)} of {len(trace.requests)} requests, sent at most"
        f" {replay.latest_ns / 1e6:.1f} ms late; load average {before:.2f} before, {kept.load_after:.2f} after"
    )
    return kept


def judged(runs: Sequence[LiveRun]) -> dict[str, Any]:
    """Compare the lab with each run, calibrated on the first, and runs of one trace with each other."""
    first, live = runs[0], LIVE[runs[0].link]
    place = _learned(live, first)
    constants = calibrate(place, first.trace, first.replay, FIRST)
    names = [f"run {number}, seed {run.seed}" for number, run in enumerate(runs, 1)]
    labs = [
        compare(name, run.replay, lab_replay(place, as_it_came(run.trace, run.replay), constants), _count(run))
        for name, run in zip(names, runs, strict=True)
    ]
    spread = {
        (one, other): compare(
            f"{names[one]} and {names[other]}", runs[one].replay, runs[other].replay, _count(runs[one])
        )
        for one, other in combinations(range(len(runs)), 2)
        if (runs[one].seed, runs[one].seconds) == (runs[other].seed, runs[other].seconds)
    }
    print(
        f"calibrated on run 1: hop {constants.hop_ms:.2f} ms, look-up {constants.lookup_ms:.2f} ms,"
        f" {constants.gateway_ms:+.2f} ms in the gateway, {constants.step_ms:+.3f} ms a step\n"
        f"\n{table(labs, first.link, 'lab')}\n"
    )
    if spread:
        print(table(list(spread.values()), first.link, f"{first.link} again"), end="\n\n")
    verdicts = {}
    for number, (name, lab) in enumerate(zip(names, labs, strict=True)):
        if number:
            near = [each for pair, each in spread.items() if number in pair] or list(spread.values())
            verdicts[name] = verdict(lab, near)
            for time_name, found in verdicts[name].items():
                word = "met" if found["met"] else "NOT MET"
                print(f"{name}: {time_name} {found['off']:+.2%} of {found['allowed']:.2%} {word}")
    return {
        "constants": asdict(constants),
        "step_time": str(place.profile.step_time),
        "runs": [
            {"load_before": run.load_before, "load_after": run.load_after, "late_ms": run.replay.latest_ns / 1e6}
            for run in runs
        ],
        "lab": [row.as_json() for row in labs],
        "spread": [row.as_json() for row in spread.values()],
        "verdicts": verdicts,
    }


def _learned(live: Live, first: LiveRun) -> Any:
    place = live.case.place()
    if live.real and first.replay.learned is not None:
        place = replace(place, profile=replace(place.profile, step_time=first.replay.learned))
    return place


def _count(run: LiveRun) -> int:
    return len(run.trace.requests)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "links", nargs="+", choices=["sim", *LIVE, "all"], metavar="LINK", help=f"sim, {', '.join(LIVE)}, or all"
    )
    made.add_argument(
        "--only", choices=SIM_CASES, nargs="*", default=[], metavar="CASE", help=f"of sim: {', '.join(SIM_CASES)}"
    )
    made.add_argument("--drawn", type=int, default=2, help="runs of sim with drawn delays")
    made.add_argument("--seconds", type=float, default=60.0, help="of load in each live run")
    made.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 1, 2], help="of the traces of live runs, the first calibrates"
    )
    return made


def main() -> None:
    options = parser().parse_args()
    found: dict[str, Any] = {}
    for link in ("sim", "live", "torch") if "all" in options.links else options.links:
        if link == "sim":
            found[link] = against_sim(options.only, seeds=options.drawn)
        else:
            found[link] = judged([run_live(link, options.seconds, seed) for seed in options.seeds])
    print(json.dumps({"bench": "lab-fidelity"} | found))


if __name__ == "__main__":
    main()
