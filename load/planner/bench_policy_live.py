"""`make bench-policy-live`: the policy of before against ours, on live suites of sixteen simulated GPUs, in turns.

Before: first come, first served, and roles stand still. Ours: late requests last, and the planner moves roles and
budgets. Each load is asked at growing rates, of either policy in turns, and of the lab's cluster of the same GPUs. A
policy's highest rate is where 90 % of requests are good, between the last rate that kept it and the first that did not;
the gain is ours over before, and the lab's gain stands beside it. `--near` asks the lab at all rates first, and each
policy live only at the two between which the lab has its edge. At the end one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Final

from libs.lab.experiment import Experiment
from libs.lab.experiment import run as run_lab
from libs.lab.hardware import Hardware
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.perfmodel.profiles import profile
from load.planner.bench_spike import (
    CHUNK_TOKENS,
    LINK_GBPS,
    MAX_SEQUENCES,
    PROFILE,
    SLO,
    SPEEDUP,
    TTFT_MS,
    Policy,
    run,
)
from load.planner.stories import Story, flipflop, flood, made

NEVER_MS: Final = 86_400_000
"""A TTFT that no request misses: with it nobody is ever late, and all are served first come, first served."""
WANTED: Final = 0.9
WORKERS: Final = 16


def mix(rate: float, seconds: int) -> Story:
    """Chat, long prompts and long answers side by side."""
    spec = (
        f"both:rate={rate},isl=500,osl=100,spread=0.25,seconds={seconds},flood_rate={rate},flood_isl=5000,"
        f"flood_at=0.3,flood_seconds={seconds // 3},writing_rate={rate / 4},writing_isl=300,writing_osl=600"
    )
    return Story(spec, [])


LOADS: Final[Mapping[str, Callable[[float, int], Story]]] = {
    "flipflop": lambda rate, seconds: flipflop(rate, seconds, 10),
    "flood": flood,
    "mix": mix,
}
RATES: Final[Mapping[str, Sequence[float]]] = {
    "flipflop": (7, 9, 11, 13),
    "flood": (5, 7, 9, 11),
    "mix": (7, 9, 11, 13),
}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two, live and in the lab."""

    name: str
    live: Policy
    ttft_ms: int
    lab: str


def sides(workers: int) -> tuple[Side, Side]:
    """(before, ours), both from half and half."""
    half = workers // 2
    before = Policy("before", half, workers - half, 0, "advisory")
    return (
        Side("before", before, NEVER_MS, f"fulcrum-fcfs:{half}:{workers - half}"),
        Side("ours", replace(before, name="ours", mode="auto"), TTFT_MS, f"fulcrum-auto:{half}:{workers - half}"),
    )


def in_lab(side: Side, story: Story, workers: int, seed: int) -> float:
    """Share of requests that are good on the lab's cluster of the same GPUs."""
    known = profile(PROFILE)
    slower = replace(known, step_time=known.step_time.scaled(1 / SPEEDUP))
    experiment = Experiment(
        made(story, seed),
        Hardware(slower, mixed_measured=True),
        workers,
        parse_slo(SLO),
        seed=seed,
        link_gbps=LINK_GBPS / known.gpus,
        chunk_tokens=CHUNK_TOKENS,
        max_sequences=MAX_SEQUENCES,
    )
    return run_lab(experiment, policy_named(side.lab, workers))[0].score.slo_attainment


def highest(good: Mapping[float, float]) -> tuple[float, bool]:
    """(rate at which `WANTED` would be good, whether it lies between rates that were asked)."""
    rates = sorted(good)
    kept = 0.0
    for number, rate in enumerate(rates):
        if good[rate] < WANTED:
            if not number:
                return rate * good[rate] / WANTED, False
            last = rates[number - 1]
            return last + (rate - last) * (good[last] - WANTED) / (good[last] - good[rate]), True
        kept = rate
    return kept, False


def near(good: Mapping[float, float]) -> list[float]:
    """The last rate that kept the SLO and the first that did not; the outermost two where all did, or none."""
    rates = sorted(good)
    failing = next((number for number, rate in enumerate(rates) if good[rate] < WANTED), len(rates) - 1)
    first = max(failing - 1, 0)
    return rates[first : first + 2]


def in_turns(sides: Sequence[Side], rates: Mapping[str, Sequence[float]]) -> list[tuple[Side, float]]:
    """Each side at its rates, the lowest first; now one and now the other begins."""
    found: list[tuple[Side, float]] = []
    for number in range(max(map(len, rates.values()))):
        turn = [(side, rates[side.name][number]) for side in sides if number < len(rates[side.name])]
        found += turn if number % 2 == 0 else reversed(turn)
    return found


def compare(load: str, rates: Sequence[float], asked: Any) -> dict[str, Any]:
    """One load at all rates."""
    both = sides(asked.workers)
    lab = {
        side.name: {rate: in_lab(side, LOADS[load](rate, asked.seconds), asked.workers, asked.seed) for rate in rates}
        for side in both
    }
    live: dict[str, dict[float, float]] = {side.name: {} for side in both}
    rows = []
    wanted = {side.name: near(lab[side.name]) if asked.near else rates for side in both}
    for side, rate in [] if asked.lab_only else in_turns(both, wanted):
        print(f"{side.name} serves {load} at {rate:g} ...", file=sys.stderr, flush=True)
        found = run(side.live, LOADS[load](rate, asked.seconds), seed=asked.seed, ttft_ms=side.ttft_ms)
        live[side.name][rate] = found["good"]
        del found["timeline"]
        rows.append({"side": side.name, "rate": rate, **found})
    for rate in rates:
        figures = [f"{each[name].get(rate, nan):>8.1%}" for each in (live, lab) for name in ("before", "ours")]
        print(f"{load:<10} {rate:>6g} {' '.join(figures)}", flush=True)
    edges = {
        where: {name: highest(good) for name, good in each.items() if good}
        for where, each in (("live", live), ("lab", lab))
    }
    for where, ends in edges.items():
        if len(ends) == 2:
            (old, old_inside), (new, new_inside) = ends["before"], ends["ours"]
            bound = "" if old_inside and new_inside else " (an edge lies outside of the rates asked)"
            print(
                f"{load:<10} {where}: highest rate {old:.2f} before, {new:.2f} ours, {new / old:.2f}x{bound}",
                flush=True,
            )
    return {"live": live, "lab": lab, "edges": edges, "rows": rows}


def main() -> None:
    """Print a table a load, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rates", nargs="+", type=float, help="requests a second; a ladder of its own for each load")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--near", action="store_true", help="live only at the two rates about the lab's edge")
    parser.add_argument("--lab-only", action="store_true", help="no live suites: what the lab expects")
    asked = parser.parse_args()
    quiet()
    print(f"{asked.workers} workers of {PROFILE}, SLO {SLO}, {asked.seconds} s; good requests")
    print(f"{'':<17} {'live':^17} {'lab':^17}\n{'load':<10} {'rate':>6} " + " ".join(["  before     ours"] * 2))
    found = {load: compare(load, asked.rates or RATES[load], asked) for load in asked.loads}
    print(json.dumps({"bench": "policy-live", "workers": asked.workers, "seconds": asked.seconds, "loads": found}))


if __name__ == "__main__":
    main()
