"""`make bench-forecast-live`: a day in minutes on a whole suite of simulated workers, against what was said before.

The suite is given some days of history (`fulcrum forecast import`), then a part of a day is served, `--speed` times as
fast as a day passes. Printed: what forecast, plan and alert said at which moment, and what came: how much of
it lay in the bands, and when arrivals passed what the workers there can serve. Arrivals are Poisson, at a rate with a
daily hump and a noise that the history has too.
"""

import argparse
import asyncio
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from libs.testing.suites.suite import RunningSuite, running_suite

PROFILE: Final = "smollm2-135m-cpu"
PREFILL, DECODE = 3, 1
ACTING: Final = (1, 1, 4)
"""Prefill, decode and spare workers where the planner acts."""
PROMPT_TOKENS, OUTPUT_TOKENS = 60, 40
SLO: Final = "ttft=3s,tpot=150ms"
NIGHT_RPS, PEAK_RPS, PEAK_H, WIDTH_H = 1.0, 7.0, 14.0, 3.5
NOISE, HANG = 0.15, 0.9
"""Standard deviation of the rate's logarithm, and its correlation from one ten minutes to the next."""
WAIT_S: Final = 240.0
CLIENT_TIMEOUT_S: Final = 90.0


def rate_at(hour: float) -> float:
    """Requests a second, without noise."""
    off = (hour - PEAK_H + 12) % 24 - 12
    return NIGHT_RPS + PEAK_RPS * math.exp(-((off / WIDTH_H) ** 2))


class Noise:
    """A factor that wanders, by ten minutes of the day."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._value = 0.0

    def next(self) -> float:
        """For the next ten minutes."""
        fresh = self._random.gauss(0.0, NOISE * math.sqrt(1 - HANG * HANG))
        self._value = HANG * self._value + fresh
        return math.exp(self._value)


def write_history(path: Path, days: int, end_h: float, seed: int) -> None:
    """Bins of ten minutes that end at an hour of the day."""
    noise, rows = Noise(seed), ["t_s,requests_per_s,known_requests_per_s,prefill_tokens_per_s,decode_tokens_per_s"]
    count = days * 144
    for place in range(count):
        rate = rate_at(end_h - (count - place - 0.5) / 6) * noise.next()
        rows.append(f"{place * 600},{rate:.4f},{rate:.4f},{rate * PROMPT_TOKENS:.3f},{rate * OUTPUT_TOKENS:.3f}")
    path.write_text("\n".join(rows) + "\n")


async def drive(gateway: str, model: str, *, start_h: float, hours: float, speed: float, seed: int) -> dict[str, int]:
    """Serve a part of the day in open loop; answers by status."""
    chance, noise, done = random.Random(seed + 1), Noise(seed + 2), dict[str, int]()
    began_s, factors = time.monotonic(), [noise.next() for _ in range(int(hours * 6) + 2)]
    at_s, end_s = 0.0, hours * 3600 / speed

    async def ask(client: httpx.AsyncClient, output_tokens: int) -> None:
        prompt = "".join(chance.choices("abcdefghij ", k=PROMPT_TOKENS))
        body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
        try:
            status = str((await client.post("/v1/completions", json=body)).status_code)
        except httpx.HTTPError:
            status = "gone"
        done[status] = done.get(status, 0) + 1

    limits = httpx.Limits(max_connections=1000)
    client = httpx.AsyncClient(base_url=gateway, timeout=CLIENT_TIMEOUT_S, limits=limits, trust_env=False)
    async with client, asyncio.TaskGroup() as group:
        while at_s < end_s:
            hour = at_s * speed / 3600
            rate = rate_at(start_h + hour) * factors[int(hour * 6)]
            at_s += chance.expovariate(rate)
            await asyncio.sleep(max(began_s + at_s - time.monotonic(), 0))
            group.create_task(ask(client, round(OUTPUT_TOKENS * chance.uniform(0.5, 1.5))))
    return done


async def watch(
    ready: dict[str, Any], until: asyncio.Event, speed: float, before_s: float, horizon_s: float
) -> dict[str, Any]:
    """A forecast and a plan after `before_s`, each alert of capacity as it first fired, each change of the number of
    workers."""
    found: dict[str, Any] = {"alerts": [], "scaled": {}}
    seen: set[str] = set()
    async with httpx.AsyncClient(base_url=ready["metrics"], timeout=WAIT_S, trust_env=False) as client:
        await asyncio.sleep(before_s)
        found["forecast"] = (await client.get("/v1/forecast", params={"horizon": f"{horizon_s:g}s"})).json()
        found["forecast_unix_s"] = time.time()
        while not until.is_set():
            alerts = (await client.get("/v1/alerts")).json()["firing"]
            for alert in alerts:
                if alert["name"] == "FulcrumCapacityShort" and alert["id"] not in seen:
                    seen.add(alert["id"])
                    found["alerts"].append({**alert, "seen_unix_s": alert["started_unix_ms"] / 1e3})
                    if "plan" not in found:
                        found["plan"] = (await client.get("/v1/capacity", params=_plan_params(horizon_s))).json()
            decisions = (await client.get(f"{ready['planner']}/v1/decisions", params={"limit": 100})).json()
            found["scaled"] |= {each["id"]: each for each in decisions if each["action"] == "scale"}
            await asyncio.sleep(60 / speed)
        span = {"span": f"{horizon_s * 1.2:g}s", "window": "15m"}
        found["came"] = (await client.get("/v1/demand", params=span)).json()
    return found


def _plan_params(horizon_s: float) -> dict[str, str]:
    return {"slo": SLO, "horizon": f"{horizon_s:g}s", "check": "false"}


def run_command(suite: RunningSuite, *words: str) -> dict[str, Any]:
    """A `fulcrum` command with --json."""
    done = subprocess.run(
        [sys.executable, "-m", "libs.cli.main", *words, "--json"],
        env=suite.env,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def live(suite: RunningSuite, args: argparse.Namespace, history: Path) -> dict[str, Any]:
    """The part of the day."""
    gateway, model = suite.ready["gateway"], suite.ready["model"]
    run_command(suite, "forecast", "import", str(history))
    until, horizon_s, before_s = asyncio.Event(), args.hours * 3600 / args.speed, args.before * 3600 / args.speed
    began_unix_s = time.time() + before_s
    watching = asyncio.create_task(watch(suite.ready, until, args.speed, before_s, horizon_s))
    hours = args.before + args.hours
    print(f"serving {hours:g} h of a day in {before_s + horizon_s:.0f} s", file=sys.stderr, flush=True)
    start_h = args.start - args.before
    statuses = await drive(gateway, model, start_h=start_h, hours=hours, speed=args.speed, seed=args.seed)
    await asyncio.sleep(15 * 60 / args.speed)
    until.set()
    return {**await watching, "statuses": statuses, "began_unix_s": began_unix_s}


def judge(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What was said against what came; hours are of the day."""
    began = found["began_unix_s"]

    def hour(unix_s: float) -> float:
        return float(args.start + (unix_s - began) * args.speed / 3600)

    came = arrivals(found)
    quarter_s = 900 / args.speed
    first_s, last_s = began + quarter_s, began + args.hours * 3600 / args.speed - quarter_s
    inside = [(at, rate) for at, rate in came if first_s <= at <= last_s]
    series = found["forecast"]["series"]["requests"]
    starts = found["forecast"]["starts_unix_s"]
    held, errors = [], []
    for at, rate in inside:
        place = int(np.argmin([abs(start - at) for start in starts]))
        held.append(series["p5"][place] <= rate <= series["p95"][place])
        errors.append((abs(series["p50"][place] - rate), rate))
    plan = found.get("plan")
    reported: dict[str, Any] = {
        "bins": len(held),
        "in_90_band": round(float(np.mean(held)), 3) if held else None,
        "wape": round(sum(e for e, _ in errors) / max(sum(r for _, r in errors), 1e-9), 3),
        "statuses": found["statuses"],
        "alerts": [
            {
                "at_h": round(hour(each["seen_unix_s"]), 2),
                "says_h": round(hour(_said_unix_s(each)), 2),
                "reason": each["reason"],
                "labels": each["labels"],
            }
            for each in found["alerts"]
        ],
        "scaled": [
            {
                "at_h": round(hour(each["decided_unix_ns"] / 1e9), 2),
                "reason_code": each["reason_code"],
                "workers_from": each["scale"]["serving"],
                "workers_to": each["scale"]["wished"],
                "reason": each["reason"],
            }
            for each in scaled(found)
        ],
    }
    if plan is not None:
        for phase, pool in plan["pools"].items():
            limit = pool["there_requests_per_s"]
            over = [at for (at, rate), (_, more) in pairwise(inside) if limit and min(rate, more) > limit]
            said = pool["runs_short_unix_s"]
            reported[phase] = {
                "there_gpus": pool["there"],
                "there_requests_per_s": limit,
                "said_short_h_p50": None if said["p50"] is None else round(hour(said["p50"]), 2),
                "said_short_h_p95": None if said["p95"] is None else round(hour(said["p95"]), 2),
                "was_short_h": round(hour(over[0]), 2) if over else None,
            }
    return reported


def _said_unix_s(alert: dict[str, Any]) -> float:
    """The moment that an alert names: the first such time of day from when it fired on."""
    found = re.search(r"at (\d+):(\d+)(?::(\d+))? on", alert["reason"])
    assert found is not None
    local = time.localtime(alert["seen_unix_s"])
    seconds = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0)
    ahead = seconds - (local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec)
    return float(alert["seen_unix_s"]) + ahead % 86_400


def scaled(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes of the number of workers, the earliest first."""
    return sorted(found["scaled"].values(), key=lambda each: int(each["decided_unix_ns"]))


def clock(hour: float) -> str:
    """ "7:11"."""
    return f"{int(hour)}:{int(hour * 60) % 60:02d}"


def arrivals(found: dict[str, Any]) -> list[tuple[float, float]]:
    """(moment, requests a second) of each bin that is heard, without what was imported."""
    came, total = found["came"], np.zeros(len(found["came"]["starts_unix_s"]))
    for row in came["series"]:
        if row["tenant"] != "imported":
            total += np.array(row["requests"])
    return [
        (at, count / came["bin_s"])
        for at, count, heard in zip(came["starts_unix_s"], total.tolist(), came["heard"], strict=True)
        if heard
    ]


def draw(found: dict[str, Any], reported: dict[str, Any], args: argparse.Namespace, path: Path) -> None:
    """Fan, arrivals, what the workers there serve, and the alert."""
    import matplotlib as mpl  # noqa: PLC0415 (an extra)

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "fulcrum"

    def hours(moments: list[float]) -> Any:
        return args.start + (np.array(moments) - found["began_unix_s"]) * args.speed / 3600

    figure, axes = plt.subplots(figsize=(9, 4))
    said = found["forecast"]
    at, rates = hours(said["starts_unix_s"]), said["series"]["requests"]
    for low, high, dark in (("p5", "p95", 0.15), ("p10", "p90", 0.2), ("p25", "p75", 0.3)):
        axes.fill_between(at, rates[low], rates[high], color="#0b6e4f", alpha=dark, linewidth=0)
    axes.plot(at, rates["p50"], color="#0b6e4f", label=f"said at {args.start:g}:00, with bands of 50, 80 and 90 %")
    came = arrivals(found)
    axes.plot(
        hours([moment for moment, _ in came]), [rate for _, rate in came], color="#334155", linewidth=1, label="came"
    )
    decode = reported.get("decode")
    if decode:
        limit = decode["there_requests_per_s"]
        axes.axhline(limit, color="#b45309", linestyle="--", label="the decode workers there serve")
    for alert in reported["alerts"]:
        words = f"alert at {clock(alert['at_h'])}: {alert['labels']['phase']} short from {clock(alert['says_h'])} on"
        axes.axvline(alert["at_h"], color="#b91c1c", linewidth=1, label=words)
        axes.axvline(alert["says_h"], color="#b91c1c", linewidth=1, linestyle=":")
    changes = reported["scaled"]
    if changes:
        workers = axes.twinx()
        at_h = [args.start, *(each["at_h"] for each in changes), args.start + args.hours]
        counts = [changes[0]["workers_from"], *(each["workers_to"] for each in changes), changes[-1]["workers_to"]]
        workers.step(at_h, counts, where="post", color="#1d4ed8", linewidth=1.5)
        workers.set(ylabel="workers wished for (blue)", ylim=(0, 2 * max(counts)))
    axes.set(xlabel="hour of the day", ylabel="requests/s", xlim=(args.start, args.start + args.hours), ylim=(0, None))
    axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=float, default=60.0)
    parser.add_argument("--start", type=float, default=7.0, help="hour of the day")
    parser.add_argument("--before", type=float, default=4.0, help="hours served before it, in which tables are made")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--days", type=int, default=5, help="of history")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--acts", action="store_true", help="the planner starts spare workers as the plan wishes")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    env = {
        "FULCRUM_METRICS_DAY_S": f"{86_400 / args.speed:g}",
        "FULCRUM_METRICS_CAPACITY_SLO": SLO,
        "FULCRUM_METRICS_WORKER_START_S": "4",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_history(folder / "history.csv", args.days, args.start - args.before, args.seed)
        prefill, decode, spare = ACTING if args.acts else (PREFILL, DECODE, 0)
        more = ("--spare", str(spare)) if args.acts else ("--workers-per-process", "4")
        workers = ("--prefill", str(prefill), "--decode", str(decode), *more)
        with running_suite(folder, "--engine", "sim", "--sim-profile", PROFILE, *workers, env=env) as suite:
            run_command(suite, "planner", "mode", "auto" if args.acts else "advisory")
            found = asyncio.run(live(suite, args, folder / "history.csv"))
    reported = judge(found, args)
    if args.out:
        args.out.write_text(json.dumps({"reported": reported, **found}))
    if args.picture:
        draw(found, reported, args, args.picture)
    print(json.dumps(reported, indent=1))


if __name__ == "__main__":
    main()
