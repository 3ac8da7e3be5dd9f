"""`make bench-verdict`: planted situations on live suites of simulated GPUs, and whether the verdict names them.

On each suite several trials run one after the other: roles, prompt and output lengths, rate and faults are drawn by
seed, and the planner only advises. A trial is right when the first verdict that names anything is the planted one,
within three seconds from when the cause is there by the clients' own account, and nothing else is named until its end;
of a distractor, when nothing is named.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import httpx

from libs.perfmodel.profiles import profile
from libs.testing.suites.suite import Suite, running_suite
from load.verdict.situations import (
    CHUNK_TOKENS,
    KV_NAMES,
    MAX_SEQUENCES,
    NAMES,
    TTFT_S,
    WORKERS,
    Device,
    Planted,
    Situations,
)
from load.verdict.trial import Bench, Outcome

PROFILES: Final = (("llama-70b-tp4-h100", (0.07, 0.09), 310.0), ("llama-8b-h100", (0.03, 0.04), 330.0))
"""(name, how much faster than it devices run, TPOT target in ms). Steps of a fifth of a second: few requests a second
fill eight workers, and what a busy machine adds to a step is little beside it."""
LITTLE_KV_TOKENS: Final = (3_400, 4_400)
LITTLE_KV_TTFT_S: Final = 8.0
"""There many long prompts come at once, and are to be no shortage."""
MUCH_KV_TOKENS: Final = 60_000
PER_PROCESS: Final = 4
LINK_GBPS: Final = 400.0


def run_suite(names: Sequence[str], *, seed: int, little_kv: bool) -> list[Outcome]:
    """A suite with a device drawn by the seed, and a trial for each name."""
    drawn = random.Random(seed)
    name, (low, high), tpot_ms = drawn.choice(PROFILES)
    ttft_s = LITTLE_KV_TTFT_S if little_kv else TTFT_S
    chosen, speedup = profile(name), drawn.uniform(low, high)
    kv_tokens = drawn.randint(*LITTLE_KV_TOKENS) if little_kv else MUCH_KV_TOKENS
    memory_mb = max(round(kv_tokens * chosen.kv_bytes_per_token / 2**20), 1)
    kv_tokens = memory_mb * 2**20 // (16 * chosen.kv_bytes_per_token) * 16
    step_time = chosen.step_time.scaled(1 / speedup)
    device = Device(step_time, kv_tokens, round(tpot_ms * 1e6), ttft_s)
    with tempfile.TemporaryDirectory() as folder:
        faults = Path(folder) / "faults.json"
        faults.write_text("{}")
        env = {
            "FULCRUM_CACHE": f"{folder}/cache",
            "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": str(CHUNK_TOKENS),
            "FULCRUM_WORKER_MAX_SEQUENCES": str(MAX_SEQUENCES),
            "FULCRUM_WORKER_BLOCK_SIZE_TOKENS": "16",
            "FULCRUM_WORKER_THREADS": "1",
            "FULCRUM_WORKER_SIM_PROFILE": name,
            "FULCRUM_WORKER_SIM_SPEEDUP": str(speedup),
            "FULCRUM_WORKER_SIM_KV_MEMORY_MB": str(memory_mb),
            "FULCRUM_WORKER_SIM_LINK_GBPS": str(LINK_GBPS),
            "FULCRUM_WORKER_SIM_FAULTS": str(faults),
            "FULCRUM_GATEWAY_TTFT_DEADLINE_MS": str(round(ttft_s * 1000)),
            "FULCRUM_GATEWAY_TPOT_TARGET_MS": str(tpot_ms),
            "FULCRUM_METRICS_TPOT_TARGET_MS": str(tpot_ms),
            "FULCRUM_METRICS_TTFT_DEADLINE_MS": str(round(ttft_s * 1000)),
            "FULCRUM_PLANNER_MODE": "advisory",
            "FULCRUM_LOG_LEVEL": "warning",
        }
        half = WORKERS // 2
        arguments = ("--engine", "sim", "--prefill", str(half), "--decode", str(WORKERS - half))
        with running_suite(Path(folder), *arguments, "--workers-per-process", str(PER_PROCESS), env=env) as suite:
            return asyncio.run(
                _trials(suite, device, faults, names, seed=seed, kv_bytes=chosen.kv_bytes_per_token, speedup=speedup)
            )


async def _trials(
    suite: Suite, device: Device, faults: Path, names: Sequence[str], *, seed: int, kv_bytes: int, speedup: float
) -> list[Outcome]:
    found = []
    async with httpx.AsyncClient(timeout=10) as http:
        bench = Bench(suite, device, faults, http, kv_bytes=kv_bytes, speedup=speedup)
        for number, name in enumerate(names):
            planted = Situations(device, seed * 1_000 + number).of(name)
            outcome = await bench.trial(planted, seed * 1_000 + number)
            found.append(outcome)
            print(_line(planted, outcome), flush=True)
    return found


def _line(planted: Planted, outcome: Outcome) -> str:
    load = planted.load
    named = "      –" if outcome.named_s is None else f"{outcome.named_s:>5.1f} s"
    split, mark = f"{planted.prefill}P+{planted.decode}D", "right" if outcome.right else "WRONG"
    return (
        f"{outcome.seed:>6} {planted.name:<24} {split} isl {load.isl:>4} osl {load.osl:>4} rate {load.rate:>5.1f} "
        f"{mark} {named} {outcome.why or outcome.sentence}"
    )


def main() -> None:
    """Print a line a trial, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", type=int, default=6, help="every third has little KV")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--names", nargs="+", help="only these situations, on each suite")
    parser.add_argument("--kv", action="store_true", help="little KV on every suite")
    parser.add_argument("--out", type=Path, help="all outcomes as JSON")
    asked = parser.parse_args()
    found: list[Outcome] = []
    began_s = time.monotonic()
    for number in range(asked.suites):
        little_kv = asked.kv or (number % 3 == 2)
        names = asked.names or (KV_NAMES if little_kv else NAMES)
        found += run_suite(names, seed=asked.seed + number, little_kv=little_kv)
        if asked.out:
            asked.out.write_text(json.dumps([asdict(each) for each in found]))
    named_s = sorted(each.named_s for each in found if each.named_s is not None)
    print(
        json.dumps(
            {
                "trials": len(found),
                "right": sum(each.right for each in found),
                "named_p50_s": statistics.median(named_s) if named_s else None,
                "named_most_s": named_s[-1] if named_s else None,
                "wrong": [f"{each.name} (seed {each.seed}): {each.why}" for each in found if not each.right],
                "took_s": time.monotonic() - began_s,
            }
        )
    )


if __name__ == "__main__":
    main()
