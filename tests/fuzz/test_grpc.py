"""Fuzz tests of gRPC: a typed refusal or an answer, soon, and nothing left behind."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.net.rpc import make_channel, make_server
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner
from libs.testing.messages import messages, spoiled
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from libs.testing.workers.hosts import (
    TOKEN,
    LocalWorker,
    RecordingBus,
    RecordingKvIndex,
    gateway_probe,
    local_worker,
    submit,
)
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, RunningGateway, open_gateway
from services.gateway.settings import GatewaySettings

STREAM_S = 10.0
CLUSTER = CommonSettings().cluster
UNTYPED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
"""The status of an uncaught or never ending error, as a caller sees it."""

prompts = st.lists(st.integers(0, 255), min_size=1, max_size=24).map(pack_u32)
FULL = "fulcrum.worker.v1"
known = {
    "model": st.just("sim"),
    "adapter": st.just(""),
    "cluster": st.just(CLUSTER),
    "sequence": st.integers(1, 6),
    "phase": st.sampled_from([pb.PHASE_PREFILL, pb.PHASE_DECODE, pb.PHASE_BOTH]),
    "token_ids": prompts,
    "prompt_tokens": st.integers(1, 24),
    "max_output_tokens": st.integers(1, 30),
    "aborts": st.lists(st.integers(1, 6), max_size=3).map(pack_u32),
    "epoch": st.just(1),
    "expected_epoch": st.integers(1, 3),
    "temperature": st.floats(0, 2, width=32),
    "top_p": st.just(1.0),
    "min_p": st.just(0.0),
    "repetition_penalty": st.just(1.0),
    "address": st.just("127.0.0.1:1"),
}


@pytest.fixture
def runner() -> Any:
    """A loop that outlives hypothesis' examples."""
    with asyncio.Runner() as runner:
        yield runner


class Served:
    """A service opened once for many examples."""

    def __init__(self, runner: asyncio.Runner, context: Any) -> None:
        self._runner, self._context = runner, context

    def __enter__(self) -> Any:
        return self.run(self._context.__aenter__())

    def __exit__(self, *error: Any) -> None:
        self.run(self._context.__aexit__(*error))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)


async def say(worker: LocalWorker, method: str, sent: list[bytes], fuzz: Any, *, token: str = TOKEN) -> None:
    """Make one call with these messages; it is half-closed after them, and must end with a typed status."""
    async with make_channel(worker.settings, worker.address) as channel:
        call: Any = channel.stream_stream(f"/{FULL}.{method}")(metadata=(("authorization", f"Bearer {token}"),))
        try:
            async with asyncio.timeout(STREAM_S):
                for message in sent:
                    await call.write(message)
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        code = await call.code()
        fuzz.counts[f"grpc {method}: {code.name}"] += 1
        # A write that meets the end of its call hides the call's status behind one of grpc's own.
        assert code not in UNTYPED or await call.details() == "Internal error from Core", await call.details()


async def serves(worker: LocalWorker) -> None:
    """Check that it answers a whole request, and holds nothing afterwards."""
    async with gateway_probe(worker) as gateway:
        phase = pb.PHASE_PREFILL if worker.settings.role == "prefill" else pb.PHASE_BOTH
        await gateway.submit(submit(1, phase, [1, 2, 3]))
        await gateway.event(1, "prefilled" if phase == pb.PHASE_PREFILL else "finished")
    await until(lambda: worker.host.integrity() == pb.Integrity(), what="an idle worker")


HELLO = pb.GatewayFrame(hello=pb.Hello(gateway_id="fuzz", cluster=CLUSTER)).SerializeToString()


@pytest.mark.parametrize("role", ["prefill", "mixed"])
def test_any_frames_into_a_worker_are_answered_or_refused(runner: asyncio.Runner, fuzz: Any, role: str) -> None:
    frames = st.lists(spoiled(messages(pb.GatewayFrame, known)), max_size=4)
    served = Served(runner, local_worker("w", role, budget_tokens=64 * (role == "mixed"), kv_lease_ms=300))
    with served as worker:

        @fuzz.settings(2)
        @given(sent=frames, greeted=st.integers(0, 9))
        def holds(sent: list[bytes], greeted: int) -> None:
            served.run(say(worker, "WorkerService/Serve", [HELLO, *sent] if greeted else sent, fuzz))

        holds()
        served.run(serves(worker))


def test_any_frames_into_a_kv_server_are_answered_or_refused(runner: asyncio.Runner, fuzz: Any) -> None:
    frames = st.lists(spoiled(messages(pb.PullFrame, known)), max_size=3)
    served = Served(runner, local_worker("w", "prefill", kv_lease_ms=300))
    with served as worker:

        @fuzz.settings(2)
        @given(sent=frames)
        def holds(sent: list[bytes]) -> None:
            served.run(say(worker, "KvService/Pull", sent, fuzz))

        holds()
        served.run(serves(worker))


@pytest.mark.parametrize("verb", ["Describe", "SetRole", "Drain"])
def test_any_admin_calls_are_answered_or_refused(runner: asyncio.Runner, fuzz: Any, verb: str) -> None:
    kind = {"Describe": pb.DescribeRequest, "SetRole": pb.SetRoleRequest, "Drain": pb.DrainRequest}[verb]
    served = Served(runner, local_worker("w", "mixed", budget_tokens=64, drain_s=0.2))
    with served as worker:

        @fuzz.settings()
        @given(sent=spoiled(messages(kind, known)), token=st.sampled_from([TOKEN, TOKEN, TOKEN, "", "x"]))
        def holds(sent: bytes, token: str) -> None:
            served.run(ask(worker, verb, sent, token))

        async def ask(worker: LocalWorker, verb: str, sent: bytes, token: str) -> None:
            async with make_channel(worker.settings, worker.address) as channel:
                call: Any = channel.unary_unary(f"/{FULL}.WorkerAdminService/{verb}")(
                    sent, metadata=(("authorization", f"Bearer {token}"),), timeout=STREAM_S
                )
                code = await call.code()
                fuzz.counts[f"grpc {verb}: {code.name}"] += 1
                assert (code == grpc.StatusCode.UNAUTHENTICATED) == (token != TOKEN)
                if _is_message(kind, sent):
                    assert code not in UNTYPED, f"{code.name}: {await call.details()}"

        holds()


def _is_message(kind: Any, data: bytes) -> bool:
    """gRPC itself answers INTERNAL to a unary call whose bytes are no message; no handler is asked."""
    try:
        kind.FromString(data)
    except Exception:
        return False
    return True


REQUEST = {"model": "sim", "prompt": "hello", "max_tokens": 8}


class _Babbler:
    """A worker that introduces itself, then says what an example tells it to."""

    def __init__(self, worker: common.Worker) -> None:
        self.worker = worker
        self.said: list[bytes] = []

    async def serve(self, _frames: Any, context: Any) -> None:
        await context.read()
        credit = pb.Credit(prefill_grant=9, decode_grant=9)
        await context.write(pb.WorkerFrame(worker=self.worker, credit=credit).SerializeToString())
        while (data := await context.read()) is not grpc.aio.EOF:
            if pb.GatewayFrame.FromString(data).submits:
                break
        for frame in self.said:
            await context.write(frame)


@asynccontextmanager
async def babbler() -> AsyncIterator[_Babbler]:
    server, port = make_server(CommonSettings(), "127.0.0.1:0")
    assignment = common.Assignment(model="sim", role=common.ROLE_MIXED, budget_tokens=64, epoch=1)
    capabilities = common.Capabilities(block_size_tokens=16, max_context_tokens=8192, kv_layout="x", streams_kv=True)
    worker = common.Worker(
        id="fuzz", incarnation=1, address=f"127.0.0.1:{port}", assignment=assignment, capabilities=capabilities,
        state=common.WORKER_STATE_READY,
    )  # fmt: skip
    servicer = _Babbler(worker)
    handler = grpc.stream_stream_rpc_method_handler(servicer.serve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(f"{FULL}.WorkerService", {"Serve": handler}),)
    )
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


class _Gateway(NamedTuple):
    running: RunningGateway
    tasks: TaskOwner
    http: httpx.AsyncClient

    def idle(self) -> bool:
        return not self.running.dispatcher.live and not any(link.running for link in self.running.fleet.links)


@asynccontextmanager
async def gateway_and_babbler() -> AsyncIterator[tuple[_Gateway, _Babbler]]:
    settings = GatewaySettings.model_validate({"port": 0, "max_reroutes": 3, "no_workers_wait_ms": 300, "drain_s": 1})
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(babbler())
        tasks = TaskOwner()
        stack.push_async_callback(tasks.close)
        ports = GatewayPorts(RecordingBus(), ListedRegistry([worker.worker]), RecordingKvIndex())
        running = await stack.enter_async_context(
            open_gateway(
                settings=settings,
                ports=ports,
                catalog=load_catalog(settings.models),
                sock=bind(settings.host, 0, "FULCRUM_GATEWAY_PORT"),
                clock=SystemClock(),
                tasks=tasks,
            )
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=STREAM_S))
        yield _Gateway(running, tasks, http), worker


def test_any_frames_into_a_gateway_are_survived(runner: asyncio.Runner, fuzz: Any) -> None:
    """Its client is answered: with text, or with a typed error when no worker could go on."""
    frames = st.lists(spoiled(messages(pb.WorkerFrame, known)), min_size=1, max_size=4)
    served = Served(runner, gateway_and_babbler())
    with served as (gateway, worker):

        async def requested(said: list[bytes]) -> None:
            worker.said = said
            answer = await gateway.http.post("/v1/completions", json=REQUEST)
            fuzz.counts[f"WorkerFrame into a gateway: {answer.status_code}"] += 1
            assert answer.status_code in (200, 400) or "retry-after" in answer.headers, answer.text
            assert answer.status_code in (200, 400, 503)
            await until(gateway.idle, what="an idle gateway")
            assert gateway.tasks.error is None

        @fuzz.settings(0.5)
        @given(said=frames)
        def holds(said: list[bytes]) -> None:
            served.run(requested(said))

        holds()
