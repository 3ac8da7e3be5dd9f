"""`make bench-verdict`: planted situations on live suites of simulated GPUs, and whether the verdict names them.

On each suite several trials run one after the other: roles, prompt and output lengths, rate and faults are drawn by
seed, and the planner only advises. A trial is right when the first verdict that names anything is the planted one,
within three seconds from when the cause is there by the clients' own account, nothing else is named until its end, and
what was planted behind it has been named by then; of a distractor, when nothing is named.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import httpx

from libs.testing.suites.suite import RunningSuite, running_suite
from load.verdict.drawn import DrawnSuite, draw_suite
from load.verdict.judge import Outcome
from load.verdict.knee import WORKLOADS, find_knee, rows
from load.verdict.lasting import LASTS_S, run_lasting
from load.verdict.situations import (
    KV_NAMES,
    NAMES,
    WORKERS,
    Planted,
    Situations,
)
from load.verdict.trial import Bench
from load.verdict.virtual import run_trial

PER_PROCESS: Final = 4


def run_suite(names: Sequence[str], *, seed: int, little_kv: bool) -> list[Outcome]:
    """A suite with a device drawn by the seed, and a trial for each name."""
    with live_suite(seed=seed, little_kv=little_kv) as (suite, drawn, faults):
        return asyncio.run(_trials(suite, drawn, faults, names, seed=seed))


@contextmanager
def live_suite(*, seed: int, little_kv: bool) -> Iterator[tuple[RunningSuite, DrawnSuite, Path]]:
    """Of simulated workers, with the file of their faults; its planner only advises."""
    drawn = draw_suite(seed, little_kv=little_kv)
    with tempfile.TemporaryDirectory() as folder:
        faults = Path(folder) / "faults.json"
        faults.write_text("{}")
        env = {
            "FULCRUM_CACHE": f"{folder}/cache",
            **{f"FULCRUM_WORKER_{name.upper()}": str(value) for name, value in drawn.worker().items()},
            "FULCRUM_WORKER_SIM_FAULTS": str(faults),
            **{f"FULCRUM_GATEWAY_{name.upper()}": str(value) for name, value in drawn.targets().items()},
            **{f"FULCRUM_METRICS_{name.upper()}": str(value) for name, value in drawn.targets().items()},
            **{f"FULCRUM_PLANNER_{name.upper()}": str(value) for name, value in drawn.planner().items()},
            "FULCRUM_WORKER_NAMES": "gpu",
            "FULCRUM_LOG_LEVEL": "warning",
        }
        half = WORKERS // 2
        arguments = ("--engine", "sim", "--prefill", str(half), "--decode", str(WORKERS - half))
        with running_suite(Path(folder), *arguments, "--workers-per-process", str(PER_PROCESS), env=env) as suite:
            yield suite, drawn, faults


async def _trials(
    suite: RunningSuite, drawn: DrawnSuite, faults: Path, names: Sequence[str], *, seed: int
) -> list[Outcome]:
    found = []
    async with httpx.AsyncClient(timeout=10) as http:
        bench = Bench(suite, drawn, faults, http)
        for number, name in enumerate(names):
            planted = Situations(drawn.device, seed * 1_000 + number).of(name)
            outcome = await bench.trial(planted, seed * 1_000 + number)
            found.append(outcome)
            print(_line(planted, outcome), flush=True)
    return found


def run_virtually(names: Sequence[str], *, seed: int, little_kv: bool) -> list[Outcome]:
    """The same in virtual time: each trial on a suite of its own, and the advice followed at its end."""
    found = []
    drawn = draw_suite(seed, little_kv=little_kv)
    for number, name in enumerate(names):
        planted = Situations(drawn.device, seed * 1_000 + number).of(name)
        outcome = run_trial(drawn, planted, seed * 1_000 + number)
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
        + ("" if outcome.off is None else f" Left {outcome.left:.2f} of {outcome.predicted:.2f}.")
    )


def main() -> None:
    """Print a line a trial, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", type=int, default=6, help="every third has little KV")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--names", nargs="+", help="only these situations, on each suite")
    parser.add_argument("--kv", action="store_true", help="little KV on every suite")
    parser.add_argument("--virtual", action="store_true", help="in virtual time, with the advice followed")
    parser.add_argument("--out", type=Path, help="all outcomes as JSON")
    parser.add_argument("--knee", action="store_true", help="pressure against the knee that a search finds instead")
    parser.add_argument("--lasting", action="store_true", help="ten minutes in balance and two of overload instead")
    asked = parser.parse_args()
    if asked.knee:
        for workload in WORKLOADS:
            print(json.dumps(rows([find_knee(*workload, asked.seed)])), flush=True)
        return
    if asked.lasting:
        for seed in range(asked.seed, asked.seed + asked.suites):
            for name in LASTS_S:
                print(json.dumps(asdict(run_lasting(name, seed))), flush=True)
        return
    found: list[Outcome] = []
    began_s = time.monotonic()
    for number in range(asked.suites):
        little_kv = asked.kv or (number % 3 == 2)
        names = asked.names or (KV_NAMES if little_kv else NAMES)
        run = run_virtually if asked.virtual else run_suite
        found += run(names, seed=asked.seed + number, little_kv=little_kv)
        if asked.out:
            asked.out.write_text(json.dumps([asdict(each) for each in found]))
    followed = [each.off for each in found if each.off is not None]
    named_s = sorted(each.named_s for each in found if each.named_s is not None)
    print(
        json.dumps(
            {
                "trials": len(found),
                "right": sum(each.right for each in found),
                "named_p50_s": statistics.median(named_s) if named_s else None,
                "advice_followed": len(followed),
                "advice_within_15_percent": sum(abs(each) <= 0.15 for each in followed),
                "named_most_s": named_s[-1] if named_s else None,
                "wrong": [f"{each.name} (seed {each.seed}): {each.why}" for each in found if not each.right],
                "took_s": time.monotonic() - began_s,
            }
        )
    )


if __name__ == "__main__":
    main()
