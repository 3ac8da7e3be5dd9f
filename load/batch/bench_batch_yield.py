"""`make bench-batch-yield`: what a batch job costs people: online TTFT with one running, against without, in one run.

A suite on the sim engine in real time is asked by an open loop of people (Poisson arrivals, at the same moments with
and without a job). Rounds alternate: nobody else, then a batch job that never runs dry. With `--virtual` the same
gateway, workers and engine core run in virtual time, where they do not share a CPU: what is left is policy. Prints a
table and, as its last line, one JSON object; exit code 1 when the aim is missed.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from libs.testing.batch.jobs import ENDED, ENDPOINT
from libs.testing.suites.processes import gateway_metrics, until_whole
from libs.testing.suites.suite import RunningSuite, running_suite
from load.lab.yield_lab import Scene, run_scene

LINES = 20_000
"""Of the batch job: more than a round can answer."""
SETTLE_S = 1.0
"""Before a round is measured, once batch lines run."""
END_S = 60.0
POLL_S = 0.05
MOST_P99_RATIO = 1.1
"""Aimed at: people's TTFT with a job over that without."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one side asks."""

    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Round:
    """One round's figures."""

    batch: bool
    ttft_ms: list[float] = field(default_factory=list)
    lines_per_s: float = 0.0
    in_flight: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 when people were not answered, or the aim is missed."""
    parser = argparse.ArgumentParser(prog="make bench-batch-yield", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round (default 10)")
    parser.add_argument("--per-s", type=float, default=12.0, help="people's requests a second (default 12)")
    parser.add_argument("--online", type=int, nargs=2, default=(1000, 8), metavar=("ISL", "OSL"))
    parser.add_argument("--line", type=int, nargs=2, default=(1000, 64), metavar=("ISL", "OSL"))
    parser.add_argument("--decode", type=int, default=2, help="decode workers (default 2)")
    parser.add_argument("--virtual", action="store_true", help="in virtual time: policy alone, no CPU")
    options = parser.parse_args(argv)
    return _tell(_virtual_rounds(options) if options.virtual else _real_rounds(options))


def _virtual_rounds(options: argparse.Namespace) -> list[Round]:
    scene = Scene(tuple(options.online), tuple(options.line), options.per_s, options.seconds, options.decode)
    found: list[Round] = []
    for number in range(options.rounds):
        for batch in (False, True):
            seen = run_scene(scene, batch=batch, seed=number)
            found.append(Round(batch, seen.ttft_ms, seen.lines_per_s))
            _tell_round(number, found[-1])
    return found


def _real_rounds(options: argparse.Namespace) -> list[Round]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files")}
        shape = ("--engine", "sim", "--prefill", "1", "--decode", str(options.decode))
        with running_suite(folder, *shape, env=env) as suite:
            return asyncio.run(_rounds(suite, folder, options))


async def _rounds(suite: RunningSuite, folder: Path, options: argparse.Namespace) -> list[Round]:
    _write(folder / "lines.jsonl", Shape(*options.line))
    found: list[Round] = []
    async with httpx.AsyncClient(base_url=suite.gateway, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        await until_whole(http, suite)
        with (folder / "lines.jsonl").open("rb") as file:
            form = {"purpose": "batch"}
            uploaded = (await http.post("/v1/files", data=form, files={"file": ("lines.jsonl", file)})).json()
        await _people(http, Shape(*options.online), options.per_s, 2.0, seed=0, name="first")  # step times are learned
        for number in range(options.rounds):
            for batch in (False, True) if number % 2 == 0 else (True, False):
                found.append(await _round(http, uploaded["id"], options, batch=batch, seed=number))
                _tell_round(number, found[-1])
    return found


def _tell_round(number: int, one: Round) -> None:
    p99, lines = _quantile(one.ttft_ms, 0.99), f"{one.lines_per_s:.0f} lines/s, {one.in_flight:.0f} in flight"
    print(f"round {number}, batch {one.batch}: p99 {p99:.0f} ms, {lines}", file=sys.stderr, flush=True)


async def _round(
    http: httpx.AsyncClient, file_id: str, options: argparse.Namespace, *, batch: bool, seed: int
) -> Round:
    found = Round(batch)
    job = ""
    if batch:
        asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        job = (await http.post("/v1/batches", json=asked)).json()["id"]
        async with asyncio.timeout(END_S):
            while await _answered(http, job) == 0:  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLE_S)
        before, begun_s = await _answered(http, job), time.monotonic()
    name = f"{seed} {batch}"  # a prompt asked twice would be found cached
    found.ttft_ms = await _people(http, Shape(*options.online), options.per_s, options.seconds, seed=seed, name=name)
    if batch:
        found.in_flight = (await gateway_metrics(http, str(http.base_url)))["batch_in_flight"]
        found.lines_per_s = (await _answered(http, job) - before) / (time.monotonic() - begun_s)
        await http.post(f"/v1/batches/{job}/cancel")
        async with asyncio.timeout(END_S):
            while (await http.get(f"/v1/batches/{job}")).json()["status"] not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    return found


async def _answered(http: httpx.AsyncClient, job: str) -> int:
    return int((await http.get(f"/v1/batches/{job}")).json()["request_counts"]["completed"])


async def _people(
    http: httpx.AsyncClient, shape: Shape, per_s: float, seconds: float, *, seed: int, name: str
) -> list[float]:
    """Ask at random moments, whoever is still being answered; ms to each first token. `name` begins all prompts."""
    chance = random.Random(seed)
    found: list[float] = []
    begun_s = time.monotonic()
    at_s = 0.0
    async with asyncio.TaskGroup() as group:
        while (at_s := at_s + chance.expovariate(per_s)) < seconds:
            await asyncio.sleep(max(begun_s + at_s - time.monotonic(), 0))
            prompt = f"{name} {at_s} ".ljust(shape.prompt_tokens, "x")
            group.create_task(_ask(http, prompt, shape.output_tokens, found))
    return found


async def _ask(http: httpx.AsyncClient, prompt: str, tokens: int, found: list[float]) -> None:
    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    begun_s = time.monotonic()
    async with http.stream("POST", ENDPOINT, json=body) as answer:
        answer.raise_for_status()
        first = True
        async for _ in answer.aiter_raw():
            if first:
                found.append((time.monotonic() - begun_s) * 1e3)
                first = False


def _write(path: Path, shape: Shape) -> None:
    with path.open("w") as file:
        for number in range(LINES):
            prompt = f"Line {number} ".ljust(shape.prompt_tokens, "y")
            body = {"model": "sim", "prompt": prompt, "max_tokens": shape.output_tokens, "ignore_eos": True}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _tell(rounds: Sequence[Round]) -> int:
    sides = {batch: [one for one in rounds if one.batch is batch] for batch in (False, True)}
    pooled = {batch: [ms for one in side for ms in one.ttft_ms] for batch, side in sides.items()}
    figures = {
        batch: {"asked": len(values), "p50_ms": _quantile(values, 0.5), "p90_ms": _quantile(values, 0.9),
                "p99_ms": _quantile(values, 0.99)}
        for batch, values in pooled.items()
    }  # fmt: skip
    table = Table(box=None)
    for title in ("", "asked", "TTFT p50 ms", "p90 ms", "p99 ms", "lines/s"):
        table.add_column(title, justify="right")
    lines_per_s = statistics.mean(one.lines_per_s for one in sides[True])
    for batch, row in figures.items():
        shown = (f"{value:.0f}" if isinstance(value, int) else f"{value:.1f}" for value in row.values())
        table.add_row("with batch" if batch else "alone", *shown, f"{lines_per_s:.0f}" if batch else "")
    Console(width=120).print(table)
    ratio = figures[True]["p99_ms"] / max(figures[False]["p99_ms"], 1e-9)
    paired = [
        _quantile(busy.ttft_ms, 0.99) / max(_quantile(quiet.ttft_ms, 0.99), 1e-9)
        for quiet, busy in zip(sides[False], sides[True], strict=True)
    ]
    missed = misses(ratio, {"with batch" if batch else "alone": len(values) for batch, values in pooled.items()})
    print(f"p99 with batch over p99 without: {ratio:.2f} (by rounds {min(paired):.2f} to {max(paired):.2f})")
    print(
        json.dumps(
            {
                "bench": "batch yield",
                "p99_ratio": round(ratio, 3),
                "round_ratios": [round(one, 3) for one in paired],
                "alone": figures[False],
                "with_batch": figures[True],
                "lines_per_s": round(lines_per_s, 1),
                "rounds": [{key: value for key, value in asdict(one).items() if key != "ttft_ms"} for one in rounds],
                "missed": missed,
            }
        )
    )
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return int(bool(missed))


def misses(p99_ratio: float, asked: Mapping[str, int]) -> list[str]:
    """What is not as aimed at, in words. `asked`: people who were answered, by side."""
    if nobody := [side for side, count in asked.items() if not count]:
        return [f"nobody was answered {side}" for side in nobody]
    if p99_ratio <= MOST_P99_RATIO:
        return []
    return [f"p99 with batch over p99 without: {p99_ratio:.2f}, at most {MOST_P99_RATIO:g}"]


if __name__ == "__main__":
    sys.exit(main())
