"""`make bench-steady`: a level load at 30, 60 and 90 % of capacity on live suites: roles are to stand still, and no
fewer requests be good than with roles that cannot move.

Capacity is the rate at which prompts and decodes of such requests fill all workers, by the profile's step times, with
decodes in the largest batches that hold TPOT and prompts beside them as far as those leave time.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from libs.lab.study import quiet
from libs.policy.planner.splits import best_split
from libs.policy.pressure.splits import WorkerProfile, Workload
from load.planner.bench_spike import HEAD, policies, print_row, run
from load.planner.live_kinds import SIM, TPOT_MS
from load.planner.stories import Story

ISL, OSL = 2_000, 150
LEVELS: Final = (0.3, 0.6, 0.9)
KV_TOKENS: Final = 0
"""Room without a bound: the simulated workers have more than these sequences hold."""
MOVES_A_MINUTE: Final = 1.0


def capacity(workers: int) -> float:
    """Requests a second that the best split of these workers serves at pressure 1."""
    engine = WorkerProfile(SIM.step_time, SIM.place.chunk_tokens, SIM.place.max_sequences, KV_TOKENS)
    prompt_s = ISL / engine.chunk_speed / 1e9
    low, high = 0.0, 1_000.0
    while high - low > 0.01:
        rate = (low + high) / 2
        # By Little's law: this many decode at a time, each for as long as its tokens take at the target.
        decodes = round(rate * OSL * TPOT_MS / 1e3)
        work = Workload(rate * prompt_s, decodes, decodes * (ISL + OSL // 2), TPOT_MS * 1_000_000)
        best = best_split(engine, work, workers)
        low, high = (rate, high) if best is not None and best.pressure <= 1 else (low, rate)
    return low


def main() -> None:
    """Print a table a level, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without the run in which roles stand still")
    parser.add_argument("--out", type=Path, help="with what came when, as JSON")
    asked = parser.parse_args()
    quiet()
    most = capacity(asked.workers)
    found: dict[str, list[dict[str, Any]]] = {}
    missed = []
    for level in asked.levels:
        spec = f"poisson:rate={level * most:.2f},isl={ISL},osl={OSL},spread=0.4,seconds={asked.seconds}"
        print(f"\n{level:.0%} of {most:.1f} requests a second: {spec}\n{HEAD}")
        rows = found[f"{level:g}"] = []
        for policy in policies(asked.workers)[: 1 if asked.alone else 2]:
            row = run(policy, Story(spec, []), seed=asked.seed)
            rows.append(row)
            print(print_row(row), flush=True)
        moves = rows[0]["moves"] / asked.seconds * 60
        said = f"{level:.0%}: {moves:.1f} moves a minute, {rows[0]['good']:.2%} good"
        if moves > MOVES_A_MINUTE:
            missed.append(said)
        elif len(rows) > 1 and rows[0]["good"] < rows[1]["good"]:
            missed.append(f"{said}, {rows[1]['good']:.2%} standing still")
    if asked.out:
        asked.out.write_text(json.dumps(found))
    for row in (each for rows in found.values() for each in rows):
        del row["timeline"]
    print("\n".join(missed) if missed else "held at every level" + ", not compared with standing still" * asked.alone)
    print(json.dumps({"workers": asked.workers, "seconds": asked.seconds, "capacity": most, "levels": found}))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
