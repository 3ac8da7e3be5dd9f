"""The plan of `fulcrum capacity plan`: its computation and its output."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from libs.capacity.inputs import PlanInput, input_from_json, input_of_history, input_of_trace
from libs.capacity.planning import PlanQuery, check_plan, plan_capacity, plan_json, reported_hardware
from libs.cli.console import make_console
from libs.cli.find import FORECAST_TIMEOUT_S, find_suite, get_json
from libs.cli.forecast.live import UNIX_S, clock_time
from libs.cli.lab.commands import MODEL
from libs.cli.lab.runs import noting, trace_of
from libs.contracts.errors import InvalidRequest
from libs.forecast.demand_file import COLUMNS, read_demand
from libs.lab.hardware import Hardware, profile_named, resolve
from libs.lab.policies import split_of
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.policy.capacity import PHASES
from libs.runtime.paths import cache_dir

MOST_ROWS: Final = 24
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
FACTORS: Final = ("traffic", "isl", "osl")
_HOURS_UNTIL_S: Final = 48 * 3600.0
# Lengths of a row that divide a day, so that each day's rows start at the same times.
_ROW_HOURS: Final = (1, 2, 3, 4, 6, 8, 12, 24)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    horizon: str
    slo: str
    confidence: float
    trace: str
    what_if: str
    model: str
    device: str
    profile: str
    there: str
    growth: float
    spare: int
    gpu_hour: float
    check: bool
    seed: int


def print_plan(wanted: PlanOptions, ready_file: Path | None, *, as_json: bool) -> None:
    """Make the plan and print it. Raise InvalidRequest and StartupError."""
    quiet()
    factors, device = parse_what_if(wanted.what_if)
    query = PlanQuery(
        slo=parse_slo(wanted.slo),
        horizon_s=parse_horizon(wanted.horizon),
        confidence=wanted.confidence,
        growth=wanted.growth,
        spare=wanted.spare,
        gpu_hour=wanted.gpu_hour,
        seed=wanted.seed,
        **factors,
    )
    with noting() as notes:
        notes.doing("reading demand")
        found = _input(wanted, ready_file)
        hardware = _hardware(wanted, found, device)
        planned = plan_capacity(found, query, hardware, cache_dir() / "capacity", notes.doing)
        notes.doing("running the busiest stretch in the lab")
        check = check_plan(planned) if wanted.check else None
    row = plan_json(found, query, planned, check)
    if as_json:
        print(json.dumps(row))
    else:
        show_plan(row, relative=bool(wanted.trace))


def parse_what_if(text: str) -> tuple[dict[str, float], str]:
    """Return ({"traffic": 1.3}, device) from "traffic=1.3,device=b200". Raise InvalidRequest."""
    factors: dict[str, float] = {}
    device = ""
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if name == "device" and value:
            device = value
            continue
        try:
            factor = float(value)
        except ValueError:
            factor = 0.0
        if name not in FACTORS or not 0.01 <= factor <= 100:
            raise InvalidRequest(
                f"--what-if {part[:40]!r} must be traffic=, isl= or osl= with 0.01 to 100, or device=NAME"
            )
        factors[name] = factor
    return factors, device


def parse_horizon(text: str) -> float:
    """Return the seconds of a time such as "6h". Raise InvalidRequest."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    plain = number.isascii() and number.replace(".", "", 1).isdigit()
    if unit in _UNITS and plain and 0 < float(number) * _UNITS[unit] <= 14 * 86_400:
        return float(number) * _UNITS[unit]
    raise InvalidRequest(f"--horizon {text[:40]!r} is not a time such as 90m, 24h or 7d, up to 14d")


def _input(wanted: PlanOptions, ready_file: Path | None) -> PlanInput:
    if not wanted.trace:
        suite = find_suite(ready_file)
        query = {"model": wanted.model, "horizon": wanted.horizon}
        row = get_json(suite.metrics, "/v1/capacity/input", FORECAST_TIMEOUT_S, exact=True, **query)
        return input_from_json(row)
    model = wanted.model or MODEL
    found = (
        input_of_history(read_demand(Path(wanted.trace)), model)
        if _is_demand(wanted.trace)
        else input_of_trace(trace_of(wanted.trace, 0.0, 0.0, wanted.seed), model)
    )
    if wanted.there:
        parts = wanted.there.split(":")
        total = sum(int(part) for part in parts if part.isdigit())
        found = replace(found, there=dict(zip(PHASES, split_of(wanted.there, total), strict=True)))
    return found


def _is_demand(text: str) -> bool:
    path = Path(text)
    if not path.is_file() or path.suffix == ".gz":
        return False
    with path.open(encoding="utf-8", errors="replace") as lines:
        head = lines.readline(4096)
    return all(column in head for column in ("t_s", *COLUMNS))


def _hardware(wanted: PlanOptions, found: PlanInput, device: str) -> Hardware:
    if wanted.profile and not device:
        return profile_named(wanted.profile)
    if not wanted.trace and not device:
        if found.kind is None:
            raise InvalidRequest("no worker has reported its step times yet: name a profile with --profile")
        return reported_hardware(found.kind, found.model)
    return resolve(wanted.model or found.model, device or wanted.device)


def moment_text(at_s: float, *, relative: bool) -> str:
    """Return a time of day, or with `relative` the time since a trace's beginning unless the trace has Unix times."""
    if not relative or at_s >= UNIX_S:
        return clock_time(at_s)
    if at_s < _HOURS_UNTIL_S:
        return f"{at_s / 3600:.1f} h"
    days, left_s = divmod(at_s, _UNITS["d"])
    return f"{days:.0f} d {left_s / 3600:.3g} h"


def show_plan(row: dict[str, Any], *, relative: bool) -> None:
    """Print a plan as a table and sentences. With `relative`, times may count from a trace's beginning."""
    console = make_console()
    moment = partial(moment_text, relative=relative)
    about = row["traffic"]
    console.print(
        f"{row['model']} on {row['device']}, {row['slo']}, {row['confidence']:.0%} sure: prompts of "
        f"{about['prompt_tokens']:,.0f} tokens, answers of {about['output_tokens']:,.0f}, index of dispersion "
        f"{about['dispersion']:g}, busiest 10 min of an hour up to {about['peak_in_hour_p95']:g} times its mean"
    )
    console.print(_table(row, moment))
    for phase in PHASES:
        pool = row["pools"][phase]
        if pool["there"] is None:
            continue
        words = {
            name: "not in this time" if at is None else moment(at) for name, at in pool["runs_short_unix_s"].items()
        }
        console.print(f"{phase}: {pool['there']} GPUs available; short from (p50) {words['p50']}, (p95) {words['p95']}")
    for each in row["shortages"]:
        gpus = f"{each['gpus']} GPU{'s' if each['gpus'] != 1 else ''}"
        console.print(
            f"{each['phase']} short by {gpus} at {moment(each['at_unix_s'])}, {each['sure']:.0%} sure", style="yellow"
        )
    hours, cost = row["gpu_hours"], row["cost"]
    price = f", at a cost of {_figure(cost['hourly'])} and {_figure(cost['fixed'])}" if cost else ""
    console.print(
        f"GPU-hours: {_figure(hours['hourly'])} if GPUs follow demand,"
        f" {_figure(hours['fixed'])} if the peak's are kept throughout{price}"
    )
    check = row["check"]
    if check:
        part = f"a {check['part']:.0%} part of " if check["part"] < 1 else ""
        workers = f"{check['prefill_workers']}:{check['decode_workers']} workers"
        console.print(
            f"The lab serves {check['slo_attainment']:.1%} in time in {part}the busiest stretch: "
            f"{check['requests_per_s']:g} requests/s on {workers}, TTFT p90 {check['ttft_p90_s']:g} s, "
            f"TPOT p90 {check['tpot_p90_s'] * 1e3:.1f} ms"
        )
    for note in row["notes"]:
        console.print(note, style="dim")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def stretches_per_row(count: int, step_s: float) -> int:
    """Return the number of stretches in a row: a divisor of the day if there is one, and at most `MOST_ROWS` rows."""
    if count <= MOST_ROWS:
        return 1
    least = -(-count // MOST_ROWS)
    by_day = (round(hours * 3600 / step_s) for hours in _ROW_HOURS if hours * 3600 >= step_s)
    return next((each for each in by_day if each >= least), least)


def _table(row: dict[str, Any], moment: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("from", no_wrap=True)
    for phase in PHASES:
        table.add_column(f"{phase} GPUs", justify="right", no_wrap=True)
        table.add_column("p50, p95", justify="right", no_wrap=True)
    starts = row["starts_unix_s"]
    every = stretches_per_row(len(starts), row["step_s"])
    for at in range(0, len(starts), every):
        cells = [moment(starts[at])]
        for phase in PHASES:
            pool, last = row["pools"][phase], min(at + every, len(starts))
            short = pool["there"] is not None and max(pool["gpus"][at:last]) > pool["there"]
            most = f"{max(pool['gpus'][at:last])}"
            cells += [
                Text(most, "yellow") if short else most,
                f"{max(pool['p50'][at:last])}, {max(pool['p95'][at:last])}",
            ]
        table.add_row(*cells)
    return table
