"""Measure KV hand-off between two worker processes on one host: bytes a second, and the part hidden behind prefill.

One run measures a copy within memory, a raw loopback socket, and the hand-off of a prompt's blocks. The prefill worker
has its own process. Two decode workers run here; one reads the sender's shared memory, and one receives the bytes. A
decode worker times a hand-off from its request until every block is in its pool, checked and acknowledged. Pools are so
small that the warm-up touches all their memory, and no page is new while time is taken. The result is printed as a
table, then as one JSON line.
"""

import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.paths import cache_dir
from libs.runtime.settings import CommonSettings
from libs.testing.workers.hosts import GatewayProbe, LocalWorker, gateway_probe, local_worker, submit
from load.measure import bench_parser, spawned

MODEL = "SmolLM2-135M-Instruct"
OUTPUT_TOKENS = 6
WAIT_S = 180.0
START_S = 120.0
COPY_ROUNDS = 5
WARM_UP_ROUNDS = 2
# Two prompts of 1,500 tokens fill it.
POOL_MB = 160
SHARED_DIR = Path("/dev/shm")
RECEIVE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HandOff:
    """The hand-off of one prompt from worker to worker."""

    gap_s: float
    """The seconds between the first and the second token."""
    step_s: float
    """The seconds between tokens after the second one."""
    transfer_s: float
    data_bytes: int

    @property
    def exposed_s(self) -> float:
        """The seconds for which a client waits for the hand-off."""
        return max(self.gap_s - self.step_s, 0.0)


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """The prefill worker in the other process."""

    settings: CommonSettings
    address: str


def memcpy_bytes_s(size: int) -> float:
    """Return the bytes a second of a copy within memory, the best of several."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return size / min(_timed(lambda: np.copyto(target, source)) for _ in range(COPY_ROUNDS))


def socket_bytes_s(size: int) -> float:
    """Return the bytes a second through a raw loopback socket from another process, the best of several."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = multiprocessing.get_context("spawn").Process(target=_send, args=(server.getsockname()[1], size))
        sender.start()
        connection, _ = server.accept()
        with connection:
            target = memoryview(bytearray(size))
            best = min(_timed(lambda: _receive(connection, target)) for _ in range(COPY_ROUNDS))
        sender.join()
    return size / best


def _send(port: int, size: int) -> None:
    data = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(COPY_ROUNDS):
            connection.recv(1)
            connection.sendall(data)


def _receive(connection: socket.socket, target: memoryview) -> None:
    connection.sendall(b"g")
    received = 0
    while received < len(target):
        received += connection.recv_into(target[received : received + RECEIVE_BYTES])


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _serve_prefill(model_path: Path, overrides: dict[str, Any], pipe: Connection) -> None:
    """Run a prefill worker in the other process until the pipe closes."""

    async def serve() -> None:
        async with local_worker("prefill-0", "prefill", model_path=str(model_path), **overrides) as worker:
            pipe.send(worker.address)
            await asyncio.to_thread(pipe.poll, None)

    asyncio.run(serve())


@asynccontextmanager
async def _remote_prefill(model_path: Path, overrides: dict[str, Any]) -> AsyncIterator[RemoteWorker]:
    with spawned(_serve_prefill, model_path, overrides) as pipe:
        if not await asyncio.to_thread(pipe.poll, START_S):
            raise TimeoutError(f"the prefill worker did not start within {START_S:g} s")
        yield RemoteWorker(CommonSettings(), pipe.recv())


async def hand_off(
    prefill: GatewayProbe,
    decode: GatewayProbe,
    worker: LocalWorker,
    sequence: int,
    prompt: list[int],
    *,
    streamed: bool,
) -> HandOff:
    """Serve one prompt on both workers, as a gateway does. With `streamed`, blocks are sent while it is computed."""
    model = worker.settings.model or MODEL
    fields: dict[str, Any] = {"output": OUTPUT_TOKENS, "model": model, "prompt_tokens": len(prompt)}
    reported = sum(len(batch.kv_transfers) for batch in worker.batches())
    await prefill.submit(submit(sequence, pb.PHASE_PREFILL, prompt, **fields))
    if streamed:
        moved = submit(sequence, pb.PHASE_DECODE, prompt, **fields)
        moved.kv.CopyFrom((await prefill.event(sequence, "kv_opened")).kv)
        await decode.submit(moved)
    kv = (await prefill.event(sequence, "prefilled")).kv
    first, first_s = prefill.tokens[sequence], time.perf_counter()
    if streamed:
        await decode.send(pb.GatewayFrame(proceeds=[pb.Proceed(sequence=sequence, token_ids=pack_u32(first))]))
    else:
        moved = submit(sequence, pb.PHASE_DECODE, [*prompt, *first], **fields)
        moved.kv.CopyFrom(kv)
        await decode.submit(moved)
    times = [first_s]
    for count in range(1, OUTPUT_TOKENS):
        await decode.until(partial(_has_tokens, decode, sequence, count))
        times.append(time.perf_counter())
    await decode.event(sequence, "finished")
    while sum(len(batch.kv_transfers) for batch in worker.batches()) == reported:  # noqa: ASYNC110 - telemetry is batched
        await asyncio.sleep(0.01)
    transfer = [transfer for batch in worker.batches() for transfer in batch.kv_transfers][-1]
    return HandOff(
        gap_s=times[1] - times[0],
        step_s=statistics.median(np.diff(times[1:])),
        transfer_s=(transfer.end_unix_ns - transfer.start_unix_ns) / 1e9,
        data_bytes=transfer.bytes,
    )


def _has_tokens(probe: GatewayProbe, sequence: int, count: int) -> bool:
    return len(probe.tokens[sequence]) >= count


@dataclass(slots=True)
class Transport:
    """A transport of blocks, with its measurements."""

    name: str
    worker: LocalWorker
    probe: GatewayProbe
    after: list[HandOff] = field(default_factory=list)
    streamed: list[HandOff] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the figures by name, with the transport's name as a prefix."""
        best = min(self.after, key=lambda result: result.transfer_s)
        exposed = {name: statistics.median(r.exposed_s for r in getattr(self, name)) for name in ("after", "streamed")}
        found = {
            "bytes_s": round(best.data_bytes / best.transfer_s),
            "median_bytes_s": round(statistics.median(r.data_bytes / r.transfer_s for r in self.after)),
            "gap_after_ms": round(statistics.median(r.gap_s for r in self.after) * 1e3, 1),
            "gap_streamed_ms": round(statistics.median(r.gap_s for r in self.streamed) * 1e3, 1),
            "exposed_after_ms": round(exposed["after"] * 1e3, 1),
            "exposed_streamed_ms": round(exposed["streamed"] * 1e3, 1),
            "hidden_share": round(1 - exposed["streamed"] / exposed["after"], 3) if exposed["after"] else 0.0,
        }
        return {f"{self.name}_{name}": value for name, value in found.items()}


async def bench(model_path: Path, tokens: int, rounds: int, device: str) -> dict[str, Any]:
    with TemporaryDirectory(dir=SHARED_DIR) as folder:
        overrides: dict[str, Any] = {
            "engine": "torch", "device": device, "kv_memory_mb": POOL_MB, "sim_speedup": 1.0, "kv_shared_dir": folder,
        }  # fmt: skip
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            remote = await enter(_remote_prefill(model_path, overrides))
            prefill = await enter(gateway_probe(remote))
            ways = []
            for name, shared in (("shared", folder), ("grpc", None)):
                settings = overrides | {"kv_shared_dir": shared}
                worker = await enter(local_worker(f"decode-{name}", "decode", model_path=str(model_path), **settings))
                ways.append(Transport(name, worker, await enter(gateway_probe(worker))))
            await _measure(ways, prefill, tokens, rounds)
            engine = ways[0].worker.host.engine
            where = f"{engine.name} on {engine.device}"
            size = ways[0].after[0].data_bytes
            memcpy, raw = await asyncio.to_thread(memcpy_bytes_s, size), await asyncio.to_thread(socket_bytes_s, size)
    found: dict[str, Any] = {key: value for way in ways for key, value in way.figures().items()}
    steps = [result.step_s for way in ways for result in way.after + way.streamed]
    return found | {
        "bench": "kv",
        "engine": where,
        "prompt_tokens": tokens,
        "rounds": rounds,
        "bytes": size,
        "memcpy_bytes_s": round(memcpy),
        "socket_bytes_s": round(raw),
        "shared_to_memcpy": round(found["shared_bytes_s"] / memcpy, 3),
        "shared_median_to_memcpy": round(found["shared_median_bytes_s"] / memcpy, 3),
        "grpc_to_socket": round(found["grpc_bytes_s"] / raw, 3),
        "step_ms": round(statistics.median(steps) * 1e3, 1),
    }


async def _measure(ways: list[Transport], prefill: GatewayProbe, tokens: int, rounds: int) -> None:
    """Hand over a new prompt of `tokens` tokens for each transport and mode in every round.

    The first rounds are a warm-up.
    """
    rng = np.random.default_rng(7)
    sequence = 0
    for number in range(WARM_UP_ROUNDS + rounds):
        for way in ways:
            for streamed in (False, True):
                sequence += 1
                prefill.wait_s = way.probe.wait_s = WAIT_S
                prompt = [int(token) for token in rng.integers(200, 40_000, tokens)]
                async with asyncio.timeout(WAIT_S):
                    result = await hand_off(prefill, way.probe, way.worker, sequence, prompt, streamed=streamed)
                if number >= WARM_UP_ROUNDS:
                    (way.streamed if streamed else way.after).append(result)


def table(figures: dict[str, Any]) -> str:
    def rate(name: str) -> str:
        return f"{figures[name] / 1e9:.2f} GB/s"

    rows = [
        ("memcpy", rate("memcpy_bytes_s")),
        ("hand-off by shared memory", rate("shared_bytes_s")),
        ("  of memcpy: best, median", f"{figures['shared_to_memcpy']:.2f}x, {figures['shared_median_to_memcpy']:.2f}x"),
        ("raw loopback socket", rate("socket_bytes_s")),
        ("hand-off over gRPC", rate("grpc_bytes_s")),
        ("  of the socket", f"{figures['grpc_to_socket']:.2f}x"),
        ("a decode step", f"{figures['step_ms']:.0f} ms"),
    ]
    for way, title in (("shared", "shared memory"), ("grpc", "gRPC")):
        after, streamed = figures[f"{way}_gap_after_ms"], figures[f"{way}_gap_streamed_ms"]
        rows += [
            (f"{title}: to the 2nd token, sent after prefill", f"{after:.0f} ms"),
            (f"{title}: the same, streamed", f"{streamed:.0f} ms"),
            (f"{title}: hidden behind prefill", f"{figures[f'{way}_hidden_share']:.0%}"),
        ]
    head = f"{figures['prompt_tokens']} tokens, {figures['bytes'] / 1e6:.0f} MB of KV, {figures['engine']}"
    return "\n".join([head, *(f"  {name:<48} {value:>14}" for name, value in rows)])


def main() -> None:
    model = cache_dir() / "models" / MODEL
    options = bench_parser(__doc__, model_path=model, tokens=1500, rounds=3, device="cpu").parse_args()
    figures = asyncio.run(bench(options.model_path, options.tokens, options.rounds, options.device))
    print(table(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
