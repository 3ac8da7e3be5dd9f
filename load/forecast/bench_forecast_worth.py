"""The worth of a forecast: GPU-hours at which 99 % of requests are in time, over known days, by planner.

    make bench-forecast-worth ARGS="--out worth.json"

Each minute of the last days is served by the workers that are active then. Ordered workers take `--starts-s` to
start and cost from the order on. A pool takes the work that its capacity table states, which the lab made; the rest
is late, and late work waits behind work in time. Minutes inside a bin of ten vary as bins inside 50 minutes do
(measured before the scored days), or as those of a public log of a small service. Knobs of each planner (headroom,
hold, quantile) are the cheapest that keep the objective, on the scored days (`hindsight`) and on as many days
before them (`before`). Dynamo's throughput planner is `libs.lab.rivals`'.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from libs.capacity.measure import Bench, PlanTraffic, made_lengths
from libs.capacity.planning import CHECKED_S, MOST_CHECKED_REQUESTS, kept_tables, part_of
from libs.forecast.demand_file import read_demand
from libs.lab.hardware import resolve
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.lab.traces.read import read_trace
from libs.policy.capacity import PHASES, Phase
from libs.policy.forecast.history import SERIES, DemandHistory, Floats
from libs.policy.forecast.model import DemandForecaster
from libs.runtime.paths import cache_dir
from load.forecast.worth import MOST_WORKERS, START_MIN, DynamoPlanner, MinuteRule, Wanted, World, installed

OBJECTIVE: Final = 0.99
BIN_MIN: Final = 10
DAY_MIN: Final = 1440
# Stretches of ten minutes, from which those of bins are drawn.
STRETCHES: Final = 2000
# Headroom of planners that know the demand.
NEAR_FULL: Final = (0.85, 0.88, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 1.0)
# Factors on a forecast's quantile.
OVER: Final = (0.9, 1.0, 1.15, 1.3, 1.45, 1.6, 1.75, 1.9)
# GPU-minutes for a mean minute's requests.
LATE_PRICES: Final = tuple(round(30 * 1.1**step) for step in range(30))
HEADROOM: Final = tuple(round(0.8 + 0.05 * step, 2) for step in range(33))
# Headroom of planners that hold nothing.
WIDE: Final = tuple(round(0.8 + 0.2 * step, 1) for step in range(27))
HOLD_MIN: Final = (1, 5, 10, 20, 30, 60)
# Places of the forecast's quantiles.
MEDIAN_90_95: Final = (3, 5, 6)
OPENED_MIN: Final = (1, 2, 3, 4, 6, 8, 11, 15, 20, 30)

Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The cost and service of one planner over some minutes."""

    knobs: tuple[float, ...]
    gpu_hours: float
    in_time: float


def past(values: Values, minutes: int, how: Callable[..., Any] = np.max) -> Values:
    """Return [t] over the `minutes` that end with t."""
    padded = np.concatenate([np.repeat(values[:1], minutes - 1), values])
    return np.asarray(how(sliding_window_view(padded, minutes), axis=1))


def coming(values: Values, minutes: int, how: Callable[..., Any] = np.max) -> Values:
    """Return [t] over the `minutes` that begin with t."""
    return past(values[::-1], minutes, how)[::-1]


def before(values: Floats) -> Floats:
    """Return [t] the value of the minute before: all that is known as t begins."""
    return np.concatenate([values[:1], values[:-1]])


def reactive(world: World, headroom: float, hold_min: float) -> Wanted:
    """Order the most of the last minutes, times headroom."""
    return {phase: world.needed(phase, headroom * past(before(world.work[phase]), int(hold_min))) for phase in PHASES}


def forecast(world: World, headroom: float, hold_min: float, level: float, over: float) -> Wanted:
    """Order as `reactive` does, or as forecast where that is more; hold nothing that the forecast does not need."""
    found = {}
    for phase in PHASES:
        ahead = world.ahead[phase][:, int(level)] * over
        now = headroom * past(before(world.work[phase]), int(hold_min))
        found[phase] = world.needed(phase, np.fmax(ahead, now))
    return found


def clairvoyant(world: World, headroom: float, opened_min: float) -> Wanted:
    """Order by known demand; peaks shorter than `opened_min` may be given up. The best of these, not of all."""
    found: Wanted = {}
    for phase in PHASES:
        needed = world.needed(phase, headroom * world.work[phase])
        opened = past(coming(needed, int(opened_min), np.min), int(opened_min))
        found[phase] = coming(opened, world.start_min + 1)
    return found


def outcome(world: World, wanted: Wanted, knobs: tuple[float, ...], span: slice, *, seeing: bool = False) -> Outcome:
    """Return the outcome of `wanted` workers; those are active that were wanted ever since they were ordered.

    With `seeing`, roles are shared out by the work of the minute itself, if they move at all.
    """
    hours = sum(float(wanted[phase][span].sum()) for phase in PHASES) / 60
    if world.moves:
        # Workers of either role are interchangeable: only their number has to have been wanted all the time.
        total = past(wanted["prefill"] + wanted["decode"], world.start_min + 1, np.min)
        half = total // 2
        served = world.in_time_with_moves({"prefill": half, "decode": total - half}, seeing=seeing)
    else:
        served = world.in_time({phase: past(wanted[phase], world.start_min + 1, np.min) for phase in PHASES})
    share, requests = served[span], world.requests[span]
    return Outcome(knobs, hours, float((share * requests).sum() / requests.sum()))


Planner = Callable[..., Wanted]
Grid = Sequence[tuple[float, ...]]
CLAIRVOYANT: Final = "clairvoyant"
OURS: Final = "forecast + reactive"
NEWSVENDOR: Final = "newsvendor by minutes"


def planners(world: World, fitted: int) -> Iterator[tuple[str, World, Planner, Grid]]:
    """Yield (title, the world that it plans for, planner, knobs). Rules of minutes may learn from the first `fitted`
    minutes.
    """
    prices = [(each,) for each in LATE_PRICES]
    moving = replace(world, moves=True)
    rule = MinuteRule(world, fitted)
    ours = list(product((0.0, 1.0, 1.15), (1, 5, 20), MEDIAN_90_95, OVER))
    yield CLAIRVOYANT, world, clairvoyant, list(product(NEAR_FULL, OPENED_MIN))
    yield OURS, world, forecast, ours
    yield NEWSVENDOR, world, rule, prices
    yield "reactive", world, reactive, list(product(HEADROOM, HOLD_MIN))
    yield "reactive, 30 % spare", world, reactive, list(product((1.3,), HOLD_MIN))
    for name in installed():
        yield f"dynamo {name}", world, DynamoPlanner(world, name), list(product(WIDE))
    yield f"{CLAIRVOYANT}, roles move", moving, clairvoyant, list(product(NEAR_FULL, OPENED_MIN))
    yield f"{OURS}, roles move", moving, forecast, ours
    yield f"{NEWSVENDOR}, roles move", moving, rule, prices
    yield "reactive, roles move", moving, reactive, list(product(HEADROOM, HOLD_MIN))
    yield "bins known, minutes not", world, MinuteRule(world, fitted, bins_known=True), prices


def best(world: World, planner: Planner, grid: Grid, spans: dict[str, slice]) -> dict[str, dict[str, Any] | None]:
    """Return the cheapest knobs in hindsight, and those that were cheapest on the days before; None if no knobs keep
    the objective.
    """
    tried = []
    for knobs in grid:
        wanted = planner(world, *knobs)
        seeing = planner is clairvoyant
        tried.append({which: outcome(world, wanted, knobs, span, seeing=seeing) for which, span in spans.items()})
    found: dict[str, dict[str, Any] | None] = {}
    for which, by in (("hindsight", "scored"), ("before", "training")):
        kept = [each for each in tried if each[by].in_time >= OBJECTIVE]
        chosen = min(kept, key=lambda each: each[by].gpu_hours, default=None) if kept else None
        found[which] = None if chosen is None else {
            "knobs": list(chosen["scored"].knobs),
            "gpu_hours": round(chosen["scored"].gpu_hours, 1),
            "in_time": round(chosen["scored"].in_time, 4),
        }  # fmt: skip
    return found


def make_worlds(
    history: DemandHistory, bench: Bench, inside: Floats, days: int, *, scale: float, seed: int, starts: Sequence[int]
) -> dict[int, World]:
    """Return worlds by minutes to start. `inside` is [stretches, phases + 1, BIN_MIN]: minutes over the mean of their
    ten, of requests and of tokens.
    """
    first = len(history) - days * DAY_MIN // BIN_MIN
    rng = np.random.default_rng(seed)
    picked = inside[rng.integers(0, len(inside), len(history) - first)]
    rates = {}
    for place, name in enumerate(SERIES):
        values = history.series(name)
        known = np.flatnonzero(np.isfinite(values))
        filled = np.interp(np.arange(len(values)), known, values[known])[first:] * scale
        rates[name] = (filled[:, None] * picked[:, place]).ravel()
    each = bench.work_each()
    token: dict[Phase, float] = {
        "prefill": each["prefill"] / bench.traffic.prompt_tokens,
        "decode": each["decode"] / bench.traffic.output_tokens,
    }
    tokens: dict[Phase, Floats] = {phase: rates[phase] for phase in PHASES}
    by_bin = {phase: _by_bin(history, phase, first) * token[phase] * scale for phase in PHASES}
    work: dict[Phase, Floats] = {phase: tokens[phase] * token[phase] for phase in PHASES}
    tables = kept_tables(bench, cache_dir() / "capacity")
    most = {phase: np.array([tables[phase].most_work(count + 1) for count in range(MOST_WORKERS)]) for phase in PHASES}
    return {
        start_min: World(
            work, rates["requests"], tokens, token, most,
            {phase: _ahead(each, start_min) for phase, each in by_bin.items()}, start_min,
        )
        for start_min in starts
    }  # fmt: skip


def _by_bin(history: DemandHistory, phase: Phase, first: int) -> Floats:
    """Return [bins, 2, levels]: forecasts of each bin and the one after it, from the bins before; models are fitted
    anew daily.
    """
    day = DAY_MIN // BIN_MIN
    found = np.full((len(history) - first, 2, 7), np.nan)
    for start in range(first, len(history), day):
        model = DemandForecaster().fit(history.before(start), (1, 2))
        origins = list(range(start - 1, min(start + day, len(history)) - 1))
        found[start - first : start - first + len(origins)] = model.forecast_at(history, phase, origins)
    return found


def _ahead(by_bin: Floats, start_min: int) -> Floats:
    """Return [minutes, levels]: the forecast of the work that a worker ordered now will serve."""
    minutes = np.repeat(by_bin, BIN_MIN, axis=0)
    later = np.arange(len(minutes)) % BIN_MIN >= BIN_MIN - start_min
    # Workers that serve the present bin are needed until it ends, whatever the next one needs.
    return np.where(later[:, None], minutes.max(axis=1), minutes[:, 0])


def own_inside(history: DemandHistory, rng: np.random.Generator) -> Floats:
    """Return minutes distributed as the series' own bins within 20 and 50 minutes, carried down to halves of a bin and
    fifths of a half.
    """
    values = np.stack([history.series(name) for name in SERIES])

    def patterns(parts: int) -> Floats:
        whole = values[:, : values.shape[1] // parts * parts].reshape(3, -1, parts)
        whole = whole[:, (np.isfinite(whole).all(axis=2) & (whole.sum(axis=2) > 0)).all(axis=0)]
        return np.asarray((whole / whole.mean(axis=2, keepdims=True)).transpose(1, 0, 2))

    halves, fifths = patterns(2), patterns(BIN_MIN // 2)
    shape = halves[rng.integers(0, len(halves), STRETCHES)]
    parts = fifths[rng.integers(0, len(fifths), (STRETCHES, 2))].transpose(0, 2, 1, 3)
    return np.asarray((shape[..., None] * parts).reshape(STRETCHES, len(SERIES), BIN_MIN))


def measured_inside(path: Path) -> Floats:
    """Read minutes from a log of single requests; see `make_worlds`."""
    trace = read_trace(path, seed=1)
    minutes = np.array([int(each.arrival_ns // 60_000_000_000) for each in trace.requests])
    counts = np.zeros((3, int(minutes.max()) + 1))
    for row, values in enumerate(([1] * len(minutes), [each.input_tokens for each in trace.requests],
                                  [each.output_tokens for each in trace.requests])):  # fmt: skip
        np.add.at(counts[row], minutes, values)
    whole = counts[:, : counts.shape[1] // BIN_MIN * BIN_MIN].reshape(3, -1, BIN_MIN)
    whole = whole[:, (whole.sum(axis=2) > 0).all(axis=0)]
    return np.asarray((whole / whole.mean(axis=2, keepdims=True)).transpose(1, 0, 2))


def lab_check(world: World, bench: Bench, wanted: Wanted, span: slice, samples: int) -> list[dict[str, Any]]:
    """Run minutes in the lab, spread over the span by how full they are, as far as that takes seconds."""
    active = {phase: past(wanted[phase], world.start_min + 1, np.min) for phase in PHASES}
    share, each, rows = world.in_time(active), bench.work_each(), []
    full = np.maximum(*[world.work[phase] / world.most[phase][active[phase] - 1] for phase in PHASES])
    order = np.arange(len(full))[span][np.argsort(full[span])]
    for quantile in np.linspace(0.1, 0.995, samples):
        at = int(order[int(quantile * (len(order) - 1))])
        pools: dict[Phase, int] = {phase: int(active[phase][at]) for phase in PHASES}
        rate = max(world.work["prefill"][at] / each["prefill"], 1e-3)
        part, parts = part_of(pools, min(8 / sum(pools.values()), MOST_CHECKED_REQUESTS / (rate * CHECKED_S), 1.0))
        longer = world.work["decode"][at] / (rate * each["decode"])
        traffic = bench.traffic.scaled(1.0, longer)
        tried = Bench(bench.hardware, bench.slo, traffic, bench.max_sequences, seed=bench.seed)
        report = tried.check(rate * part, parts["prefill"], parts["decode"], CHECKED_S)
        rows.append({
            "minute": at, "full": round(float(full[at]), 3), "workers": pools, "in_the_lab": parts,
            "table": round(float(share[at]), 3), "lab": round(report.score.slo_attainment, 3),
        })  # fmt: skip
    return rows


def main() -> None:
    """Print the table; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=4, help="that are scored; as many before choose knobs")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the demand")
    parser.add_argument("--samples", type=int, default=4, help="minutes that the lab replays")
    parser.add_argument(
        "--inside",
        choices=("own", "log"),
        default="own",
        help="minutes inside a bin: as the series' own bins within an hour are, or as in azure_code_2023.csv",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--starts-s", default="30,120,300,600", help="start-up times; 30 s count as a minute")
    parser.add_argument("--slo", default="ttft=2s,tpot=50ms")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    quiet()
    folder = Path(os.environ.get("FULCRUM_DATA", ""))
    file, log = folder / "servegen_m-large_10min.csv", folder / "azure_code_2023.csv"
    missing = [each.name for each in (file, log) if not each.is_file()]
    if missing:
        raise SystemExit(f"FULCRUM_DATA has no {' and no '.join(missing)}; docs/data.md says where to get it")
    history = read_demand(file)
    known = np.isfinite(history.prefill) & np.isfinite(history.decode) & np.isfinite(history.requests)
    requests = history.requests[known].sum()
    lengths = made_lengths(history.prefill[known].sum() / requests, history.decode[known].sum() / requests)
    bench = Bench(resolve("llama-3.1-8b", "h100"), parse_slo(asked.slo), PlanTraffic(lengths, 1.0), 256)
    training = history.before(len(history) - asked.days * DAY_MIN // BIN_MIN)
    own = asked.inside == "own"
    inside = own_inside(training, np.random.default_rng(asked.seed)) if own else measured_inside(log)
    starts = sorted({max(round(float(each) / 60), 1) for each in asked.starts_s.split(",")})
    worlds = make_worlds(history, bench, inside, 2 * asked.days, scale=asked.scale, seed=asked.seed, starts=starts)
    half = asked.days * DAY_MIN
    spans = {"training": slice(max(starts), half), "scored": slice(half, 2 * half)}
    found: dict[str, dict[int, Any]] = {}
    for start_min, world in worlds.items():
        for name, plans_for, planner, grid in planners(world, half):
            found.setdefault(name, {})[start_min] = best(plans_for, planner, grid, spans)
        print(f"{start_min} min: done", file=sys.stderr, flush=True)
    _show(found, starts)
    usual = worlds.get(START_MIN, worlds[starts[0]])
    ours = found[OURS][usual.start_min]["hindsight"]
    wanted = forecast(usual, *ours["knobs"]) if ours else reactive(usual, 1.2, 10)
    checked = lab_check(usual, bench, wanted, spans["scored"], asked.samples)
    for each in checked:
        print(f"lab: {each}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({"planners": found, "lab": checked, "seed": asked.seed}, indent=1) + "\n")


def _show(found: dict[str, dict[int, Any]], starts: Sequence[int]) -> None:
    """Print GPU-hours by hindsight's knobs, and the share in time under knobs of the days before."""
    print("GPU-hours at which 99 % are in time, and, over reactive; then by knobs of the days before: hours, in time")
    print(f"| planner | {' | '.join(f'{each} min to start' for each in starts)} |")
    print(f"|---|{'---|' * len(starts)}", flush=True)
    for name, by_start in found.items():
        cells = []
        for start_min in starts:
            now, then = by_start[start_min]["hindsight"], by_start[start_min]["before"]
            reactive_then = found["reactive"][start_min]["hindsight"]
            over = f" ({now['gpu_hours'] / reactive_then['gpu_hours'] - 1:+.0%})" if now and reactive_then else ""
            first = f"{now['gpu_hours']:,.0f}{over}" if now else "–"
            cells.append(f"{first}; {'{gpu_hours:,.0f}, {in_time:.1%}'.format(**then) if then else '–'}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
