"""The capacity plan of a model: GPUs by pool and hour, expected shortages and costs."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from math import floor, inf, log
from pathlib import Path
from typing import Any, Final

import numpy as np

from libs.capacity.inputs import HOUR_S, PlanInput, input_from_json
from libs.capacity.measure import SIZES, Bench
from libs.capacity.traffic import PlanTraffic, gap_cv, made_lengths
from libs.contracts.errors import InvalidRequest
from libs.demand.report import DemandOutlook, coarser_history, make_outlook
from libs.lab.hardware import Hardware, resolve
from libs.lab.slo import SloSpec, parse_slo
from libs.lab.study import Note, quiet
from libs.perfmodel.profiles import Profile
from libs.policy.capacity import (
    PHASES,
    CapacityPlan,
    Phase,
    PoolHour,
    PoolTable,
    WorkerKind,
    first_shortages,
    gpu_hours,
    make_plan,
    most_supported,
    runs_short,
    sample_paths,
)
from libs.policy.forecast.history import DAY_S, DemandHistory, Floats

# The version of the measurement and its file format. A new version invalidates all stored tables.
LAYOUT: Final = 4
MOST_FILES: Final = 200


def kept_tables(bench: Bench, folder: Path | None, note: Note = lambda line: None) -> dict[Phase, PoolTable]:
    """Return the tables stored in the folder, or measure and store them. With a folder of None, nothing is stored.

    Raise InvalidRequest if the SLO cannot be met.
    """
    path = None if folder is None else folder / f"{fingerprint(bench)}.json"
    if path is not None and path.is_file():
        with suppress(ValueError, KeyError, TypeError, OSError):
            row = json.loads(path.read_text())
            return {phase: PoolTable(tuple(row[phase]["workers"]), tuple(row[phase]["work"])) for phase in PHASES}
    tables = bench.tables(note)
    if path is not None and folder is not None:
        with suppress(OSError):  # a table that cannot be stored is measured again
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({phase: asdict(table) for phase, table in tables.items()}))
            for old in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
                old.unlink()
    return tables


def fingerprint(bench: Bench) -> str:
    """Return a hash of everything that a table depends on."""
    profile = bench.hardware.profile
    what = [
        LAYOUT, SIZES, asdict(profile.step_time), profile.kv_bytes_per_token, profile.kv_memory_bytes, profile.gpus,
        bench.hardware.chunk_tokens, bench.hardware.link_gbps, bench.slo.text, bench.max_sequences, bench.objective,
        bench.seed, bench.traffic.cv, list(bench.traffic.lengths),
        bench.encode_token_ns,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


PATHS: Final = 500
# The default limit on growth. In the tuning half of `make bench-forecast`, about 3 % of hours up to a day ahead exceed
# it, given two days of history.
MOST_GROWTH: Final = 2.0
# A plan for more than this many times the busiest stretch so far contains a note about it.
MOST_BEYOND: Final = 2.0
# The number of workers above which a plan is checked at a fraction of its size, with less work and fewer workers.
MOST_CHECKED: Final = 24
CHECKED_S: Final = 20.0
# A check may take only seconds, but it covers at least `CHECKED_S` of simulated time.
MOST_CHECKED_REQUESTS: Final = 1500
# The KV bytes per token of an 8B model with grouped-query attention, for workers that do not report theirs.
KV_BYTES: Final = 131_072
MAX_SEQUENCES: Final = 256
# Tables are made for mean lengths on this grid, so that they can be reused. The amount of work is computed exactly;
# only its burstiness differs within a step of the grid.
GRID: Final = 1.25


@dataclass(frozen=True, slots=True)
class PlanQuery:
    slo: SloSpec
    horizon_s: float
    """The length of the planned time by the clock."""
    confidence: float = 0.95
    traffic: float = 1.0
    """A factor on the demand."""
    isl: float = 1.0
    osl: float = 1.0
    """Factors on the lengths of prompts (`isl`) and of outputs (`osl`)."""
    growth: float = MOST_GROWTH
    """The maximum demand, as a multiple of the busiest past stretch around the same time of day."""
    spare: int = 0
    gpu_hour: float = 0.0
    """The price of a GPU-hour; 0 if unknown."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """A capacity plan and the data from which it was made."""

    plan: CapacityPlan
    """The plan, in the time of its input."""
    bench: Bench
    tables: dict[Phase, PoolTable]
    work: dict[Phase, Floats]
    """The sampled work of each phase, of shape [paths, stretches]."""
    notes: tuple[str, ...]


def reported_hardware(kind: WorkerKind, name: str) -> Hardware:
    """Return lab hardware that matches workers seen in telemetry. The speed of their links is the lab's default."""
    kv_tokens = kind.kv_tokens or 1_000_000
    profile = Profile(name, kind.speed.step_time, KV_BYTES, kv_tokens * KV_BYTES, kind.gpus)
    chunk = kind.speed.chunk_tokens
    return Hardware(profile, mixed_measured=False, chunk_tokens=chunk, max_sequences=kind.max_sequences)


def bench_of(found: PlanInput, query: PlanQuery, hardware: Hardware) -> Bench:
    """Return the lab bench for the traffic. Mean lengths are rounded to a grid, so that tables can be reused."""
    if found.lengths:
        traffic = PlanTraffic(found.lengths, 1.0)
    else:
        traffic = PlanTraffic(made_lengths(_round(found.mix.prompt_tokens), _round(found.mix.output_tokens)), 1.0)
    traffic = replace(traffic.scaled(query.isl, query.osl), cv=round(2 * gap_cv(found.mix.dispersion)) / 2)
    kv_tokens = hardware.profile.kv_memory_bytes // max(hardware.profile.kv_bytes_per_token, 1)
    fitting = [each for each in traffic.lengths if sum(each) < kv_tokens]
    if not fitting:
        raise InvalidRequest(f"not one request fits into the {kv_tokens:,} tokens of a worker's KV")
    traffic = replace(traffic, lengths=fitting)
    encode_token_ns = 0.0 if found.kind is None else found.kind.encode_token_ns
    sequences = hardware.max_sequences or MAX_SEQUENCES
    return Bench(hardware, query.slo, traffic, sequences, seed=query.seed, encode_token_ns=encode_token_ns)


def rounded(bench: Bench) -> Bench:
    """Return the bench with step times rounded to the tables' grid, because learned step times vary slightly all the
    time.
    """
    model = bench.hardware.profile.step_time
    times: dict[str, Any] = {
        each.name: _round(value) if (value := getattr(model, each.name)) else 0.0
        for each in fields(model)
        if each.name.endswith("_ns")
    }
    step_time = replace(model, **times, interference=round(model.interference, 1))
    hardware = replace(bench.hardware, profile=replace(bench.hardware.profile, step_time=step_time))
    encode_token_ns = _round(bench.encode_token_ns) if bench.encode_token_ns else 0.0
    return replace(bench, hardware=hardware, encode_token_ns=encode_token_ns)


def plan_capacity(
    found: PlanInput, query: PlanQuery, hardware: Hardware, folder: Path | None = None, note: Note = lambda line: None
) -> Planned:
    """Plan the capacity of one model.

    Raise InvalidRequest if the SLO cannot be met or the horizon is invalid.
    """
    bench = bench_of(found, query, hardware)
    tables = kept_tables(rounded(bench), folder, note)
    each = bench.work_each()
    per_token = {
        "prefill": each["prefill"] / bench.traffic.prompt_tokens * (1 - found.mix.cached_share) * query.isl,
        "decode": each["decode"] / bench.traffic.output_tokens * query.osl,
    }
    if found.known:
        rates = np.stack([found.history.prefill, found.history.decode])[None]
        start_s, step_s, notes = found.history.start_s, found.history.step_s, found.history.notes
        rng = np.random.default_rng(query.seed)
        rates = np.repeat(rates, PATHS, axis=0) if len(found.peaks) > 1 else rates
    else:
        try:
            outlook = found.outlook or make_outlook(found.history, query.horizon_s * found.speed)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        rates, rng = draw(outlook, query.seed)
        start_s, step_s = outlook.start_s, outlook.step_s
        rates, notes = limited(found.history, outlook, rates, query)
    inside = rng.choice(found.peaks, rates.shape[::2]) if step_s >= HOUR_S / 2 else np.ones(rates.shape[::2])
    work = {
        phase: np.nan_to_num(rates[:, place] * per_token[phase] * query.traffic * inside)
        for place, phase in enumerate(PHASES)
    }
    starts = [start_s + at * step_s for at in range(rates.shape[2])]
    plan = make_plan(
        work, tables, starts_s=starts, step_s=step_s, confidence=query.confidence, spare=query.spare, there=found.there
    )
    return Planned(plan, bench, tables, work, tuple(notes))


def draw(outlook: DemandOutlook, seed: int) -> tuple[Floats, np.random.Generator]:
    """Return sampled rates in tokens/s of shape [paths, phases, stretches], and the generator for further draws."""
    rng = np.random.default_rng(seed)
    quantiles = np.stack([outlook.quantiles["prefill"], outlook.quantiles["decode"]])
    deviates = rng.standard_normal((PATHS, 3, len(outlook)))
    return sample_paths(quantiles, deviates, outlook.hang, outlook.together), rng


def check_plan(planned: Planned) -> dict[str, Any]:
    """Run the busiest stretch of a plan in the lab, at the plan's confidence and with both phases at their cost."""
    plan, bench = planned.plan, planned.bench
    sums = [sum(plan.pools[phase][at].planned for phase in PHASES) for at in range(len(plan.starts_s))]
    works = {phase: np.quantile(planned.work[phase], plan.confidence, axis=0) for phase in PHASES}
    at = busiest_stretch(sums, works["prefill"] + works["decode"])
    work = {phase: float(works[phase][at]) for phase in PHASES}
    pools = {phase: plan.pools[phase][at].planned - plan.spare for phase in PHASES}
    each = bench.work_each()
    requests = work["prefill"] / each["prefill"] * CHECKED_S
    limit = min(MOST_CHECKED / max(sum(pools.values()), 1), MOST_CHECKED_REQUESTS / max(requests, 1), 1.0)
    part, pools = part_of(pools, limit)
    rate = max(work["prefill"] * part / each["prefill"], 1e-3)
    longer = min(max(work["decode"] * part / (rate * each["decode"]), 0.1), 10.0)
    report = replace(bench, traffic=bench.traffic.scaled(1.0, longer)).check(
        rate, pools["prefill"], pools["decode"], max(MOST_CHECKED_REQUESTS / rate, CHECKED_S)
    )
    return {
        "at_s": plan.starts_s[at],
        "part": round(part, 4),
        "requests_per_s": float(f"{rate:.4g}"),
        "prefill_workers": pools["prefill"],
        "decode_workers": pools["decode"],
        "slo_attainment": round(report.score.slo_attainment, 4),
        "ttft_p90_s": float(f"{report.score.ttft_s.get('p90', 0.0):.4g}"),
        "tpot_p90_s": float(f"{report.score.tpot_s.get('p90', 0.0):.4g}"),
    }


def busiest_stretch(workers: Sequence[int], work: Floats) -> int:
    """Return the index of the stretch that needs most workers.

    Among equal ones, the stretch with most work is returned.
    """
    return int(np.lexsort((work, np.asarray(workers)))[-1])


def part_of(pools: Mapping[Phase, int], limit: float) -> tuple[float, dict[Phase, int]]:
    """Return a share of the pools and its workers, chosen to change the balance of the pools least.

    Among equally good shares, the largest is returned. The share is at most `limit`, but each pool has at least one
    worker.
    """
    best, found = (inf, 0.0), (1.0, dict(pools))
    for phase in PHASES:
        for count in range(1, max(floor(pools[phase] * limit), 1) + 1):
            part = count / pools[phase]
            counts = {each: max(round(pools[each] * part), 1) for each in PHASES}
            off = max(abs(log(counts[each] / (pools[each] * part))) for each in PHASES)
            if (key := (round(off, 2), -part)) < best:
                best, found = key, (part, counts)
    return found


def limited(
    history: DemandHistory, outlook: DemandOutlook, rates: Floats, query: PlanQuery
) -> tuple[Floats, tuple[str, ...]]:
    """Return the sampled rates limited to `query.growth` times past demand, and the notes of the plan.

    `rates` has the shape [paths, phases, stretches].
    """
    step_s, ahead = outlook.step_s, rates.shape[2]
    seen = coarser_history(history, max(round(step_s / history.step_s), 1))
    first = round((outlook.start_s - seen.start_s) / step_s)
    phases = (seen.prefill, seen.decode)
    most = np.stack([most_supported(each, first, ahead, step_s=step_s, growth=query.growth) for each in phases])
    held = int((np.quantile(rates, query.confidence, axis=0) > most).any(axis=0).sum())
    rates = np.minimum(rates, most)
    days, times = len(history) * history.step_s / DAY_S, f"{query.growth:g} times the busiest stretch so far"
    if held:
        note = (
            f"{held} of {ahead} stretches are planned for {times} around their time of day: the forecast allows more, "
            f"but {days:.1f} days of history do not support it (--growth)"
        )
        return rates, (*outlook.notes, note)
    before = "" if query.traffic == 1 else ", before --what-if"
    note = f"no stretch is planned for more than {query.growth:g} times past demand around its time of day (--growth)"
    return rates, (*outlook.notes, note + before, *_beyond_history(seen, rates, query.confidence, days))


def _beyond_history(seen: DemandHistory, rates: Floats, confidence: float, days: float) -> tuple[str, ...]:
    """Return a note if the plan is for far more demand than was ever seen.

    `rates` has the shape [paths, phases, stretches].
    """
    busiest = [float(np.nanmax(each, initial=0.0)) for each in (seen.prefill, seen.decode)]
    planned = np.quantile(rates, confidence, axis=0).max(axis=1)
    times = max((float(most) / came for most, came in zip(planned, busiest, strict=True) if came > 0), default=0.0)
    if times < MOST_BEYOND:
        return ()
    return (
        f"planned for up to {times:.1f} times the busiest stretch so far: {confidence:.0%} sure is wide that far ahead "
        f"of {days:.1f} days of history, and --horizon or --confidence narrow it",
    )


def plan_json(found: PlanInput, query: PlanQuery, planned: Planned, check: dict[str, Any] | None) -> dict[str, Any]:
    """Return the output of `fulcrum capacity plan --json` and of the HTTP route, in GPUs and by the clock."""
    plan, gpus, speed = planned.plan, planned.bench.hardware.profile.gpus, found.speed
    moving, still = gpu_hours(plan, gpus)
    moving, still = moving / speed, still / speed
    notes = list(planned.notes)
    if not found.lengths:
        notes.append("lengths of single requests are not known: log-normal ones of their means stand for them")
    if images_s := planned.bench.encode_token_ns * planned.bench.traffic.prompt_tokens / 1e9:
        share = images_s / planned.bench.work_each()["prefill"]
        notes.append(f"encoding images is {share:.0%} of prefill's work, at the pace of the present workers")
    return {
        "model": found.model,
        "device": planned.bench.hardware.profile.name,
        "gpus_per_worker": gpus,
        "slo": query.slo.text,
        "confidence": query.confidence,
        "spare_workers": query.spare,
        "what_if": {"traffic": query.traffic, "isl": query.isl, "osl": query.osl},
        "step_s": plan.step_s / speed,
        "starts_unix_s": [each / speed for each in plan.starts_s],
        "pools": {
            phase: {
                "gpus": [each.planned * gpus for each in plan.pools[phase]],
                "surely": [each.surely * gpus for each in plan.pools[phase]],
                "p50": [each.p50 * gpus for each in plan.pools[phase]],
                "p95": [each.p95 * gpus for each in plan.pools[phase]],
                "short": [round(each.short, 4) for each in plan.pools[phase]],
                "there": None if phase not in plan.there else plan.there[phase] * gpus,
                "most": plan.most(phase) * gpus,
                "there_requests_per_s": None
                if phase not in plan.there
                else round(planned.tables[phase].most_work(plan.there[phase]) / planned.bench.work_each()[phase], 4),
                "runs_short_unix_s": {
                    "p50": _by_clock(runs_short(plan, phase, "p50"), speed),
                    "p95": _by_clock(runs_short(plan, phase, "p95"), speed),
                },
            }
            for phase in PHASES
        },
        "shortages": [
            {
                "phase": each.phase,
                "at_unix_s": each.at_s / speed,
                "gpus": each.workers * gpus,
                "sure": round(each.sure, 3),
            }
            for each in first_shortages(plan)
        ],
        "gpu_hours": {"hourly": round(moving, 2), "fixed": round(still, 2)},
        "cost": None
        if not query.gpu_hour
        else {"hourly": round(moving * query.gpu_hour, 2), "fixed": round(still * query.gpu_hour, 2)},
        "traffic": {
            "prompt_tokens": round(planned.bench.traffic.prompt_tokens, 1),
            "output_tokens": round(planned.bench.traffic.output_tokens, 1),
            "cached_share": round(found.mix.cached_share, 4),
            "dispersion": round(found.mix.dispersion, 2),
            "peak_in_hour_p95": round(float(np.quantile(found.peaks, 0.95)), 3),
        },
        "table": {
            phase: {"workers": list(table.workers), "work": [round(each, 3) for each in table.work]}
            for phase, table in planned.tables.items()
        },
        "check": check,
        "notes": notes,
    }


def plan_from_json(row: dict[str, Any]) -> CapacityPlan:
    """Convert the result of `plan_json` back to a plan, in workers and Unix seconds.

    Raise KeyError or TypeError if the row is invalid.
    """
    gpus = row["gpus_per_worker"]
    pools: dict[Phase, tuple[PoolHour, ...]] = {}
    for phase in PHASES:
        pool = row["pools"][phase]
        columns = zip(pool["surely"], pool["p50"], pool["p95"], pool["gpus"], pool["short"], strict=True)
        pools[phase] = tuple(
            PoolHour(a // gpus, b // gpus, c // gpus, d // gpus, short) for a, b, c, d, short in columns
        )
    there = {phase: row["pools"][phase]["there"] for phase in PHASES}
    return CapacityPlan(
        tuple(row["starts_unix_s"]),
        row["step_s"],
        pools,
        {phase: count // gpus for phase, count in there.items() if count is not None},
        row["confidence"],
        row["spare_workers"],
    )


def _by_clock(at_s: float | None, speed: float) -> float | None:
    return None if at_s is None else at_s / speed


def _round(value: float) -> float:
    # Round to the nearest power of `GRID`.
    return float(f"{GRID ** round(log(value) / log(GRID)):.4g}") if value > 0 else 1.0


def make_plan_row(
    row: dict[str, Any], query: dict[str, Any], folder: str, device: str, *, check: bool
) -> dict[str, Any]:
    """Return the result of `plan_json` for an encoded input. Raise InvalidRequest if no plan is possible.

    `row` is a result of `input_json`. `query` contains the fields of a PlanQuery, with `slo` as text.
    """
    quiet()
    found = input_from_json(row)
    wanted = PlanQuery(**{**query, "slo": parse_slo(query["slo"])})
    if device:
        hardware = resolve(found.model, device)
    elif found.kind is None:
        raise InvalidRequest("no worker has reported its step times yet")
    else:
        hardware = reported_hardware(found.kind, found.model)
    planned = plan_capacity(found, wanted, hardware, Path(folder))
    return plan_json(found, wanted, planned, check_plan(planned) if check else None)


def step_back() -> None:
    """Lower the priority of this process below that of all others on the machine."""
    os.nice(10)
