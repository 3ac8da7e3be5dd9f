"""Tests of clients that stall, vanish or leave at every stage: their cost is bounded and nothing of them remains."""

import asyncio
import fcntl
import json
import os
import socket
import sys
import termios
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_CLIENT_GONE
from libs.runtime.tasks import end
from libs.testing.servers.proxy import vanish
from libs.testing.wait import until
from libs.testing.workers.hosts import LocalWorker, local_worker
from libs.testing.workers.scripted import Plan, scripted_worker

pytestmark = pytest.mark.alone

BODY = {"model": "sim", "prompt": "hello", "stream": True}
MANY = 7000
LONG = BODY | {"max_tokens": MANY, "ignore_eos": True, "logprobs": 5}
"""A request whose answer exceeds every buffer, however many tokens share an event."""


async def connect(url: str, *, window_bytes: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection with as little room for unread bytes as requested."""
    parts = urlsplit(url)
    sock = socket.socket()
    if window_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    return await asyncio.open_connection(sock=sock, limit=1024)


def request(body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def unread_bytes(sock: socket.socket) -> int:
    count = fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


async def registration(worker: LocalWorker) -> Worker:
    await until(lambda: worker.registry.seen, what="a registration")
    return worker.registry.seen[-1]


async def test_a_client_that_reads_nothing_loses_its_connection_and_frees_everything(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        mixed = {"sim_speedup": 10.0, "budget_tokens": 64}
        worker = await stack.enter_async_context(local_worker("m0", "mixed", **mixed))
        gateway = await stack.enter_async_context(open_gateway_over(await registration(worker), client_stall_s=1))
        assert (await gateway.complete(5)).status_code == 200
        before = open_files()
        _, writer = await connect(gateway.url, window_bytes=4096)
        writer.write(request(LONG))
        await until(lambda: gateway.live == 1, what="its sequence")
        assert (await gateway.complete(5)).status_code == 200
        await until(gateway.idle, what="the end of its sequence")
        (gone,) = [event for event in gateway.events() if event.outcome == OUTCOME_CLIENT_GONE]
        assert gone.output_tokens < MANY
        await until(lambda: worker.host.integrity().live_sequences == 0, what="an idle worker")
        writer.close()
        await until(lambda: gateway.open == 0 and open_files() <= before, what="no open connection")


async def test_memory_held_by_unread_answers_is_bounded(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        mixed = {"sim_speedup": 1000.0, "budget_tokens": 64}
        worker = await stack.enter_async_context(local_worker("m0", "mixed", **mixed))
        gateway = await stack.enter_async_context(open_gateway_over(await registration(worker), max_open=2))
        writers = []
        for _ in range(2):
            _, writer = await connect(gateway.url, window_bytes=4096)
            writer.write(request(LONG))
            writers.append(writer)
        await until(lambda: len(gateway.events()) == 2, timeout_s=30, what="the end of both sequences")
        assert gateway.open == 2
        refused = await gateway.complete(5)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        for writer in writers:
            writer.transport.abort()
        await until(lambda: gateway.open == 0, what="no open request")


@pytest.mark.skipif(sys.platform != "linux", reason="peers are made to vanish by a packet filter")
async def test_clients_that_vanish_without_closing_are_detected_and_leave_nothing(open_gateway_over: Any) -> None:
    """Half-open connections at every stage: of a body, in the queue, in prefill, in decode, streaming and not."""
    async with AsyncExitStack() as stack:
        hang = Plan(tokens=0, hang=True)
        prefill = await stack.enter_async_context(scripted_worker("p0", "prefill", slots=8, plans=(hang,)))
        decode = await stack.enter_async_context(scripted_worker("d0", "decode", slots=3, plans=(hang,) * 2))
        gateway = await stack.enter_async_context(open_gateway_over(prefill.worker, decode.worker, client_stall_s=1))
        before = open_files()
        clients = [await connect(gateway.url) for _ in range(6)]
        head, prefilling, streaming, whole, *waiting = [writer for _, writer in clients]
        head.write(request(BODY)[:-3])
        prefilling.write(request(BODY))
        await until(lambda: prefill.submits, what="work in prefill")
        for writer, stream in ((streaming, True), (whole, False)):
            writer.write(request(BODY | {"stream": stream}))
        await until(lambda: len(decode.submits) == 2, what="work in decode")
        for writer in waiting:
            writer.write(request(BODY))
        await until(lambda: gateway.open == len(clients) and gateway.live == 5, what="every stage")
        for _, writer in clients:
            vanish(writer.get_extra_info("socket"))
        await until(lambda: gateway.open == 0 and gateway.idle(), what="an idle gateway")
        await until(lambda: len(prefill.aborts) >= 1 and len(decode.aborts) >= 2, what="aborts at workers")
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: open_files() <= before, what="no connection")


async def test_a_client_that_leaves_with_its_answer_unread_leaves_nothing(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        mixed = {"sim_speedup": 10.0, "budget_tokens": 64}
        worker = await stack.enter_async_context(local_worker("m0", "mixed", **mixed))
        gateway = await stack.enter_async_context(open_gateway_over(await registration(worker)))
        assert (await gateway.complete(5)).status_code == 200
        before = open_files()
        clients = [await connect(gateway.url, window_bytes=4096) for _ in range(4)]
        for _, writer in clients:
            writer.write(request(LONG))
        for _, writer in clients:
            sock = writer.get_extra_info("socket")
            await until(lambda sock=sock: unread_bytes(sock) > 1024, what="an answer that nobody reads")
            writer.close()
        await until(lambda: worker.host.integrity().live_sequences == 0, what="an idle worker")
        await until(lambda: gateway.idle() and gateway.open == 0 and open_files() <= before, what="an idle gateway")


@pytest.mark.parametrize("part", ["head", "body"])
async def test_a_client_that_leaves_while_it_sends_leaves_nothing(open_gateway_over: Any, part: str) -> None:
    async with scripted_worker("m0", "mixed") as worker, open_gateway_over(worker.worker) as gateway:
        before = open_files()
        clients = [await connect(gateway.url) for _ in range(8)]
        whole = request(BODY)
        for _, writer in clients:
            writer.write(whole[: 20 if part == "head" else -3])
        if part == "body":
            await until(lambda: gateway.open == len(clients), what="all bodies begun")
        for _, writer in clients:
            writer.close()
        await until(lambda: gateway.open == 0 and open_files() <= before, what="no connection")
        assert worker.submits == []
        assert gateway.idle()


async def test_clients_that_leave_at_any_moment_leave_no_sequence_block_task_or_file(open_gateway_over: Any) -> None:
    """Over real workers, slow enough for a client to leave in prefill, hand-off and mid-stream, with some queued."""
    async with AsyncExitStack() as stack:
        slow = {"sim_speedup": 1.0, "sim_link_gbps": 4.0, "max_sequences": 6}
        prefill = await stack.enter_async_context(local_worker("p0", "prefill", **slow))
        decode = await stack.enter_async_context(local_worker("d0", "decode", **slow))
        registered = [await registration(worker) for worker in (prefill, decode)]
        gateway = await stack.enter_async_context(open_gateway_over(*registered))
        assert (await gateway.complete(2)).status_code == 200  # whatever is opened once is open now
        before, tasks = open_files(), len(asyncio.all_tasks())

        def stages() -> set[str]:
            load = decode.host.engine.load()
            there = {
                "queued": gateway.waiting,
                "prefill": prefill.host.engine.load().running,
                "hand-off": load.awaiting_kv,
                "stream": load.running,
            }
            return {name for name, count in there.items() if count}

        waiting: dict[str, list[asyncio.Future[None]]] = {"queued": [], "prefill": [], "hand-off": [], "stream": []}

        async def watch() -> None:
            """Poll in every turn of the loop: the last prompt of a round is computed once, within milliseconds."""
            while True:
                for stage in stages():
                    while waiting[stage]:
                        waiting[stage].pop().set_result(None)
                await asyncio.sleep(0)

        async def leave_at(stage: str, number: int) -> None:
            _, writer = await connect(gateway.url)
            writer.write(request(BODY | {"prompt": f"{number}" * 150, "max_tokens": 200}))
            some = asyncio.get_running_loop().create_future()
            waiting[stage].append(some)
            async with asyncio.timeout(10):
                await some
            writer.transport.abort() if number % 3 else writer.close()

        watcher = asyncio.create_task(watch())
        for _ in range(3):  # the last ones of a round find the workers in the state that the first ones left
            each = tuple(waiting) * 4
            await asyncio.gather(*(leave_at(stage, number) for number, stage in enumerate(each)))
        await end(watcher)

        def empty() -> bool:
            found = [worker.host.integrity() for worker in (prefill, decode)]
            return all(i.live_sequences + i.leased_handles + i.referenced_blocks == 0 for i in found)

        await until(empty, what="workers that hold nothing")
        await until(gateway.idle, what="an idle gateway")
        await until(lambda: open_files() <= before, what="no more open files than before")
        await until(lambda: len(asyncio.all_tasks()) <= tasks, what="no more tasks than before")
        assert os.getpid() == prefill.host.worker().pid  # the counts cover every participant
