"""`make soak-batch`: run a large batch job on the sim engine while processes and stores are killed at random.

Afterwards the answers of each line are counted, on the results topic by a separate client and in the output files. The
bench prints a table and one JSON object as its last line. It exits with 1 if a line was not answered exactly once.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from libs.cli.console import plain_table
from libs.testing.batch.jobs import ENDED, answered, committed, done, retrieve, shown, submit, unanswered, write_lines
from libs.testing.servers.stores import KafkaServer, real_kafka
from libs.testing.suites.processes import kill, pid_of
from libs.testing.suites.suite import RunningSuite, running_suite
from load.measure import bench_parser, resident_mib, show

GATEWAYS = ("gateway-1", "gateway-2")
VICTIMS = (*GATEWAYS, "decode-1", "redis", "kafka")
TOKENS = 4
POLL_S = 0.25
# The job is given up if no line is answered for this time.
STUCK_S = 180.0


@dataclass(frozen=True, slots=True)
class Tenth:
    lines_per_s: float
    resume_median_s: float
    resume_longest_s: float
    gateway_peak_mib: float


@dataclass(slots=True)
class JobResult:
    lines: int
    status: str = ""
    kills: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    lines_per_s: float = 0.0
    gateway_peak_mib: float = 0.0
    resume_median_s: float = 0.0
    resume_longest_s: float = 0.0
    """The longest time from a kill to the next answered line."""
    wrong_on_topic: int = 0
    wrong_in_files: int = 0
    by_tenth: list[Tenth] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Run the soak. Return 1 if a line was not answered exactly once."""
    lines, every_s = ([100_000], "one job each (default 100000)"), (20.0, "0 kills nothing (default 20)")
    arguments = bench_parser(__doc__, lines=lines, kill_every_s=every_s, seed=1).parse_args(argv)
    soaked = [
        asyncio.run(_soak(lines, arguments.kill_every_s, random.Random(arguments.seed))) for lines in arguments.lines
    ]
    rows = [asdict(one) for one in soaked]
    _print([{name: value for name, value in row.items() if name != "by_tenth"} for row in rows])
    for row in rows:
        _print([{"tenth of": f"{row['lines']}: {number}", **tenth} for number, tenth in enumerate(row["by_tenth"], 1)])
    print(json.dumps({"jobs": rows}))
    return int(any(one.wrong_on_topic or one.wrong_in_files or one.status != "completed" for one in soaked))


def _print(rows: list[dict[str, Any]]) -> None:
    table = plain_table(*(name.replace("_", " ") for name in (rows[0] if rows else ())))
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    show(table)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {times}" for name, times in sorted(value.items())) or "nothing"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class _Stage:
    folder: Path
    suite: RunningSuite
    kafka: KafkaServer


@contextmanager
def _staged(folder: Path) -> Iterator[_Stage]:
    env = {"FULCRUM_CLUSTER": "soak", "FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files")}
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "2", "--gateways", str(len(GATEWAYS)))
    with real_kafka() as kafka, running_suite(folder, *shape, "--kafka", kafka.servers, env=env) as suite:
        yield _Stage(folder, suite, kafka)


async def _soak(lines: int, kill_every_s: float, chance: random.Random) -> JobResult:
    soaked = JobResult(lines)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "lines.jsonl", lines, max_tokens=TOKENS)
        with _staged(folder) as stage:
            async with httpx.AsyncClient(timeout=60) as http:
                batch = await _run(http, stage, soaked, kill_every_s, chance)
                files = await answered(http, stage.suite.gateway, batch)
            topic = await committed(stage.kafka.servers, "soak")
    for where, count in (("files", files), ("topic", topic)):
        wrong = list(unanswered(count, lines))
        if where == "files":
            soaked.wrong_in_files = len(wrong)
        else:
            soaked.wrong_on_topic = len(wrong)
        for problem in shown(wrong):
            print(f"{where}: {problem}", file=sys.stderr)
    return soaked


async def _run(
    http: httpx.AsyncClient, stage: _Stage, soaked: JobResult, kill_every_s: float, chance: random.Random
) -> dict[str, Any]:
    suite, kafka = stage.suite, stage.kafka
    batch_id = await submit(http, suite.gateway, stage.folder / "lines.jsonl")
    seen = JobProgress(soaked.lines, time.monotonic())
    due_s, victims = seen.begun_s + kill_every_s, _victims(chance)
    while True:
        batch = await retrieve(http, suite.gateway, batch_id)
        now_s = time.monotonic()
        seen.add(
            now_s, done(batch) if batch else seen.done, max(resident_mib(pid_of(suite, name)) for name in GATEWAYS)
        )
        if batch and (batch["status"] in ENDED or now_s - seen.moved_s > STUCK_S):
            soaked.status, soaked.seconds = batch["status"], now_s - seen.begun_s
            soaked.lines_per_s = soaked.lines / soaked.seconds
            soaked.gateway_peak_mib = seen.peak_mib(None)
            soaked.resume_median_s, soaked.resume_longest_s = seen.resume_s(None)
            soaked.by_tenth = seen.by_tenth()
            return batch
        if kill_every_s and now_s > due_s:
            victim = next(victims)
            print(f"{now_s - seen.begun_s:.0f} s, {seen.done} lines: kill -9 {victim}", file=sys.stderr, flush=True)
            seen.killed()
            due_s = now_s + kill_every_s * chance.uniform(0.5, 1.5)
            soaked.kills[victim] = soaked.kills.get(victim, 0) + 1
            if victim == "kafka":
                kafka.server.kill()
                await asyncio.to_thread(kafka.server.start)
            else:
                await kill(suite, victim)
        await asyncio.sleep(POLL_S)


class JobProgress:
    """The progress of a job, as a client sees it."""

    def __init__(self, lines: int, begun_s: float) -> None:
        self._lines = lines
        self.begun_s = self.moved_s = begun_s
        self.done = 0
        self._killed_s = 0.0
        self._reached_s = [begun_s]
        self._resumes_s: list[tuple[int, float]] = []
        self._peaks_mib: dict[int, float] = {}

    def killed(self) -> None:
        """Record that a process was killed just now."""
        self._killed_s = self._killed_s or time.monotonic()

    def add(self, now_s: float, done: int, gateway_mib: float) -> None:
        """Record the number of lines answered so far, and the memory of the largest gateway."""
        tenth = self._tenth
        self._peaks_mib[tenth] = max(self._peaks_mib.get(tenth, 0.0), gateway_mib)
        if done <= self.done:
            return
        self.done, self.moved_s = done, now_s
        if self._killed_s:
            self._resumes_s.append((tenth, now_s - self._killed_s))
            self._killed_s = 0.0
        self._reached_s += [now_s] * (self._tenth + (done == self._lines) + 1 - len(self._reached_s))

    @property
    def _tenth(self) -> int:
        return min(self.done * 10 // self._lines, 9)

    def by_tenth(self) -> list[Tenth]:
        found = []
        for tenth, (begun_s, ended_s) in enumerate(pairwise(self._reached_s)):
            per_s = self._lines / 10 / max(ended_s - begun_s, POLL_S)
            found.append(Tenth(per_s, *self.resume_s(tenth), self.peak_mib(tenth)))
        return found

    def resume_s(self, tenth: int | None) -> tuple[float, float]:
        """Return the median and the longest time to resume in a tenth of the job, or in all; 0 without a kill."""
        found = [seconds for where, seconds in self._resumes_s if tenth in (None, where)]
        return (median(found), max(found)) if found else (0.0, 0.0)

    def peak_mib(self, tenth: int | None) -> float:
        """Return the peak memory of the largest gateway in a tenth of the job, or in all."""
        return max((mib for where, mib in self._peaks_mib.items() if tenth in (None, where)), default=0.0)


def _victims(chance: random.Random) -> Iterator[str]:
    """Yield all victims in a random order, again and again."""
    while True:
        yield from chance.sample(VICTIMS, len(VICTIMS))


if __name__ == "__main__":
    sys.exit(main())
