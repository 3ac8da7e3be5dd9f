"""`make bench-policy-live`: compare the earlier policy with ours, on live suites of sixteen simulated GPUs.

With the earlier policy, requests are served first come, first served, and roles do not change. With ours, late requests
are served last, and the planner changes roles and budgets. Each load runs at growing rates, with the policies taking
turns, and also on the lab's cluster of the same GPUs. The highest rate of a policy is that at which 90 % of requests
are good. It is interpolated between the last rate that reached 90 % and the first that did not. The gain is the ratio
of both highest rates, and is compared with the lab's gain.

With `--near` the lab runs all rates first. Each policy then runs live only at the two rates between which the lab has
its highest rate. The lab is calibrated on one live run of the earlier policy, at the lowest rate of the first load.
Each of its steps then takes as much longer as TPOT did at p50. The last line is JSON.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import nan
from typing import Any, Final

from libs.lab.experiment import run as run_lab
from libs.lab.policies import Policy as LabPolicy
from libs.lab.policies import policy_named
from libs.lab.study import quiet
from libs.policy.roles import Role
from load.measure import bench_parser
from load.planner.bench_spike import SIM, TTFT_MS, LiveKind, Policy, run
from load.planner.stories import Story, flipflop, flood, made

# A TTFT that no request misses. No request is then late, so that all are served first come, first served.
NEVER_MS: Final = 86_400_000
WANTED: Final = 0.9
WORKERS: Final = 16


def mix(rate: float, seconds: int) -> Story:
    """Return a story with chat, long prompts and long answers."""
    spec = (
        f"both:rate={rate},isl=500,osl=100,spread=0.25,seconds={seconds},flood_rate={rate},flood_isl=5000,"
        f"flood_at=0.3,flood_seconds={seconds // 3},writing_rate={rate / 4},writing_isl=300,writing_osl=600"
    )
    return Story(spec, [])


@dataclass(frozen=True, slots=True)
class Ladder:
    """A load, with the rates at which it is run."""

    story: Callable[[float, int], Story]
    rates: Sequence[float]


LOADS: Final[Mapping[str, Ladder]] = {
    "flipflop": Ladder(lambda rate, seconds: flipflop(rate, seconds, 10), (7, 9, 11, 13, 15)),
    "flood": Ladder(flood, (5, 7, 9, 11, 13)),
    "mix": Ladder(mix, (7, 9, 11, 13, 15, 17)),
}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two policies, live and in the lab."""

    name: str
    live: Policy
    ttft_ms: int
    lab: str

    def lab_policy(self) -> LabPolicy:
        """Return the lab's policy with the roles with which the live suite begins."""
        live = self.live
        roles = [(Role.PREFILL, 0)] * live.prefill + [(Role.MIXED, 0)] * live.decode
        return replace(policy_named(self.lab, live.workers), first_roles=lambda _: roles)


def sides(workers: int) -> tuple[Side, Side]:
    """Return the two sides of the comparison. Both begin with half of the workers in each role."""
    half = workers // 2
    before = Policy("before", half, workers - half, 0, "advisory")
    return (
        Side("before", before, NEVER_MS, "fulcrum-fcfs"),
        Side("ours", replace(before, name="ours", mode="auto"), TTFT_MS, "fulcrum-auto"),
    )


def run_in_lab(side: Side, story: Story, kind: LiveKind, seed: int) -> tuple[float, float]:
    """Return (share of good requests, TPOT in ms at p50) on the lab's cluster of the same GPUs."""
    experiment = kind.experiment(made(story, seed), side.live.workers, seed=seed)
    report, result = run_lab(experiment, side.lab_policy())
    return report.score.slo_attainment, statistics.median(each.tpot_ns / 1e6 for each in result.answers if each.tpot_ns)


def highest(good: Mapping[float, float]) -> tuple[float, bool]:
    """Return (rate at which the share `WANTED` is good, whether it lies between measured rates)."""
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
    """Return the last rate that kept the SLO and the first that did not.

    If all or none kept it, return the last or the first two rates.
    """
    rates = sorted(good)
    failing = next((number for number, rate in enumerate(rates) if good[rate] < WANTED), len(rates) - 1)
    first = max(failing - 1, 0)
    return rates[first : first + 2]


def in_turns(sides: Sequence[Side], rates: Mapping[str, Sequence[float]]) -> list[tuple[Side, float]]:
    """Pair each side with its rates, lowest first. The side that runs first alternates."""
    found: list[tuple[Side, float]] = []
    for number in range(max(map(len, rates.values()))):
        turn = [(side, rates[side.name][number]) for side in sides if number < len(rates[side.name])]
        found += turn if number % 2 == 0 else reversed(turn)
    return found


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """The setting in which all loads are compared."""

    sides: Sequence[Side]
    kind: LiveKind
    lab_kind: LiveKind
    seconds: int
    seed: int
    near: bool
    calibration: Mapping[str, Any] | None = None
    """The run on which the lab was calibrated; None without calibration."""

    def live(self, side: Side, story: Story) -> dict[str, Any]:
        return run(side.live, story, seed=self.seed, ttft_ms=side.ttft_ms, kind=self.kind)

    def calibrated(self, ladder: Ladder, rate: float) -> "PolicyComparison":
        """Return a comparison whose lab has the step times of one live run."""
        before, story = self.sides[0], ladder.story(rate, self.seconds)
        print(f"steps are measured at {rate:g} ...", file=sys.stderr, flush=True)
        found = self.live(before, story)
        steps = self.lab_kind.step_time
        lab_ms = run_in_lab(before, story, self.lab_kind.with_steps(steps), self.seed)[1]
        more_ms = found["tpot_ms"]["p50"] - lab_ms
        print(f"a step takes {more_ms:+.2f} ms more than the lab had it", flush=True)
        longer = replace(
            steps,
            prefill_fixed_ns=max(steps.prefill_fixed_ns + more_ms * 1e6, 0.0),
            decode_fixed_ns=max(steps.decode_fixed_ns + more_ms * 1e6, 0.0),
        )
        calibration = {"rate": rate, "step_more_ms": more_ms, **found}
        return replace(self, lab_kind=self.lab_kind.with_steps(longer), calibration=calibration)


def compare(name: str, ladder: Ladder, rates: Sequence[float], bench: PolicyComparison) -> dict[str, Any]:
    lab: dict[str, dict[float, float]] = {side.name: {} for side in bench.sides}
    for side, rate in product(bench.sides, rates):
        lab[side.name][rate], _ = run_in_lab(side, ladder.story(rate, bench.seconds), bench.lab_kind, bench.seed)
    live: dict[str, dict[float, float]] = {side.name: {} for side in bench.sides}
    rows = []
    wanted = {side.name: near(lab[side.name]) if bench.near else rates for side in bench.sides}
    for side, rate in in_turns(bench.sides, wanted):
        print(f"{side.name} serves {name} at {rate:g} ...", file=sys.stderr, flush=True)
        found = bench.live(side, ladder.story(rate, bench.seconds))
        live[side.name][rate] = found["good"]
        rows.append({"side": side.name, "rate": rate, **found})
    for rate in rates:
        figures = [f"{each[side].get(rate, nan):>8.1%}" for each in (live, lab) for side in ("before", "ours")]
        print(f"{name:<10} {rate:>6g} {' '.join(figures)}", flush=True)
    edges = {
        where: {side: highest(good) for side, good in each.items() if good}
        for where, each in (("live", live), ("lab", lab))
    }
    for where, ends in edges.items():
        if len(ends) == 2:
            (old, old_inside), (new, new_inside) = ends["before"], ends["ours"]
            bound = "" if old_inside and new_inside else " (an edge lies outside of the rates asked)"
            print(
                f"{name:<10} {where}: highest rate {old:.2f} before, {new:.2f} ours, {new / old:.2f}x{bound}",
                flush=True,
            )
    return {"live": live, "lab": lab, "edges": edges, "rows": rows}


def main() -> None:
    near_edge = False, "live only at the two rates about the lab's edge"
    parser = bench_parser(__doc__, workers=WORKERS, seconds=60, seed=1, near=near_edge)
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="all by default")
    parser.add_argument("--rates", nargs="+", type=float, help="requests a second; a ladder of its own for each load")
    options = parser.parse_args()
    quiet()
    names = [each for each in LOADS if each in (options.loads or LOADS)]
    both, kind = sides(options.workers), SIM
    bench = PolicyComparison(both, kind, kind.with_steps(kind.step_time), options.seconds, options.seed, options.near)
    what = f"{options.workers} workers of {kind.place.profile.name}, SLO {kind.slo.text}"
    print(f"{what}, {options.seconds} s; good requests")
    first = LOADS[names[0]]
    bench = bench.calibrated(first, min(options.rates or first.rates))
    print(f"{'':<17} {'live':^17} {'lab':^17}\n{'load':<10} {'rate':>6} " + " ".join(["  before     ours"] * 2))
    found = {name: compare(name, LOADS[name], options.rates or LOADS[name].rates, bench) for name in names}
    steps = asdict(bench.lab_kind.step_time)
    print(
        json.dumps({
            "bench": "policy-live", "workers": options.workers, "seconds": options.seconds,
            "calibration": bench.calibration, "step_time": steps, "loads": found,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
