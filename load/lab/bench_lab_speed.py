"""The speed of the lab, plain and compiled, on one core, beside DynoSim over the same trace in the same run.

An hour of mooncake_conversation on 16 workers, in chunks of 8,192 prompt tokens. Times are CPU seconds of one
pinned process, with the reading of the trace and without the start of Python; the best of the rounds counts. Then
follow both simulators with equal step times. The last line is JSON.
Needs FULCRUM_DATA. `make peer-dynamo` adds DynoSim, and a C compiler the compiled rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from deploy.compile import ROOT, build, missing
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import Hardware, resolve
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.lab.traces.read import read_trace
from libs.policy.step_time import StepTimeModel
from load.measure import show, titled_table
from load.peers.dynamo_suite import python as peer_python

TRACE: Final = "mooncake_conversation.jsonl"
BLOCK_TOKENS: Final = 512
BLOCKS: Final = 860
CHUNK_TOKENS: Final = 8192
MAX_SEQUENCES: Final = 256
SLO: Final = "ttft=max(2s,3x),tpot=50ms"
# DynoSim's router with the knowledge of the lab's policy: cached prefixes, or nothing of them.
ROUTERS: Final = {"fulcrum": "kv_router", "static": "round_robin"}
# Straight lines, which DynoSim's tables hold exactly: prefill by tokens of a step, decode by tokens of KV.
EQUAL: Final = StepTimeModel(
    prefill_fixed_ns=10e6, prefill_token_ns=25_000, prefill_token_squared_ns=0.0,
    decode_fixed_ns=6e6, decode_sequence_ns=0.0, decode_kv_token_ns=50.0, interference=1.0,
)  # fmt: skip
AIM_PLAIN, AIM_COMPILED = 0.3, 1.5


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the lab, in a process of its own."""

    prefill: int = 9
    decode: int = 7
    policy: str = "fulcrum"
    seconds: float = 3600.0
    equal: bool = False
    """True if step times are `EQUAL` and hops and KV transfers take no time, as in DynoSim."""
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


def main() -> None:
    options = _arguments()
    if options.child:
        print(json.dumps(_run(Job(**json.loads(options.child)))))
        return
    if not os.environ.get("FULCRUM_DATA"):
        raise SystemExit("FULCRUM_DATA has to name the folder with the traces: see docs/data.md")
    folders = {"plain": ROOT}
    if lacking := missing():
        print(f"no compiled rows: {lacking}", file=sys.stderr)
    else:
        build(options.compiled)
        folders["compiled"] = options.compiled.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        speed = _speed(folders, options.rounds) if "speed" in options.parts else []
        equal = _equal(folders, Path(scratch)) if "equal" in options.parts else []
        shown = [_speed_table(speed)] if speed else []
        shown += [_equal_table(equal)] if equal else []
        show(*shown)
    print(json.dumps({"bench": "lab-speed", "cores": os.cpu_count(), "speed": speed, "equal": equal}))


# ---------------------------------------------------------------- one run


def _run(job: Job) -> dict[str, Any]:
    """Run in this process; return CPU time with the reading of the trace, and the figures."""
    quiet()
    cpu, wall = time.process_time(), time.perf_counter()
    trace = read_trace(_trace(), seed=1, seconds=job.seconds)
    experiment = Experiment(
        trace, _equal_hardware() if job.equal else resolve("llama-3.1-8b", "h100"), job.workers, parse_slo(SLO),
        chunk_tokens=job.chunk_tokens,
    )  # fmt: skip
    if job.equal:
        experiment = replace(experiment, hop_ms=0.0, link_gbps=1e9)
    report, result = run(experiment, policy_named(f"{job.policy}:{job.prefill}:{job.decode}", job.workers))
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    inputs = sum(answer.request.input_tokens for answer in result.answers)
    return {
        "cpu_s": cpu_s, "wall_s": wall_s, "virtual_s": report.virtual_s, "requests": report.score.requests,
        "completed": report.score.completed, "events": report.events, "ttft_s": report.score.ttft_s,
        "tpot_s": report.score.tpot_s, "reused": sum(answer.cached_tokens for answer in result.answers) / inputs,
    }  # fmt: skip


def _trace() -> Path:
    return Path(os.environ["FULCRUM_DATA"]) / TRACE


def _equal_hardware() -> Hardware:
    found = resolve("llama-3.1-8b", "h100").profile
    memory = BLOCKS * BLOCK_TOKENS * found.kv_bytes_per_token
    return Hardware(replace(found, name="equal", step_time=EQUAL, kv_memory_bytes=memory), mixed_measured=False)


def _lab(folder: Path, job: Job) -> dict[str, Any]:
    """Run with the `libs` of a folder, on one core."""
    command = [sys.executable, "-m", "load.lab.bench_lab_speed", "--child", json.dumps(asdict(job))]
    paths = dict.fromkeys((str(folder), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), **_ONE_THREAD}
    return _last_line(command, folder, environment)


def _dynosim(router: str, profile: Path | None, trace: Path | None = None) -> dict[str, Any] | None:
    """Replay the same trace in DynoSim, or one written for it; return None if DynoSim is not installed."""
    if not peer_python().is_file():
        print("no rows of DynoSim: `make peer-dynamo` installs it", file=sys.stderr)
        return None
    options = {
        "trace": str(trace or _trace()), "block_tokens": BLOCK_TOKENS, "prefill": 9, "decode": 7, "blocks": BLOCKS,
        "chunk_tokens": CHUNK_TOKENS, "max_sequences": MAX_SEQUENCES, "router": router, "ttft_ms": 2000, "itl_ms": 50,
        "profile": str(profile or ""),
    }  # fmt: skip
    script = Path(__file__).parents[1] / "peers" / "dynamo_simulate.py"
    found = _last_line([str(peer_python()), str(script), json.dumps(options)], ROOT, os.environ | _ONE_THREAD)
    each = found["summary"]

    def of(name: str) -> dict[str, float]:
        return {"mean": each[f"mean_{name}_ms"] / 1e3, "p50": each[f"median_{name}_ms"] / 1e3,
                "p90": each[f"p90_{name}_ms"] / 1e3, "p99": each[f"p99_{name}_ms"] / 1e3}  # fmt: skip

    return {
        "cpu_s": found["cpu_s"], "wall_s": found["wall_s"], "virtual_s": each["duration_ms"] / 1e3,
        "requests": each["num_requests"], "completed": each["completed_requests"], "ttft_s": of("ttft"),
        "tpot_s": of("tpot"), "reused": each["prefix_cache_reused_ratio"],
    }  # fmt: skip


_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def _last_line(command: Sequence[str], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    core = max(os.sched_getaffinity(0))
    ran = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


# ---------------------------------------------------------------- the two parts


def _speed(folders: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Return rows of (contender, policy, best CPU seconds). The contenders run in turns."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for policy, router in ROUTERS.items():
            peer = _dynosim(router, None)
            if peer is not None:
                found.setdefault((f"DynoSim {router}", policy), []).append(peer)
            for name, folder in folders.items():
                found.setdefault((name, policy), []).append(_lab(folder, Job(policy=policy)))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    for name, folder in folders.items():
        found[f"{name}, chunks as a worker finds them", "fulcrum"] = [_lab(folder, Job(chunk_tokens=0))]
    rows = []
    for (name, policy), runs in found.items():
        best, peers = min(each["cpu_s"] for each in runs), found.get((f"DynoSim {ROUTERS[policy]}", policy))
        row = {"who": name, "policy": policy, "cpu_s": best, "all_cpu_s": [each["cpu_s"] for each in runs],
               "wall_s": min(each["wall_s"] for each in runs), "times_real": runs[0]["virtual_s"] / best,
               "requests": runs[0]["requests"], "events": runs[0].get("events")}  # fmt: skip
        rows.append(row | {"of_dynosim": min(each["cpu_s"] for each in peers) / best if peers else None})
        if len({json.dumps([each["ttft_s"], each["tpot_s"]]) for each in runs}) != 1:
            if name in folders:
                raise SystemExit(f"{name} gave other figures in another round: it is not worth timing")
            print(f"{name} gave other figures in another round: its choices hang on the machine", file=sys.stderr)
    return rows


def _equal(folders: dict[str, Path], scratch: Path) -> list[dict[str, Any]]:
    """Run both simulators with `EQUAL` step times; plain and compiled have to agree to the last digit."""
    table, spread = scratch / "equal.npz", scratch / "spread.jsonl"
    _write_profile(table)
    _write_spread(spread)
    rows = []
    for policy, router in ROUTERS.items():
        runs = {name: _lab(folder, Job(policy=policy, equal=True)) for name, folder in folders.items()}
        figures = {
            name: {key: each[key] for key in ("ttft_s", "tpot_s", "reused", "events")} for name, each in runs.items()
        }
        if any(each != figures["plain"] for each in figures.values()):
            raise SystemExit(f"compiled and plain differ: {figures}")
        rows.append({"who": f"lab, {policy}:9:7", **figures["plain"]})
        peer = _dynosim(router, table, spread)
        if peer is not None:
            rows.append({"who": f"DynoSim, {router}", **{key: peer[key] for key in ("ttft_s", "tpot_s", "reused")}})
    return rows


def _write_spread(path: Path) -> None:
    """Write the trace with arrivals as the lab draws them: spread within a tick of its clock of 3 s, where DynoSim
    lets all arrive at once.
    """
    with path.open("w") as file:
        for each in read_trace(_trace(), seed=1, seconds=Job().seconds).requests:
            row = {"timestamp": each.arrival_ns / 1e6, "input_length": each.input_tokens,
                   "output_length": each.output_tokens, "hash_ids": list(each.hash_ids)}  # fmt: skip
            file.write(json.dumps(row) + "\n")


def _write_profile(path: Path) -> None:
    """Write `EQUAL` as the tables that DynoSim interpolates between, in milliseconds."""
    tokens, kv = np.array([0.0, 200_000.0]), np.array([0.0, float(BLOCKS * BLOCK_TOKENS)])
    prefill = (EQUAL.prefill_fixed_ns + EQUAL.prefill_token_ns * tokens) / 1e6
    decode = (EQUAL.decode_fixed_ns + EQUAL.decode_kv_token_ns * kv) / 1e6
    np.savez(
        path, prefill_isl=tokens, prefill_ttft_ms=prefill, decode_active_kv_tokens=kv,
        decode_context_length=np.array([1.0, 200_000.0]), decode_itl=np.stack([decode, decode], axis=1),
    )  # fmt: skip


# ---------------------------------------------------------------- shown


def _speed_table(rows: list[dict[str, Any]]) -> Table:
    shown = titled_table(
        f"An hour on 16 workers, one core; aims: plain {AIM_PLAIN}x of DynoSim, compiled {AIM_COMPILED}x",
        "simulator", "policy", "CPU s", "wall s", "times real time", "of DynoSim", "aim",
    )  # fmt: skip
    for row in rows:
        aim = {"plain": AIM_PLAIN, "compiled": AIM_COMPILED}.get(row["who"])
        share = row["of_dynosim"]
        kept = "" if aim is None or share is None else "kept" if share >= aim else "missed"
        shown.add_row(row["who"], row["policy"], f"{row['cpu_s']:.2f}", f"{row['wall_s']:.2f}",
                      f"{row['times_real']:,.0f}", "–" if share is None else f"{share:.2f}x", kept)  # fmt: skip
    return shown


def _equal_table(rows: list[dict[str, Any]]) -> Table:
    quantiles = ("mean", "p50", "p90", "p99")
    shown = titled_table("Equal step times; ms", "simulator", *(f"TTFT {q}" for q in quantiles),
                   *(f"TPOT {q}" for q in quantiles), "reused")  # fmt: skip
    for row in rows:
        times = [f"{1e3 * row['ttft_s'][q]:,.1f}" for q in quantiles] + [
            f"{1e3 * row['tpot_s'][q]:.2f}" for q in quantiles
        ]
        shown.add_row(row["who"], *times, f"{row['reused']:.1%}")
    return shown


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument(
        "--compiled", type=Path, default=ROOT / "build" / "lab", help="where the compiled lab is, or will be"
    )
    parser.add_argument("--parts", default="speed,equal", help="some of them, with commas between")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
