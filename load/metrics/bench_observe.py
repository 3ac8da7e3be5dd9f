"""Measure the cost of observing many vLLM servers by their /metrics, with the real `fulcrum observe --page --file`.

One process answers for all servers. Each plays a recording of vLLM 0.32 from a different time on (FULCRUM_DATA, see
docs/data.md), with the HELP and TYPE lines that the recording lacks. The CPU time of this process is reported apart. If
cores are too few or shared, servers are scraped less than once a second. Memory is then as measured. The cores of the
largest fleet are extrapolated from two smaller fleets that were scraped in time: `cores = fixed + servers x cost of a
server`. The bench prints a table, then one JSON line. It exits with 1 if it misses its aim.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.request import urlopen

import psutil
import uvloop

from libs.observe.fleet import MOST_SERVERS
from load.measure import cpu_points, percentiles, read_named, spawned

MOST_CORES: Final = 1.0
MOST_RSS_MIB: Final = 200.0
RECORDING: Final = "vllm_h200/default.scrapes.jsonl.gz"
SCRAPES_A_SECOND: Final = 2
LEAST_LEFT_S: Final = 20
"""The shortest part of the recording that a server plays before it starts again."""
EVERY_MS: Final = 1_000
PACE: Final = 0.97
"""The fraction of due scrapes from which a fleet counts as scraped once a second."""
SERVICE, COMMAND, PLAYER = "service", "command", "player"


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of the service over a span of time."""

    servers: int
    seconds: float
    cores: float
    player_cores: float
    rss_mib: float
    """The resident memory of the service at the end of the span."""
    command_rss_mib: float
    """The resident memory of the command that started the service."""
    scrapes_per_s: float
    ms_a_server_second: float
    late_p50_ms: float
    """The median delay of a scrape beyond the interval, as the servers measure it."""
    late_p99_ms: float
    failures: int
    known: int
    """The number of servers whose step costs are known at the end."""

    @property
    def kept_pace(self) -> bool:
        return self.scrapes_per_s >= PACE * self.servers * 1000 / EVERY_MS


def recorded() -> list[bytes]:
    """Return the recorded expositions as HTTP answers, with the comment lines of an exposition."""
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


class _Fleet:
    """The answers of all servers, and the time of each server's last scrape."""

    def __init__(self, servers: int) -> None:
        self.answers, chance = recorded(), random.Random(1)
        last = len(self.answers) - LEAST_LEFT_S * SCRAPES_A_SECOND
        self._starts = [chance.randrange(last) for _ in range(servers)]
        self._began_s = time.monotonic()
        self._requested_s = [0.0] * servers
        self.gaps_s: list[float] = []

    def answer(self, number: int) -> bytes:
        now_s = time.monotonic()
        if self._requested_s[number]:
            self.gaps_s.append(now_s - self._requested_s[number])
        self._requested_s[number] = now_s
        at = self._starts[number] + int(SCRAPES_A_SECOND * (now_s - self._began_s))
        return self.answers[at % len(self.answers)]


class _Player(asyncio.Protocol):
    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._fleet.answer(int(data.split(b" ", 2)[1].split(b"/")[1])))


def play(servers: int, pipe: Connection) -> None:
    """Answer for all servers until the pipe closes. Send the port, and percentiles of lateness on request."""
    fleet = _Fleet(servers)

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        server = await loop.create_server(lambda: _Player(fleet), "127.0.0.1", 0, backlog=servers)

        def report() -> None:
            try:
                pipe.recv()
            except EOFError:  # the bench was killed
                loop.remove_reader(pipe.fileno())
                ended.set()
                return
            late_ms, fleet.gaps_s = [1000 * each - EVERY_MS for each in fleet.gaps_s], []
            # All gaps of a large fleet would not fit the pipe, which the loop has made non-blocking.
            pipe.send(percentiles(late_ms) or {"p50": 0.0, "p99": 0.0})

        loop.add_reader(pipe.fileno(), report)
        pipe.send((server.sockets[0].getsockname()[1], os.getpid()))
        await ended.wait()

    uvloop.run(run())


@contextmanager
def observing(servers: int, port: int) -> Iterator[tuple[list[tuple[str, psutil.Process]], str]]:
    """Run `fulcrum observe --page` over all servers. Yield its processes by name, and the page's address."""
    with TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        tables = (
            f'[[server]]\nurl = "http://127.0.0.1:{port}/{number}"\nname = "server-{number:04}"\n'
            for number in range(servers)
        )
        fleet.write_text("".join(tables))
        own = {"FULCRUM_METRICS_OBSERVE_EVERY_MS": str(EVERY_MS), "FULCRUM_KEYS": str(Path(folder) / "keys")}
        command = [
            sys.executable, "-m", "libs.cli.main", "observe", "--page", "--port", "0", "--file", str(fleet), "--json",
            "--history", str(Path(folder) / "history"), "--json-ready", str(Path(folder) / "ready.json"),
        ]  # fmt: skip
        with subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                line = child.stdout.readline()
                if not line:
                    sys.exit("fulcrum observe has not started")
                top = psutil.Process(child.pid)
                below = [each for each in top.children(recursive=True) if "services.metrics" in each.cmdline()]
                yield [(COMMAND, top), (SERVICE, below[-1])], json.loads(line)["page"]
            finally:
                child.terminate()


def measure(servers: int, learn_s: float, seconds: float) -> Measured:
    with spawned(play, servers) as pipe:
        port, player = pipe.recv()
        with observing(servers, port) as (found, url):
            processes = [*found, (PLAYER, psutil.Process(player))]
            time.sleep(learn_s)
            _late_ms(pipe)
            (done, failed), before = _counts(url), read_named(processes)
            time.sleep(seconds)
            after, (done_then, failed_then) = read_named(processes), _counts(url)
            late = _late_ms(pipe)
            with urlopen(f"{url}/v1/status") as answer:
                listed = json.load(answer)["observed"]["servers"]
    passed_s, cores = after.at_s - before.at_s, cpu_points(before, after)
    return Measured(
        servers=servers,
        seconds=round(passed_s, 1),
        cores=round(cores[SERVICE] / 100, 3),
        player_cores=round(cores[PLAYER] / 100, 3),
        rss_mib=round(after.rss_mb[SERVICE], 1),
        command_rss_mib=round(after.rss_mb[COMMAND], 1),
        scrapes_per_s=round((done_then - done) / passed_s, 1),
        ms_a_server_second=round(10 * cores[SERVICE] / servers, 3),
        late_p50_ms=round(late["p50"], 1),
        late_p99_ms=round(late["p99"], 1),
        failures=round(failed_then - failed),
        known=sum(each["state"] == "observed" for each in listed),
    )


def _late_ms(pipe: Connection) -> dict[str, float]:
    """Return the percentiles of scrapes' delays beyond the interval since the last call, in ms."""
    pipe.send(None)
    found: dict[str, float] = pipe.recv()
    return found


def _counts(url: str) -> tuple[float, float]:
    """Return the number of scrapes so far, and of failed ones."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    sums = dict.fromkeys(("fulcrum_observed_scrapes_total", "fulcrum_observed_scrape_failures_total"), 0.0)
    for line in lines:
        name = line.partition(" ")[0].partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    done, failed = sums.values()
    return done, failed


def extrapolated(found: Sequence[Measured]) -> float | None:
    """Return the cores of the last fleet, extrapolated from two smaller ones; None if it was scraped once a second."""
    paced = [each for each in found[:-1] if each.kept_pace]
    if found[-1].kept_pace or len(paced) < 2 or paced[-1].servers <= paced[0].servers:
        return None
    few, many = paced[0], paced[-1]
    server = (many.cores - few.cores) / (many.servers - few.servers)
    return many.cores + server * (found[-1].servers - many.servers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[100, 300, 1000], help="fleets, one run each")
    parser.add_argument("--learn-s", type=float, default=60.0, help="time before each measurement, with most fits")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each measurement")
    options = parser.parse_args()
    if not all(0 < each <= MOST_SERVERS for each in options.servers):
        parser.error(f"--servers: name fleets of 1 to {MOST_SERVERS}")
    found = []
    print(
        f"{'servers':>7} {'cores':>6} {'ms/server s':>11} {'MiB':>6} {'scrapes/s':>9} {'late p50':>8} {'late p99':>8} "
        f"{'failed':>6} {'known':>6} {'player cores':>12}",
        flush=True,
    )
    for servers in options.servers:
        each = measure(servers, options.learn_s, options.seconds)
        found.append(each)
        print(
            f"{each.servers:7} {each.cores:6.2f} {each.ms_a_server_second:11.3f} {each.rss_mib:6.0f} "
            f"{each.scrapes_per_s:9.1f} {each.late_p50_ms:8.1f} {each.late_p99_ms:8.1f} {each.failures:6} "
            f"{each.known:6} {each.player_cores:12.2f}",
            flush=True,
        )
    whole_cores = extrapolated(found)
    if whole_cores is not None:
        print(f"{found[-1].servers} servers once a second, extrapolated: {whole_cores:.2f} cores")
    cores = max(each.cores for each in found) if whole_cores is None else whole_cores
    paced = found[-1].kept_pace or whole_cores is not None
    passed = paced and cores <= MOST_CORES and all(each.rss_mib <= MOST_RSS_MIB for each in found)
    fields = {"passed": passed, "extrapolated_cores": whole_cores, "measured": [asdict(each) for each in found]}
    print(json.dumps(fields))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
