"""`make bench-batch-prefix`: cache hits of a job whose lines share beginnings, asked by prefix against by arrival.

Lines come in random order; each begins with one of many texts, of which the prefill worker's cache holds a part. The
same job is answered by two suites on the sim engine. Prints a table and, as its last line, one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from libs.perfmodel.profiles import profile
from libs.testing.batch.jobs import ENDED, ENDPOINT, submit
from libs.testing.suites.processes import gateway_metrics, until_whole
from libs.testing.suites.suite import RunningSuite, running_suite

PROFILE = "llama-8b-h100"
SPEEDUP = 20
TOKENS = 2
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One order."""

    order: str
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    lines_per_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog="make bench-batch-prefix", description=__doc__)
    parser.add_argument("--lines", type=int, default=2048)
    parser.add_argument("--beginnings", type=int, default=64)
    parser.add_argument("--beginning-tokens", type=int, default=1024)
    parser.add_argument("--cache", type=float, default=0.25, help="how many of the beginnings fit (default 0.25)")
    options = parser.parse_args(argv)
    rows = [_answer(order, options) for order in ("arrival", "prefix")]
    table = Table(box=None)
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    Console(width=120).print(table)
    most = 1 - options.beginnings * options.beginning_tokens / rows[0].prompt_tokens
    print(f"at most, with a cache without end: about {most:.3f}")
    print(json.dumps({"bench": "batch prefix", "rows": [asdict(row) for row in rows]}))
    return 0


def _answer(order: str, options: argparse.Namespace) -> Row:
    held_tokens = options.cache * options.beginnings * options.beginning_tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "lines.jsonl", options)
        env = {
            "FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files"),
            "FULCRUM_GATEWAY_BATCH_ORDER": order,
            "FULCRUM_WORKER_SIM_PROFILE": PROFILE,
            "FULCRUM_WORKER_SIM_SPEEDUP": str(SPEEDUP),
            "FULCRUM_WORKER_SIM_KV_MEMORY_MB": str(int(held_tokens * profile(PROFILE).kv_bytes_per_token / 2**20)),
        }
        with running_suite(folder, "--engine", "sim", "--prefill", "1", "--decode", "1", env=env) as suite:
            found, lines_per_s = asyncio.run(_run(suite, folder / "lines.jsonl", options.lines))
    prompt, cached = int(found["prompt_tokens_total"]), int(found["cached_tokens_total"])
    return Row(order, prompt, cached, round(cached / prompt, 3), round(lines_per_s, 1))


def _write(path: Path, options: argparse.Namespace) -> None:
    chance = random.Random(1)
    with path.open("w") as file:
        for number in range(options.lines):
            beginning = f"{chance.randrange(options.beginnings)} ".ljust(options.beginning_tokens, "b")
            body = {"model": "sim", "prompt": f"{beginning} Line {number}", "max_tokens": TOKENS, "ignore_eos": True}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


async def _run(suite: RunningSuite, path: Path, lines: int) -> tuple[dict[str, float], float]:
    """The gateway's metrics after the job, and its lines a second."""
    async with httpx.AsyncClient(timeout=60) as http:
        await until_whole(http, suite)
        begun_s = time.perf_counter()
        job = await submit(http, suite.gateway, path)
        while (batch := (await http.get(f"{suite.gateway}/v1/batches/{job}")).json())["status"] not in ENDED:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if batch["request_counts"]["completed"] != lines:
            raise AssertionError(f"the job ended with {batch['request_counts']}")
        return await gateway_metrics(http, suite.gateway), lines / (time.perf_counter() - begun_s)


if __name__ == "__main__":
    sys.exit(main())
