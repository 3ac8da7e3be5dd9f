"""KV hand-off between two worker processes on one host: bytes a second, and how much of it hides behind prefill.

Side by side in one run: a copy within memory, a raw loopback socket, and the hand-off of a prompt's blocks from a
prefill worker in a process of its own to a decode worker here, over the gRPC they always use. Prints a table, then one
JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.paths import cache_dir
from libs.runtime.settings import CommonSettings
from libs.testing.worker import GatewayProbe, LocalWorker, gateway_probe, local_worker, submit

MODEL = "SmolLM2-135M-Instruct"
OUTPUT_TOKENS = 6
WAIT_S = 180.0
START_S = 120.0
COPY_ROUNDS = 5
RECEIVE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HandOff:
    """One prompt's way from worker to worker."""

    gap_s: float
    """Between the first and the second token."""
    step_s: float
    """Between later tokens."""
    transfer_s: float
    data_bytes: int

    @property
    def exposed_s(self) -> float:
        """What the client waits for the hand-off."""
        return max(self.gap_s - self.step_s, 0.0)


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """The prefill worker in the other process."""

    settings: CommonSettings
    address: str


def memcpy_bytes_s(size: int) -> float:
    """Bytes a second of a copy within memory, the best of some."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return size / min(_timed(lambda: np.copyto(target, source)) for _ in range(COPY_ROUNDS))


def socket_bytes_s(size: int) -> float:
    """Bytes a second through a raw loopback socket from another process, the best of some."""
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
    """The other process: a prefill worker, until the pipe closes."""

    async def serve() -> None:
        async with local_worker("prefill-0", "prefill", model_path=str(model_path), **overrides) as worker:
            pipe.send(worker.address)
            await asyncio.to_thread(pipe.poll, None)

    asyncio.run(serve())


@asynccontextmanager
async def _remote_prefill(model_path: Path, overrides: dict[str, Any]) -> AsyncIterator[RemoteWorker]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_prefill, args=(model_path, overrides, theirs))
    process.start()
    theirs.close()
    try:
        if not await asyncio.to_thread(ours.poll, START_S):
            raise TimeoutError(f"the prefill worker did not start within {START_S:g} s")
        yield RemoteWorker(CommonSettings(), ours.recv())
    finally:
        ours.close()
        process.terminate()
        await asyncio.to_thread(process.join)


async def hand_off(
    prefill: GatewayProbe,
    decode: GatewayProbe,
    worker: LocalWorker,
    sequence: int,
    prompt: list[int],
    *,
    streamed: bool,
) -> HandOff:
    """Serve one prompt over both workers as a gateway does; `streamed`: the blocks leave while it is computed."""
    model = worker.settings.model or MODEL
    fields = {"output": OUTPUT_TOKENS, "model": model, "prompt_tokens": len(prompt)}
    told = sum(len(batch.kv_transfers) for batch in worker.batches())
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
        await decode.until(lambda count=count: len(decode.tokens[sequence]) >= count)
        times.append(time.perf_counter())
    await decode.event(sequence, "finished")
    while sum(len(batch.kv_transfers) for batch in worker.batches()) == told:  # noqa: ASYNC110 - telemetry is batched
        await asyncio.sleep(0.01)
    transfer = [transfer for batch in worker.batches() for transfer in batch.kv_transfers][-1]
    return HandOff(
        gap_s=times[1] - times[0],
        step_s=statistics.median(np.diff(times[1:])),
        transfer_s=(transfer.end_unix_ns - transfer.start_unix_ns) / 1e9,
        data_bytes=transfer.bytes,
    )


async def bench(model_path: Path, tokens: int, rounds: int, device: str) -> dict[str, Any]:
    """All figures, by name."""
    overrides = {"engine": "torch", "device": device, "kv_memory_mb": 512, "sim_speedup": 1.0}
    rng = np.random.default_rng(7)
    found: dict[bool, list[HandOff]] = {False: [], True: []}
    async with (
        _remote_prefill(model_path, overrides) as remote,
        local_worker("decode-0", "decode", model_path=str(model_path), **overrides) as worker,
        gateway_probe(remote) as prefill,
        gateway_probe(worker) as decode,
    ):
        prefill.wait_s = decode.wait_s = WAIT_S
        for sequence in range(2 * rounds + 2):
            prompt = [int(token) for token in rng.integers(200, 40_000, tokens)]  # a new one: nothing is cached
            async with asyncio.timeout(WAIT_S):
                streamed = bool(sequence % 2)
                result = await hand_off(prefill, decode, worker, sequence + 1, prompt, streamed=streamed)
            if sequence >= 2:  # the first of each warms up
                found[streamed].append(result)
        engine = worker.host.engine
        where = f"{engine.name} on {engine.device}"
    size = found[False][0].data_bytes
    after = min(found[False], key=lambda result: result.transfer_s)
    exposed = {streamed: statistics.median(r.exposed_s for r in results) for streamed, results in found.items()}
    memcpy, raw = await asyncio.to_thread(memcpy_bytes_s, size), await asyncio.to_thread(socket_bytes_s, size)
    grpc = size / after.transfer_s
    return {
        "bench": "kv",
        "engine": where,
        "prompt_tokens": tokens,
        "rounds": rounds,
        "bytes": size,
        "memcpy_bytes_s": round(memcpy),
        "socket_bytes_s": round(raw),
        "hand_off_bytes_s": round(grpc),
        "hand_off_to_socket": round(grpc / raw, 3),
        "hand_off_to_memcpy": round(grpc / memcpy, 3),
        "gap_after_ms": round(statistics.median(r.gap_s for r in found[False]) * 1e3, 1),
        "gap_streamed_ms": round(statistics.median(r.gap_s for r in found[True]) * 1e3, 1),
        "step_ms": round(statistics.median(r.step_s for r in found[False] + found[True]) * 1e3, 1),
        "exposed_after_ms": round(exposed[False] * 1e3, 1),
        "exposed_streamed_ms": round(exposed[True] * 1e3, 1),
        "hidden_share": round(1 - exposed[True] / exposed[False], 3) if exposed[False] else 0.0,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        ("memcpy", f"{figures['memcpy_bytes_s'] / 1e9:.2f} GB/s"),
        ("raw loopback socket", f"{figures['socket_bytes_s'] / 1e9:.2f} GB/s"),
        ("hand-off over gRPC", f"{figures['hand_off_bytes_s'] / 1e9:.2f} GB/s"),
        ("  of the socket", f"{figures['hand_off_to_socket']:.2f}x"),
        ("first to second token, sent afterwards", f"{figures['gap_after_ms']:.0f} ms"),
        ("first to second token, streamed", f"{figures['gap_streamed_ms']:.0f} ms"),
        ("a decode step", f"{figures['step_ms']:.0f} ms"),
        ("hidden behind prefill", f"{figures['hidden_share']:.0%}"),
    ]
    head = f"{figures['prompt_tokens']} tokens, {figures['bytes'] / 1e6:.0f} MB of KV, {figures['engine']}"
    return "\n".join([head, *(f"  {name:<40} {value:>12}" for name, value in rows)])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, default=cache_dir() / "models" / MODEL)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    figures = asyncio.run(bench(options.model_path, options.tokens, options.rounds, options.device))
    print(table(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
