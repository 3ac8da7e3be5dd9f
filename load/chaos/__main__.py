"""`make faults SEEDS=20`: run the seeded fault test. `--seed N --verbose` replays one seed."""

import argparse
import json
import sys
import time
from collections import Counter

from load.chaos.run import Plan, Result, run_seed


def main() -> int:
    """Run every seed. Return 1 if a run broke an invariant."""
    parser = argparse.ArgumentParser(
        prog="chaos", description="Real gateways and workers in virtual time, under seeded faults."
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--requests", type=int, default=Plan().requests, help="of each seed")
    parser.add_argument("--verbose", action="store_true", help="show faults, logs and what went wrong as it happens")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end, and nothing else on stdout")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    out = sys.stderr if options.json else sys.stdout
    on_line = (lambda line: print(line, file=out)) if options.verbose else None
    results, started_s = [], time.monotonic()
    for seed in seeds:
        result = run_seed(seed, Plan(requests=options.requests), on_line)
        results.append(result)
        print(_line(result), file=out, flush=True)
        for wrong in result.wrong[:20]:
            print(f"    {wrong}", file=out)
        if result.wrong:
            print(f"    again: python -m load.chaos --seed {seed} --requests {options.requests} --verbose", file=out)
    summary = _summary(results, time.monotonic() - started_s)
    print(json.dumps(summary))
    return 1 if summary["wrong"] else 0


def _line(result: Result) -> str:
    others = ", ".join(f"{count} {kind}" for kind, count in sorted(result.outcomes.items()) if kind != "ok")
    return (
        f"seed {result.seed:>4}: {result.outcomes['ok']} whole, {others or 'no others'}; "
        f"{sum(result.faults.values())} faults, {result.reroutes} reroutes, {result.decisions} decisions, "
        f"{result.virtual_s:.1f} virtual s, "
        f"log {result.digest:08x} of {result.events}; {len(result.wrong)} wrong"
    )


def _summary(results: list[Result], wall_s: float) -> dict[str, object]:
    outcomes, faults = Counter[str](), Counter[str]()
    for result in results:
        outcomes += result.outcomes
        faults += result.faults
    return {
        "seeds": len(results),
        "requests": sum(result.requests for result in results),
        "outcomes": dict(sorted(outcomes.items())),
        "faults": dict(sorted(faults.items())),
        "reroutes": sum(result.reroutes for result in results),
        "decisions": sum(result.decisions for result in results),
        "wrong": sum(len(result.wrong) for result in results),
        "virtual_s": round(sum(result.virtual_s for result in results), 1),
        "wall_s": round(wall_s, 1),
        "digests": {result.seed: f"{result.digest:08x}" for result in results},
    }


if __name__ == "__main__":
    sys.exit(main())
