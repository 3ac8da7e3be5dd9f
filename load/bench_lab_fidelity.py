"""How near the lab is to what it stands for: the same trace in the lab and in the system, request by request.

`sim`: against gateway, workers and engine as they are, in virtual time on a network without faults. No CPU's time is in
it, so what differs is the lab's modelling. `live`: against `fulcrum up` with simulated GPUs, over HTTP in real time;
`torch`: against a real engine on this machine's CPU. Those two are run twice: what the lab cannot know (the hop, step
times, the engine's overhead) is calibrated on the first run and judged on the second, beside what the two runs differ
by themselves. At the end one JSON line.
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from libs.lab.traces.generate import generate
from libs.lab.traces.read import read_trace
from libs.lab.traces.request import Trace
from libs.perfmodel.profiles import Profile, profile
from libs.policy.roles import Role
from libs.testing.real_model import real_model_folder
from libs.testing.suite import running_suite
from load.fidelity import (
    Comparison,
    Constants,
    Place,
    Replay,
    as_it_came,
    calibrate,
    compare,
    lab_replay,
    pooled,
    prompt_ids,
    table,
)
from load.fidelity_live import learned_steps, live_replay, settings, sim_settings
from load.fidelity_sim import MEAN_HOP_MS, sim_replay

EXAMPLES: Final = """examples:
  python -m load.bench_lab_fidelity sim                      # all cases, some minutes
  python -m load.bench_lab_fidelity sim --only 1p1d mixed    # two of them
  python -m load.bench_lab_fidelity sim --seeds 2            # each also against itself with other delays
  python -m load.bench_lab_fidelity live --seconds 300       # two runs of a suite with simulated GPUs
  python -m load.bench_lab_fidelity torch --seconds 240      # two runs of SmolLM2 on this machine's cores
"""
MIB: Final = 2**20
PREFILL, DECODE = (Role.PREFILL, 0), (Role.MIXED, 0)


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on a cluster."""

    trace: str
    profile: str
    roles: Sequence[tuple[Role, int]]
    chunk_tokens: int = 2048
    max_sequences: int = 64
    link_gbps: float = 100.0
    kv_mib: int = 0
    """Of a worker; 0: the profile's."""

    def place(self) -> Place:
        """With KV memory in whole MiB, as the sim engine is told it."""
        found: Profile = profile(self.profile)
        memory = (self.kv_mib or found.kv_memory_bytes // MIB) * MIB
        return Place(
            replace(found, kv_memory_bytes=memory), self.roles, self.chunk_tokens, self.max_sequences, self.link_gbps
        )


LLAMA_70B, LLAMA_8B, SMOLLM2 = "llama-70b-tp4-h100", "llama-8b-h100", "smollm2-135m-cpu"
SIM_CASES: Final = {
    "1p1d": Case("poisson:rate=5,isl=1500,osl=100,seconds=80", LLAMA_70B, [PREFILL, DECODE]),
    "1p1d-full": Case("poisson:rate=8,isl=1500,osl=100,seconds=40", LLAMA_70B, [PREFILL, DECODE]),
    "2p2d": Case("gamma:rate=10,cv=2,isl=1500,osl=100,seconds=50", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
    "2p2d-flipflop": Case("flipflop:rate=6,isl=2000,osl=120,seconds=60", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
    "2p2d-little-kv": Case(
        "poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2, kv_mib=4500
    ),
    "2p2d-few-places": Case(
        "poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2, max_sequences=10
    ),
    "mixed": Case("poisson:rate=2,isl=1000,osl=100,seconds=150", LLAMA_70B, [(Role.MIXED, 512)]),
    "2p2d-chats": Case("poisson:rate=8,isl=500,osl=80,seconds=50,sessions=40", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
    "2p2d-mooncake": Case("mooncake_conversation.jsonl@600+300", LLAMA_8B, [PREFILL] * 2 + [DECODE] * 2),
}


def traces_of(text: str, count: int) -> list[Trace]:
    """So many traces of a kind, or a part of a file; none where the file is not there."""
    name, cut, part = text.partition("@")
    if not cut:
        return [generate(text, seed=seed) for seed in range(1, count + 1)]
    path = Path(os.environ.get("FULCRUM_DATA", "")) / name
    if not path.is_file():
        return []
    start_s, seconds = map(float, part.split("+"))
    return [read_trace(path, seed=1, start_s=start_s, seconds=seconds)]


def against_sim(only: Sequence[str], *, traces: int, seeds: int, hop_ms: float) -> dict[str, Any]:
    """Link 1: each case in the simulation of the real code, then in the lab."""
    rows: list[Comparison] = []
    spread: list[Comparison] = []
    for name, case in SIM_CASES.items():
        drawn = traces_of(case.trace, traces) if not only or name in only else []
        if not drawn:
            continue
        place, started_s, count = case.place(), time.perf_counter(), sum(len(each.requests) for each in drawn)
        runs = [[sim_replay(place, each, seed=seed) for each in drawn] for seed in range(seeds)]
        came = [as_it_came(each, run) for each, run in zip(drawn, runs[0], strict=True)]
        lab = [lab_replay(place, each, Constants(hop_ms)) for each in came]
        truth = pooled(runs[0])
        rows.append(compare(name, truth, pooled(lab), count))
        spread += [compare(name, truth, pooled(other), count) for other in runs[1:]]
        print(f"{name}: {time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    print(table(rows, "sim", "lab"))
    if spread:
        print("\n" + table(spread, "sim", "sim, other delays"))
    found = {"hop_ms": hop_ms, "traces": traces, "cases": [row.as_json() for row in rows]}
    return found | {"sim_against_sim": [row.as_json() for row in spread]}


@dataclass(frozen=True, slots=True)
class Live:
    """A case on a suite of processes."""

    case: Case
    arguments: Sequence[str]
    """Of `fulcrum up`."""
    first: Constants
    """Where calibration begins."""
    real: bool = False
    """An engine that computes: its step times are those that the workers of the first run learned."""


LIVE: Final = {
    "live": Live(
        Case("poisson:rate=8,isl=2000,osl=60", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
        ("--engine", "sim", "--prefill", "2", "--decode", "2"),
        Constants(1.0),
    ),
    "torch": Live(
        Case(
            "poisson:rate=0.8,isl=120,osl=24",
            SMOLLM2,
            [PREFILL, DECODE],
            chunk_tokens=512,
            max_sequences=16,
            link_gbps=50.0,
            kv_mib=512,
        ),
        ("--engine", "torch", "--prefill", "1", "--decode", "1"),
        Constants(1.0),
        real=True,
    ),
}
TTFT_MEAN, TPOT_MEAN, P99, TIMES_SPREAD = 0.04, 0.01, 0.10, 1.5
"""Bounds: shares of the live figure, or so many times what two live runs differ by where that is more."""
WARM_UP: Final = "poisson:rate=4,isl=500,osl=20,seconds=8"
MOST_PROMPT: Final = 7_000
"""Of the built-in model's context."""


def against_live(link: str, seconds: float, runs: int, kept: Path | None) -> dict[str, Any]:
    """Links 2 and 3: calibrated on the first run of a suite, judged on each later one."""
    live = LIVE[link]
    trace = _short(generate(f"{live.case.trace},seconds={seconds:g}", seed=1))
    place = live.case.place()
    replays, rows = [], []
    for number in range(runs):
        before = os.getloadavg()[0]
        replays.append(_one_run(live, place, trace))
        loads = f"load average {before:.2f} before, {os.getloadavg()[0]:.2f} after"
        print(f"run {number + 1}: {loads}; sent at most {replays[-1].latest_ns / 1e6:.1f} ms late", flush=True)
        rows.append({"load_before": before, "load_after": os.getloadavg()[0], "late_ms": replays[-1].latest_ns / 1e6})
        if kept is not None:
            kept.write_bytes(pickle.dumps(replays))
    return judged(live, trace, replays) | {"runs": rows}


def judged(live: Live, trace: Trace, replays: Sequence[Replay]) -> dict[str, Any]:
    """Print and return what the runs and the lab differ by."""
    place, first = live.case.place(), replays[0]
    if live.real and first.learned is not None:
        print(f"learned: {first.learned}")
        place = replace(place, profile=replace(place.profile, step_time=first.learned))
    constants = calibrate(place, trace, first, live.first)
    count = len(trace.requests)
    labs = [compare(f"run {n}", run, lab_replay(place, as_it_came(trace, run), constants), count)
            for n, run in enumerate(replays, 1)]  # fmt: skip
    spread = [compare(f"run {n}", first, run, count) for n, run in enumerate(replays[1:], 2)]
    print(f"calibrated on run 1: hop {constants.hop_ms:.2f} ms, {constants.step_ms:+.3f} ms a step")
    print(table(labs, "live", "lab") + "\n\n" + table(spread, "live, run 1", "live"))
    verdicts = [verdict(lab, other) for lab, other in zip(labs[1:], spread, strict=True)]
    for each in verdicts:
        print(", ".join(f"{name} {found['off']:+.2%} of {found['allowed']:.2%} {'met' if found['met'] else 'NOT MET'}"
                        for name, found in each.items()))  # fmt: skip
    return {
        "constants": {"hop_ms": constants.hop_ms, "step_ms": constants.step_ms},
        "lab": [row.as_json() for row in labs],
        "spread": [row.as_json() for row in spread],
        "verdicts": verdicts,
    }


def verdict(lab: Comparison, spread: Comparison) -> dict[str, Any]:
    """What the lab is off by, and what it may be."""
    bounds = {("ttft", "mean"): TTFT_MEAN, ("ttft", "p99"): P99, ("tpot", "mean"): TPOT_MEAN, ("tpot", "p99"): P99}
    found = {}
    for (time_name, of), bound in bounds.items():
        off = getattr(lab, time_name).difference[of]
        allowed = max(bound, TIMES_SPREAD * abs(getattr(spread, time_name).difference[of]))
        found[f"{time_name} {of}"] = {"off": off, "allowed": allowed, "met": abs(off) <= allowed}
    return found


def _one_run(live: Live, place: Place, trace: Trace) -> Replay:
    """On a suite that nothing has run on but a warm-up."""
    with tempfile.TemporaryDirectory(prefix="lab-fidelity-") as folder:
        cache = Path(folder) / "cache"
        env = {**settings(place, trace), **sim_settings(place), "FULCRUM_CACHE": str(cache)}
        model_words = ("--model", str(real_model_folder())) if live.real else ()
        with running_suite(Path(folder), *live.arguments, *model_words, env=env) as suite:
            model = suite.ready["model"] or "sim"
            for seed, each in enumerate((_short(generate(WARM_UP, seed=1)), trace), 2):
                replay = live_replay(suite.gateway, model, place, each, prompt_ids(each, seed=seed))
        return replace(replay, learned=learned_steps(cache, place.profile.step_time))


def _short(trace: Trace) -> Trace:
    """With prompts that fit the context, and two tokens or more to each answer, so that all are handed over."""
    requests = [
        replace(each, input_tokens=min(each.input_tokens, MOST_PROMPT), output_tokens=max(each.output_tokens, 2))
        for each in trace.requests
    ]
    return replace(trace, requests=tuple(requests))


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    links = made.add_subparsers(dest="link", required=True)
    sim = links.add_parser("sim", help="against the real code in virtual time")
    sim.add_argument("--only", choices=SIM_CASES, nargs="*", default=[], metavar="CASE", help=", ".join(SIM_CASES))
    sim.add_argument("--traces", type=int, default=1, help="of each kind, pooled; a file's part is one")
    sim.add_argument("--seeds", type=int, default=1, help="of the network's delays: more show its own spread")
    sim.add_argument("--hop-ms", type=float, default=MEAN_HOP_MS, help="the lab's; the network's own mean by default")
    for name in LIVE:
        live = links.add_parser(name, help="against a suite of processes in real time")
        live.add_argument("--seconds", type=float, default=300.0, help="of load in each run")
        live.add_argument("--runs", type=int, default=2)
        live.add_argument("--keep", type=Path, help="keep what the runs brought in this file")
    return made


def main() -> None:
    """Run a link."""
    asked = parser().parse_args()
    if asked.link == "sim":
        found = against_sim(asked.only, traces=asked.traces, seeds=asked.seeds, hop_ms=asked.hop_ms)
    else:
        found = against_live(asked.link, asked.seconds, asked.runs, asked.keep)
    print(json.dumps({"bench": "lab-fidelity", "link": asked.link} | found))


if __name__ == "__main__":
    main()
