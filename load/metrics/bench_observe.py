"""The cost of observing many vLLM servers by their /metrics, once a second each.

One process answers for all servers: each plays a recording of vLLM 0.32 from a moment of its own (FULCRUM_DATA, see
docs/data.md), with the HELP and TYPE lines that the recording leaves out. The metrics service observes them in a
process of its own, of which CPU and memory are measured: while it learns, and afterwards. Prints a table, then one
JSON line. Exits with 1 if it misses its aim.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.request import urlopen

import psutil

from load.measure import spawned

MOST_CORES: Final = 1.0
MOST_RSS_MB: Final = 200.0
RECORDING: Final = "vllm_h200/default.scrapes.jsonl.gz"
SCRAPES_A_SECOND: Final = 2
LEAST_LEFT_S: Final = 20
"""The least part of the recording that a server plays before it begins again."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The service over one stretch of time."""

    servers: int
    stretch: str
    seconds: float
    cpu_share: float
    rss_mb: float
    """Resident memory at the end of the stretch."""
    scrapes_per_s: float
    failures: int
    known: int
    """Servers whose step costs are known at the end."""


def recorded() -> list[bytes]:
    """Return the recorded expositions as answers of HTTP, with the comment lines of an exposition."""
    file = Path(os.environ.get("FULCRUM_DATA", "")) / RECORDING
    if not file.is_file():
        sys.exit(f"FULCRUM_DATA names no folder with {RECORDING}")
    answers = []
    with gzip.open(file, "rt") as lines:
        for line in lines:
            if found := json.loads(line).get("m"):
                body = "\n".join(_with_comments(found)).encode() + b"\n"
                head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n\r\n"
                answers.append(head.encode() + body)
    return answers


def _with_comments(lines: list[str]) -> Iterator[str]:
    family = ""
    for line in lines:
        name = line.partition("{")[0].removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        if name != family:
            family = name
            yield f"# HELP {name} What this metric of vLLM counts, in about as many words as that takes."
            yield f"# TYPE {name} histogram"
        yield line


class _Player(asyncio.Protocol):
    answers: list[bytes]
    starts: list[int]
    began_s: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        number = int(data.split(b" ", 2)[1].split(b"/")[1])
        at = self.starts[number] + int(SCRAPES_A_SECOND * (time.monotonic() - self.began_s))
        self._transport.write(self.answers[at % len(self.answers)])


def play(servers: int, pipe: Connection) -> None:
    """Answer for all servers until terminated; send the port."""
    _Player.answers, chance = recorded(), random.Random(1)
    last = len(_Player.answers) - LEAST_LEFT_S * SCRAPES_A_SECOND
    _Player.starts = [chance.randrange(last) for _ in range(servers)]
    _Player.began_s = time.monotonic()

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Player, "127.0.0.1", 0, backlog=servers)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def observing(servers: int, port: int) -> Iterator[tuple[psutil.Process, str]]:
    """Run the metrics service over all servers; yield its process and address."""
    with TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        tables = (
            f'[[server]]\nurl = "http://127.0.0.1:{port}/{number}"\nname = "server-{number:04}"\n'
            for number in range(servers)
        )
        fleet.write_text("".join(tables))
        own = {
            "FULCRUM_METRICS_OBSERVE_FILE": str(fleet), "FULCRUM_METRICS_PORT": "0", "FULCRUM_LOG_LEVEL": "warning",
            "FULCRUM_METRICS_OBSERVE_EVERY_MS": "1000", "FULCRUM_KEYS": str(Path(folder) / "keys"),
        }  # fmt: skip
        command = [sys.executable, "-m", "services.metrics"]
        with subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    event = json.loads(line)
                    if event["event"] == "ready":
                        yield psutil.Process(child.pid), event["http"]
                        return
                sys.exit("the metrics service has not started")
            finally:
                child.terminate()


def measure(process: psutil.Process, url: str, servers: int, stretch: str, seconds: float) -> Measured:
    before, failed = _counts(url)
    cpu, began_s = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, failed_then = _counts(url)
    now, passed_s = process.cpu_times(), time.monotonic() - began_s
    used_s = now.user + now.system - cpu.user - cpu.system
    with urlopen(f"{url}/v1/status") as answer:
        listed = json.load(answer)["observed"]["servers"]
    return Measured(
        servers,
        stretch,
        round(passed_s, 1),
        round(used_s / passed_s, 3),
        round(process.memory_info().rss / 1e6, 1),
        round((after - before) / passed_s, 1),
        round(failed_then - failed),
        sum(each["state"] == "observed" for each in listed),
    )


def _counts(url: str) -> tuple[float, float]:
    """Return the scrapes so far, and those that failed."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    sums = dict.fromkeys(("fulcrum_observed_scrapes_total", "fulcrum_observed_scrape_failures_total"), 0.0)
    for line in lines:
        name = line.partition(" ")[0].partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    done, failed = sums.values()
    return done, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each of the two stretches")
    asked = parser.parse_args()
    found = []
    print(f"{'servers':>8} {'stretch':10} {'cores':>6} {'MB':>6} {'scrapes/s':>9} {'failed':>6} {'known':>6}")
    for servers in asked.servers:
        with spawned(play, servers) as pipe, observing(servers, pipe.recv()) as (process, url):
            for stretch in ("learning", "after"):
                each = measure(process, url, servers, stretch, asked.seconds)
                found.append(each)
                print(
                    f"{each.servers:8} {each.stretch:10} {each.cpu_share:6.2f} {each.rss_mb:6.0f} "
                    f"{each.scrapes_per_s:9.1f} {each.failures:6} {each.known:6}",
                    flush=True,
                )
    passed = all(each.cpu_share <= MOST_CORES and each.rss_mb <= MOST_RSS_MB for each in found)
    print(json.dumps({"passed": passed, "measured": [asdict(each) for each in found]}))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
