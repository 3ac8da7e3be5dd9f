"""`make bench-verdict`: plant situations on simulated GPUs in virtual time, and check whether the verdict names them.

Roles, prompt and output lengths, rate and faults are drawn by seed, and the planner only advises. A trial is right if
the first verdict that names a cause names the planted one, within three seconds from when clients see the cause. No
other cause may be named until the end of the trial, and a second planted cause must be named by then. Only an overload
may be called prefill-bound until clients see a shortage in both phases. In a distractor, no cause may be named.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict

from load.verdict.situations import KV_NAMES, NAMES, Planted, Situations, draw_suite
from load.verdict.virtual import LASTS_S, Outcome, run_lasting, run_trial


def run_suite(names: Sequence[str], *, seed: int, little_kv: bool) -> list[Outcome]:
    """Run a trial for each name on one drawn device, each on its own suite, and follow the advice at its end."""
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
        + "".join(
            f" {each.figure} {each.came:.1f} of {each.least:.1f} to {each.most:.1f}{'' if each.kept else ' MISSED'}."
            for each in outcome.followed
        )
    )


def _kept(outcomes: Sequence[Outcome], figure: str) -> str:
    """Return the number of kept promises about a figure, such as "3 of 4"."""
    own = [each.kept for outcome in outcomes for each in outcome.followed if each.figure == figure]
    return f"{sum(own)} of {len(own)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", type=int, default=6, help="every third has little KV")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--names", nargs="+", help="only these situations, on each suite")
    parser.add_argument("--lasting", action="store_true", help="ten minutes in balance and two of overload instead")
    options = parser.parse_args()
    if options.lasting:
        for seed in range(options.seed, options.seed + options.suites):
            for name in LASTS_S:
                print(json.dumps(asdict(run_lasting(name, seed))), flush=True)
        return
    found: list[Outcome] = []
    began_s = time.monotonic()
    for number in range(options.suites):
        little_kv = number % 3 == 2
        names = options.names or (KV_NAMES if little_kv else NAMES)
        found += run_suite(names, seed=options.seed + number, little_kv=little_kv)
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
                "backlog_kept": _kept(found, "backlog"),
                "ttft_kept": _kept(found, "ttft"),
                "named_most_s": named_s[-1] if named_s else None,
                "wrong": [f"{each.name} (seed {each.seed}): {each.why}" for each in found if not each.right],
                "took_s": time.monotonic() - began_s,
            }
        )
    )


if __name__ == "__main__":
    main()
