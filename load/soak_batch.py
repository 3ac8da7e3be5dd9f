"""`make soak-batch`: a large batch job on the sim engine while its processes and stores are killed at random.

Then each line's answers are counted, over the results topic by a client of its own and over the output files. Prints a
table and, as its last line, one JSON object; exit code 1 when a line was not answered once.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from libs.testing.batch import ENDED, answered, committed, shown, submit, unanswered, write_lines
from libs.testing.processes import kill, pid_of
from libs.testing.stores import KafkaServer, real_kafka
from libs.testing.suite import Suite, running_suite

GATEWAYS = ("gateway-1", "gateway-2")
VICTIMS = (*GATEWAYS, "decode-1", "redis", "kafka")
TOKENS = 4
POLL_S = 0.25
STUCK_S = 180.0
"""A job of which no line is answered for so long is given up."""


@dataclass(slots=True)
class Soaked:
    """One job."""

    lines: int
    status: str = ""
    kills: dict[str, int] = field(default_factory=dict)
    """By what was killed."""
    seconds: float = 0.0
    lines_per_s: float = 0.0
    gateway_peak_mib: float = 0.0
    resume_s: float = 0.0
    """The longest time from a kill until another line was answered."""
    wrong_on_topic: int = 0
    wrong_in_files: int = 0


def main(argv: list[str] | None = None) -> int:
    """Soak; 1 when a line was not answered once."""
    parser = argparse.ArgumentParser(prog="make soak-batch", description=__doc__)
    parser.add_argument("--lines", type=int, nargs="+", default=[100_000], help="one job each (default 100000)")
    parser.add_argument("--kill-every-s", type=float, default=20.0, help="0 kills nothing (default 20)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    found = [
        asyncio.run(_soak(lines, arguments.kill_every_s, random.Random(arguments.seed))) for lines in arguments.lines
    ]
    table = Table(box=None)
    rows = [asdict(one) for one in found]
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console(width=160).print(table)
    print(json.dumps({"jobs": rows}))
    return int(any(one.wrong_on_topic or one.wrong_in_files or one.status != "completed" for one in found))


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {times}" for name, times in sorted(value.items())) or "nothing"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class _Stage:
    folder: Path
    suite: Suite
    kafka: KafkaServer


@contextmanager
def _staged(folder: Path) -> Iterator[_Stage]:
    env = {"FULCRUM_CLUSTER": "soak", "FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files")}
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "2", "--gateways", str(len(GATEWAYS)))
    with real_kafka() as kafka, running_suite(folder, *shape, "--kafka", kafka.servers, env=env) as suite:
        yield _Stage(folder, suite, kafka)


async def _soak(lines: int, kill_every_s: float, chance: random.Random) -> Soaked:
    soaked = Soaked(lines)
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
    http: httpx.AsyncClient, stage: _Stage, soaked: Soaked, kill_every_s: float, chance: random.Random
) -> dict[str, Any]:
    suite, kafka = stage.suite, stage.kafka
    batch_id = await submit(http, suite.gateway, stage.folder / "lines.jsonl")
    begun_s = moved_s = time.monotonic()
    killed_s, due_s, last = 0.0, begun_s + kill_every_s, -1
    victims = _victims(chance)
    while True:
        batch = await _status(http, suite.gateway, batch_id)
        soaked.gateway_peak_mib = max(soaked.gateway_peak_mib, _resident_mib(suite))
        now_s = time.monotonic()
        done = sum(batch["request_counts"][name] for name in ("completed", "failed")) if batch else last
        if done > last:
            last, moved_s = done, now_s
            if killed_s:
                soaked.resume_s, killed_s = max(soaked.resume_s, now_s - killed_s), 0.0
        if batch and (batch["status"] in ENDED or now_s - moved_s > STUCK_S):
            soaked.status, soaked.seconds = batch["status"], now_s - begun_s
            soaked.lines_per_s = soaked.lines / soaked.seconds
            return batch
        if kill_every_s and now_s > due_s:
            victim = next(victims)
            print(f"{now_s - begun_s:.0f} s, {last} lines: kill -9 {victim}", file=sys.stderr, flush=True)
            killed_s, due_s = time.monotonic(), now_s + kill_every_s * chance.uniform(0.5, 1.5)
            soaked.kills[victim] = soaked.kills.get(victim, 0) + 1
            if victim == "kafka":
                kafka.server.kill()
                await asyncio.to_thread(kafka.server.start)
            else:
                await kill(suite, victim)
        await asyncio.sleep(POLL_S)


def _victims(chance: random.Random) -> Iterator[str]:
    """All of them in a random order, and again in another one."""
    while True:
        yield from chance.sample(VICTIMS, len(VICTIMS))


async def _status(http: httpx.AsyncClient, url: str, batch_id: str) -> dict[str, Any] | None:
    """None while the gateway is away, or has not read of the job yet."""
    try:
        answer = await http.get(f"{url}/v1/batches/{batch_id}")
    except httpx.TransportError:
        return None
    found: dict[str, Any] | None = answer.json() if answer.is_success else None
    return found


def _resident_mib(suite: Suite) -> float:
    found = 0.0
    for name in GATEWAYS:
        pid = pid_of(suite, name)
        try:
            found = max(found, psutil.Process(pid).memory_info().rss / 2**20 if pid else 0.0)
        except psutil.NoSuchProcess:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
