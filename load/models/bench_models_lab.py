"""Aegaeon's recipe in virtual time: the most models, and the highest rate, that 16 GPUs serve with 90 % good requests.

The planner's decisions (`libs/policy/reserve`), with three workers a GPU or one, handing running answers back at the
end of a turn or letting them end; one model a GPU; switching between requests. Each at 0.3, 1 and 3 times what a switch
costs. Tables, then one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from libs.lab.models.aegaeon import good_share, models_of, requests_of
from libs.lab.models.cluster import NEVER_S, KeepingRule, LoadCost, ModelsLab, cut
from libs.lab.models.rules import BetweenRequests, OneEach, PlannerRule

GPUS: Final = 16
WHOLE: Final = (72e9,)
"""Bytes of an H800 for weights and KV."""
PARTS: Final = (20e9, 20e9, 32e9)
LINK_BYTES_PER_S, OVERHEAD_S = 25e9, 0.7
"""PCIe 4.0 x16; half a second beside the bytes, and 0.2 s for closing one worker and opening the next."""
COSTS: Final = (0.3, 1.0, 3.0)
GOOD: Final = 0.9
WARM_S: Final = 60.0
TURN_S: Final = 5.0
MODELS: Final = tuple(range(8, 201, 4))
RATE: Final = 0.1
RATES: Final = tuple(round(0.05 * step, 2) for step in range(1, 21))
RATE_MODELS: Final = 40


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve."""

    title: str
    parts: Sequence[float]
    rule: Callable[[], KeepingRule]
    drain_s: float = NEVER_S


WAYS: Final = (
    Way("one model a GPU", WHOLE, OneEach),
    Way("switching between requests", WHOLE, BetweenRequests),
    Way("Fulcrum, a worker a GPU, answers end", WHOLE, lambda: PlannerRule(turn_s=TURN_S)),
    Way("Fulcrum, 3 workers a GPU, answers end", PARTS, lambda: PlannerRule(turn_s=TURN_S)),
    Way("Fulcrum, 3 workers a GPU, handed back", PARTS, lambda: PlannerRule(turn_s=TURN_S), 0.0),
)


@dataclass(frozen=True, slots=True)
class Log:
    """What is asked for."""

    models: int
    rate: float
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """The most that a way serves."""

    way: str
    cost: float
    most_models: int
    """At `RATE` each."""
    highest_rate: float
    """Of each of `RATE_MODELS` models."""


def main() -> None:
    """Print the tables and the JSON line; Ctrl-C keeps what is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--cost", type=float, action="append", help=f"times a switch's cost; default {COSTS}")
    options = parser.parse_args()
    rows: list[Row] = []
    try:
        for cost in options.cost or COSTS:
            for way in WAYS:
                rows.append(_row(way, cost, options.seconds, options.seed))
                print(rows[-1], file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what follows is what was done", file=sys.stderr)
    _show(rows)
    found = [asdict(row) for row in rows]
    print(json.dumps({"bench": "models-lab", "gpus": GPUS, "seed": options.seed, "rows": found}))


def _row(way: Way, cost: float, seconds: float, seed: int) -> Row:
    models = _most(MODELS, lambda number: good(way, Log(int(number), RATE, seconds, seed), cost))
    rate = _most(RATES, lambda rate: good(way, Log(RATE_MODELS, rate, seconds, seed), cost))
    return Row(way.title, cost, int(models), rate)


def good(way: Way, log: Log, cost: float) -> float:
    """Share of good requests."""
    known = models_of(log.models)
    requests = requests_of(known, log.rate, log.seconds, log.seed)
    link = LoadCost(LINK_BYTES_PER_S / cost, OVERHEAD_S * cost)
    ModelsLab(known, requests, cut(GPUS, way.parts), link, way.rule(), drain_s=way.drain_s).run()
    return good_share(requests, WARM_S)


def _most(steps: Sequence[float], share: Callable[[float], float]) -> float:
    """By bisection, the last one that is good; 0: not even the first."""
    low, high = -1, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        if share(steps[middle]) >= GOOD:
            low = middle
        else:
            high = middle
    return steps[low] if low >= 0 else 0.0


def _show(rows: Sequence[Row]) -> None:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("switch costs", "way", f"most models at {RATE:g}/s", "GPUs below one a model", "highest rate of 40"):
        shown.add_column(title, justify="left" if title == "way" else "right", no_wrap=True)
    for row in rows:
        below = f"{1 - GPUS / row.most_models:.0%}" if row.most_models > GPUS else "-"
        shown.add_row(f"{row.cost:g}x", row.way, str(row.most_models), below, f"{row.highest_rate:g}")
    Console(width=160, highlight=False).print(shown)


if __name__ == "__main__":
    main()
