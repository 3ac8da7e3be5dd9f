"""`make bench-batch`: lines a second of a batch job beside a plain aiokafka loop that asks the same gateway.

On Apache Kafka and the sim engine at full speed, so that what is between Kafka and the workers is measured. All sides
have the same lines in flight, in alternating rounds of one run. Prints a table and, as its last line, one JSON object;
exit code 1 when the aim is missed.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from libs.testing.batch.jobs import ENDED, submit, write_lines
from libs.testing.servers.stores import real_kafka
from libs.testing.suites.processes import until_whole
from libs.testing.suites.suite import RunningSuite, running_suite
from load.batch.plain_loop import fill, plain_loop
from load.processes import Kinds, processes_below, usage

JOB, PLAIN, TRANSACTIONS = "batch job", "plain loop", "plain loop in transactions"
LEAST_RATIO = 0.5
"""Aimed at: of the plain loop's lines a second."""
TOKENS = 4
POLL_S = 0.05
_FULL_SPEED = {"FULCRUM_WORKER_SIM_PROFILE": "instant", "FULCRUM_LOG_LEVEL": "warning"}


@dataclass(slots=True)
class Side:
    """One way to have lines answered."""

    lines_per_s: list[float] = field(default_factory=list)
    cpu_ms_per_line: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 when the aim is missed."""
    parser = argparse.ArgumentParser(prog="make bench-batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=4000, help="of each round (default 4000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=96, help="lines that run at once (default 96)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "lines.jsonl", options.lines, max_tokens=TOKENS)
        env = {
            **_FULL_SPEED,
            "FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files"),
            "FULCRUM_GATEWAY_BATCH_MAX_IN_FLIGHT": str(options.in_flight),
        }
        shape = ("--engine", "sim", "--prefill", "1", "--decode", "2")
        with real_kafka() as kafka, running_suite(folder, *shape, "--kafka", kafka.servers, env=env) as suite:
            lines = (folder / "lines.jsonl").read_bytes().splitlines()
            sides = asyncio.run(_measure(suite, kafka.servers, folder / "lines.jsonl", lines, options))
    return _tell(sides, options)


async def _measure(
    suite: RunningSuite, servers: str, path: Path, lines: Sequence[bytes], options: argparse.Namespace
) -> dict[str, Side]:
    sides = {name: Side() for name in (JOB, PLAIN, TRANSACTIONS)}
    kinds = processes_below(suite.process.pid, {})
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        for number in range(options.rounds + 1):
            for name in sides if number % 2 else reversed(sides):
                before, topic = _cpu_s(kinds), f"round-{number}-{name.replace(' ', '-')}"
                if name == JOB:
                    lines_per_s = await _job(http, suite, path, options.lines)
                else:
                    await fill(servers, lines, source=topic, sink=f"{topic}-answers")
                    before = _cpu_s(kinds)
                    lines_per_s = await plain_loop(
                        servers, suite.gateway, topic, f"{topic}-answers",
                        lines=options.lines, in_flight=options.in_flight, transactional=name == TRANSACTIONS,
                    )  # fmt: skip
                print(f"round {number}, {name}: {lines_per_s:.0f} lines/s", file=sys.stderr, flush=True)
                if number:  # the first one warms up
                    sides[name].lines_per_s.append(lines_per_s)
                    sides[name].cpu_ms_per_line.append((_cpu_s(kinds) - before) / options.lines * 1e3)
    return sides


def _cpu_s(kinds: Kinds) -> float:
    """Of the suite and this process; the broker is not counted."""
    return sum(one.cpu_s for one in usage(kinds).values())


async def _job(http: httpx.AsyncClient, suite: RunningSuite, path: Path, lines: int) -> float:
    """From the submission, upload included, until its output file is there."""
    begun_s = time.perf_counter()
    job = await submit(http, suite.gateway, path)
    while (batch := (await http.get(f"{suite.gateway}/v1/batches/{job}")).json())["status"] not in ENDED:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    counts = batch["request_counts"]
    if counts["completed"] != lines:
        raise AssertionError(f"the job ended with {counts}")
    return lines / (time.perf_counter() - begun_s)


def _tell(sides: dict[str, Side], options: argparse.Namespace) -> int:
    table = Table(box=None)
    for title in ("", "lines/s", "least", "most", "CPU ms a line, broker aside"):
        table.add_column(title, justify="right")
    figures = {
        name: {
            "lines_per_s": round(statistics.median(side.lines_per_s), 1),
            "least": round(min(side.lines_per_s), 1),
            "most": round(max(side.lines_per_s), 1),
            "cpu_ms_per_line": round(statistics.median(side.cpu_ms_per_line), 2),
        }
        for name, side in sides.items()
    }
    for name, row in figures.items():
        table.add_row(name, *map(str, row.values()))
    Console(width=120).print(table)
    ratios = {
        name: round(figures[JOB]["lines_per_s"] / figures[name]["lines_per_s"], 3) for name in (PLAIN, TRANSACTIONS)
    }
    missed = misses(ratios)
    print(f"batch job over {', over '.join(f'{name}: {ratio:.2f}' for name, ratio in ratios.items())}")
    print(json.dumps({"bench": "batch", "lines": options.lines, "in_flight": options.in_flight,
                      "ratios": ratios, "sides": figures, "missed": missed}))  # fmt: skip
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return int(bool(missed))


def misses(ratios: Mapping[str, float]) -> list[str]:
    """What is not as aimed at, in words. `ratios`: lines a second of the job over those of each other side."""
    ratio = ratios[PLAIN]
    return [] if ratio >= LEAST_RATIO else [f"batch job over {PLAIN}: {ratio:.2f}, at least {LEAST_RATIO:g}"]


if __name__ == "__main__":
    sys.exit(main())
