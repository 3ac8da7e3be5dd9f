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
import sys
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
from load.fidelity import Comparison, Place, as_it_came, compare, lab_replay, table
from load.fidelity_sim import MEAN_HOP_MS, sim_replay

EXAMPLES: Final = """examples:
  python -m load.bench_lab_fidelity sim                      # all cases, some minutes
  python -m load.bench_lab_fidelity sim --only 1p1d mixed    # two of them
  python -m load.bench_lab_fidelity sim --seeds 2            # each also against itself, with other delays on the network
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


LLAMA_70B, LLAMA_8B = "llama-70b-tp4-h100", "llama-8b-h100"
SIM_CASES: Final = {
    "1p1d": Case("poisson:rate=5,isl=1500,osl=100,seconds=80", LLAMA_70B, [PREFILL, DECODE]),
    "1p1d-full": Case("poisson:rate=8,isl=1500,osl=100,seconds=40", LLAMA_70B, [PREFILL, DECODE]),
    "2p2d": Case("gamma:rate=10,cv=2,isl=1500,osl=100,seconds=50", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
    "2p2d-flipflop": Case("flipflop:rate=6,isl=2000,osl=120,seconds=60", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
    "2p2d-little-kv": Case(
        "poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2, kv_mib=6000
    ),
    "2p2d-few-places": Case(
        "poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2, max_sequences=10
    ),
    "mixed": Case("poisson:rate=2,isl=1000,osl=100,seconds=150", LLAMA_70B, [(Role.MIXED, 512)]),
    "2p2d-chats": Case("poisson:rate=8,isl=500,osl=80,seconds=50,sessions=40", LLAMA_70B, [PREFILL] * 2 + [DECODE] * 2),
    "2p2d-mooncake": Case("mooncake_conversation.jsonl@600+300", LLAMA_8B, [PREFILL] * 2 + [DECODE] * 2),
}


def trace_of(text: str) -> Trace | None:
    """A generated trace, or a part of a file; None where the file is not there."""
    name, cut, part = text.partition("@")
    if not cut:
        return generate(text, seed=1)
    path = Path(os.environ.get("FULCRUM_DATA", "")) / name
    if not path.is_file():
        return None
    start_s, seconds = map(float, part.split("+"))
    return read_trace(path, seed=1, start_s=start_s, seconds=seconds)


def against_sim(only: Sequence[str], seeds: int, hop_ms: float) -> dict[str, Any]:
    """Link 1: each case in the simulation of the real code, then in the lab."""
    rows: list[Comparison] = []
    spread: list[Comparison] = []
    for name, case in SIM_CASES.items():
        trace = trace_of(case.trace) if not only or name in only else None
        if trace is None:
            continue
        place, started_s = case.place(), time.perf_counter()
        runs = [sim_replay(place, trace, seed=seed) for seed in range(seeds)]
        lab = lab_replay(place, as_it_came(trace, runs[0]), hop_ms)
        rows.append(compare(name, runs[0], lab, len(trace.requests)))
        spread += [compare(name, runs[0], other, len(trace.requests)) for other in runs[1:]]
        print(f"{name}: {time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    print(table(rows, "sim", "lab"))
    if spread:
        print("\n" + table(spread, "sim", "sim, other delays"))
    found = {"hop_ms": hop_ms, "cases": [row.as_json() for row in rows]}
    return found | {"sim_against_sim": [row.as_json() for row in spread]}


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    links = made.add_subparsers(dest="link", required=True)
    sim = links.add_parser("sim", help="against the real code in virtual time")
    sim.add_argument("--only", choices=SIM_CASES, nargs="*", default=[], metavar="CASE", help=", ".join(SIM_CASES))
    sim.add_argument("--seeds", type=int, default=1, help="of the network's delays: more show its own spread")
    sim.add_argument("--hop-ms", type=float, default=MEAN_HOP_MS, help="the lab's; the network's own mean by default")
    return made


def main() -> None:
    """Run a link."""
    asked = parser().parse_args()
    print(
        json.dumps({"bench": "lab-fidelity", "link": asked.link} | against_sim(asked.only, asked.seeds, asked.hop_ms))
    )


if __name__ == "__main__":
    main()
