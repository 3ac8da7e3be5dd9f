"""Measure the cost of a request in a whole suite whose engine takes no time, so that all time is the suite's own.

All processes and the load client share this machine. A bare FastAPI endpoint replays the same bytes in the same run.
`--compiled` adds a suite of compiled services, and `--peer` a peer under the same load. The bench prints a table, then
one JSON line. It fails on errors and on wrong token counts.
"""

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from select import select
from urllib.parse import urlsplit

import httpx
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from deploy.compile import SERVICES, SERVICES_BUILD, build
from libs.testing.engines.real_model import real_model_folder
from load.gateway.http_load import PATH, Requests, Shape, Tally, run_load
from load.measure import LOAD, OTHERS, Kinds, percentiles, processes_below, usage
from load.peers.dynamo_suite import LOOPBACK, running_dynamo
from load.setup import bench_suite, stop

GATEWAY, PREFILL, DECODE = "gateway", "prefill", "decode"
_SERVICES = {f"services.{kind}": kind for kind in (GATEWAY, PREFILL, DECODE)}
_MAX_SPEED = {
    "FULCRUM_WORKER_SIM_PROFILE": "instant",
    "FULCRUM_WORKER_MAX_SEQUENCES": "256",  # as in the peer's mocker
    "FULCRUM_LOG_LEVEL": "warning",
}
BARE_START_S = 20.0

Counters = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    model: str
    address: tuple[str, int]
    kinds: Kinds
    counters: Counters = dict
    """The target's own counters, which only increase."""

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"


@contextmanager
def fulcrum(tree: Path | None = None) -> Iterator[Target]:
    """Start a whole suite whose engine takes no time. `tree` is the code to run instead of this checkout's."""
    code = {} if tree is None else {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    shape = ("--engine", "sim", "--prefill", "1", "--decode", "1")
    with bench_suite(*shape, env=_MAX_SPEED | code) as suite, Redis.from_url(suite.ready["redis"]) as redis:
        url = urlsplit(suite.gateway)
        yield Target(
            name="fulcrum" if tree is None else "compiled",
            model=suite.ready["model"],
            address=(str(url.hostname), int(url.port or 0)),
            kinds=processes_below(suite.process.pid, _SERVICES),
            counters=lambda: {**_redis_counters(redis), **_grpc_counters(suite.gateway)},
        )


def _redis_counters(redis: "Redis") -> dict[str, float]:
    # The counts are those of the whole suite. Each read that Redis counts is a round trip of some process.
    stats = redis.info("stats")
    moved = stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
    return {"redis_trips": stats["total_reads_processed"], "redis_bytes": moved}


def _grpc_counters(gateway: str) -> dict[str, float]:
    """Return the frames and bytes of the streams between gateway and workers."""
    found = {"grpc_frames": 0.0, "grpc_bytes": 0.0}
    for family in text_string_to_metric_families(httpx.get(f"{gateway}/metrics").text):
        for name, metric in (("grpc_frames", "frames"), ("grpc_bytes", "frame_bytes")):
            if family.name == f"fulcrum_gateway_{metric}":
                found[name] += sum(s.value for s in family.samples if s.name.endswith("_total"))
    return found


@contextmanager
def bare(recorded: Target, shapes: Sequence[Shape]) -> Iterator[Target]:
    """Start a FastAPI app that answers each shape with the bytes of `recorded`'s answer."""
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            kind = "stream" if shape.stream else "whole"
            Path(folder, f"{shape.tokens}-{kind}.json").write_text(json.dumps(_record(recorded, shape)))
        command = [sys.executable, "-m", "load.gateway.bare", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            if not select([process.stdout], [], [], BARE_START_S)[0]:
                raise TimeoutError(f"the bare endpoint did not start within {BARE_START_S:g} s")
            address = (LOOPBACK, int(urlsplit(json.loads(process.stdout.readline())["http"]).port or 0))
            yield Target("bare FastAPI", recorded.model, address, {GATEWAY: [psutil.Process(process.pid)]})
        finally:
            stop(process)


def _record(target: Target, shape: Shape) -> list[str]:
    """Return the body of one answer, in the parts in which it arrived."""
    _, _, body = Requests(target.model, shape).next().partition(b"\r\n\r\n")
    headers = {"content-type": "application/json"}
    with httpx.stream("POST", target.url + PATH, content=body, headers=headers) as response:
        response.raise_for_status()
        parts = [part.decode() for part in response.iter_raw()]
    return parts if shape.stream else ["".join(parts)]


@contextmanager
def dynamo(model: Path) -> Iterator[Target]:
    """Start Dynamo's frontend with two mockers. The frontend's figures are in the gateway's column."""
    with running_dynamo(model, "tiny") as started:
        pids = {GATEWAY: [started.frontend], PREFILL: started.prefill, DECODE: started.decode, OTHERS: []}
        kinds = {kind: [psutil.Process(pid) for pid in found] for kind, found in pids.items()}
        yield Target("dynamo", "tiny", (LOOPBACK, started.port), kinds)


SHAPES = tuple(Shape(tokens, stream) for tokens in (2, 64) for stream in (False, True))
CONNECTIONS = (1, 32, 128)
WARM_UP_S = 0.7
KINDS = (GATEWAY, PREFILL, DECODE, OTHERS, LOAD)
# The first prompt number of each case, so that no two cases share a prompt.
_NUMBERS = count(0, 1_000_000)


@dataclass(frozen=True, slots=True)
class Row:
    target: str
    connections: int
    shape: str
    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: dict[str, float]
    """The CPU microseconds per request, by kind of process."""
    rss_mb: dict[str, float]
    counted: dict[str, float]
    """The increase of the target's own counters per request."""


async def measure(target: Target, connections: int, shape: Shape, seconds: float) -> Row:
    """Load `target`, and measure from the end of the warm-up. Raise WrongAnswer on a wrong answer."""
    tally = Tally(shape)
    rows: list[Row] = []

    async def body() -> None:
        await asyncio.sleep(WARM_UP_S)
        tally.latencies_s.clear()
        counters, before, start_s = target.counters(), usage(target.kinds), time.perf_counter()
        await asyncio.sleep(seconds)
        duration_s, after = time.perf_counter() - start_s, usage(target.kinds)
        answers, took = max(len(tally.latencies_s), 1), percentiles(tally.latencies_s) or {"p50": 0.0, "p99": 0.0}
        counted = {name: (value - counters[name]) / answers for name, value in target.counters().items()}
        rows.append(
            Row(
                target=target.name,
                connections=connections,
                shape=shape.name,
                per_s=round(len(tally.latencies_s) / duration_s, 1),
                p50_ms=round(took["p50"] * 1e3, 3),
                p99_ms=round(took["p99"] * 1e3, 3),
                cpu_us={kind: round((after[kind].cpu_s - before[kind].cpu_s) / answers * 1e6) for kind in after},
                rss_mb={kind: round(after[kind].rss_mb) for kind in after},
                counted={name: round(value, 3) for name, value in counted.items()},
            )
        )

    requests = Requests(target.model, shape, start=next(_NUMBERS))
    await run_load(target.address, requests, tally, connections=connections, body=body)
    return rows[0]


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[list[Target]]:
    with ExitStack() as stack:
        found = [stack.enter_context(fulcrum())]
        if not options.no_bare:
            found.append(stack.enter_context(bare(found[0], SHAPES)))
        if options.compiled:
            build(SERVICES_BUILD, globs=SERVICES)
            found.append(stack.enter_context(fulcrum(SERVICES_BUILD)))
        if options.peer:
            found.append(stack.enter_context(dynamo(real_model_folder())))
        yield found


async def bench(found: Sequence[Target], options: argparse.Namespace) -> list[Row]:
    """Measure every chosen case on each target in turn, so that other work of the machine affects all targets."""
    rows = []
    for connections in options.connections:
        for shape in SHAPES:
            if shape.tokens in options.tokens and shape.stream in options.stream:
                for target in found:
                    rows.append(await measure(target, connections, shape, options.seconds))
                    print(line(rows[-1]), flush=True)
    return rows


HEAD = (
    f"{'':<13}{'C':>4} {'answers':<17}{'req/s':>7}{'p50 ms':>8}{'p99 ms':>8}  "
    + "".join(f"{kind:>8}" for kind in KINDS)
    + f"{'all':>7}   {'frames':>7}{'bytes':>7}{'redis':>7}{'bytes':>7}"
)


def line(row: Row) -> str:
    cpu = "".join(f"{row.cpu_us.get(kind, 0):>8.0f}" for kind in KINDS)
    names = ("grpc_frames", "grpc_bytes", "redis_trips", "redis_bytes")
    counted = "".join(f"{row.counted[name]:>7.{'0' if 'bytes' in name else '2'}f}" for name in names if row.counted)
    return (
        f"{row.target:<13}{row.connections:>4} {row.shape:<17}{row.per_s:>7.0f}{row.p50_ms:>8.2f}{row.p99_ms:>8.2f}  "
        f"{cpu}{sum(row.cpu_us.values()):>7.0f}   {counted}"
    )


def memory(rows: Sequence[Row]) -> str:
    """Describe the resident memory in MiB at the end of each target's last case."""
    last = {row.target: row.rss_mb for row in rows}
    shown = {name: ", ".join(f"{kind} {mb[kind]:.0f}" for kind in KINDS if kind in mb) for name, mb in last.items()}
    return "\n".join(f"MiB, {name}: {text}" for name, text in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS), metavar="C")
    parser.add_argument("--tokens", type=int, nargs="+", choices=(2, 64), default=[2, 64])
    parser.add_argument("--stream", type=int, nargs="+", choices=(0, 1), default=[0, 1])
    parser.add_argument("--seconds", type=float, default=2.5, help="counted time of each case")
    parser.add_argument("--no-bare", action="store_true", help="without the bare endpoint")
    parser.add_argument("--compiled", action="store_true", help="also compiled services, built first (minutes)")
    parser.add_argument("--peer", choices=["dynamo"], help="also a peer; `make peer-dynamo` installs it")
    options = parser.parse_args()
    print("CPU µs per request by process; gRPC frames and bytes between gateway and workers, Redis round trips")
    print(HEAD)
    with opened(options) as found:
        gc.freeze()
        rows = uvloop.run(bench(found, options))
    print(memory(rows))
    print(json.dumps({"bench": "gateway", "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
