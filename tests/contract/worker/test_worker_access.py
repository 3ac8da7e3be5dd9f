"""A worker that listens beyond loopback: who may call which of its services, and that its peers can."""

from collections.abc import AsyncIterator
from dataclasses import replace
from struct import pack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.contracts.errors import KvLost
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvHandle
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.runtime.transport import SystemTransport
from libs.testing.workers.hosts import TOKEN, LocalWorker, gateway_probe, local_worker, submit
from libs.worker.kv.client import GrpcKvFetcher

BEYOND: dict[str, Any] = {"host": "0.0.0.0", "advertise": "127.0.0.1", "allow_plaintext_token": True}
PROMPT = list(range(100))


@pytest.fixture
async def worker() -> AsyncIterator[LocalWorker]:
    async with local_worker("prefill-0", "prefill", **BEYOND) as worker:
        yield worker


@pytest.fixture
async def stranger(worker: LocalWorker) -> AsyncIterator[grpc.aio.Channel]:
    async with make_channel(CommonSettings(), worker.address) as channel:
        yield channel


@pytest.mark.parametrize("token", ["", "wrong"])
@pytest.mark.parametrize(
    "method",
    [
        "/fulcrum.worker.v1.WorkerService/Serve",
        "/fulcrum.worker.v1.KvService/Pull",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_stream_without_the_token_is_refused_before_it_says_anything(
    stranger: grpc.aio.Channel, method: str, token: str
) -> None:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    call = stranger.stream_stream(method)(metadata=metadata, timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_probe_needs_no_token(stranger: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(stranger).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_with_the_token_the_services_can_be_looked_at(worker: LocalWorker, stranger: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(stranger)
    call = stub.ServerReflectionInfo(metadata=SystemTransport(worker.settings).metadata(worker.address))
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert "fulcrum.worker.v1.KvService" in names
    call.cancel()


async def test_blocks_are_pulled_by_a_worker_that_has_the_token_and_by_no_other(worker: LocalWorker) -> None:
    for token, outcome in ((TOKEN, "finished"), ("wrong", "failed")):
        async with (
            local_worker("decode-0", "decode", **BEYOND, token=token) as decode,
            gateway_probe(worker, f"gateway-{outcome}") as to_prefill,
            gateway_probe(decode, f"gateway-{outcome}") as to_decode,
        ):
            await to_prefill.until(lambda: to_prefill.prefill_credits > 0)
            await to_prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
            kv = (await to_prefill.event(1, "prefilled")).kv
            await to_decode.until(lambda: to_decode.decode_credits > 0)
            request = submit(1, pb.PHASE_DECODE, [*PROMPT, *to_prefill.tokens[1]], prompt_tokens=len(PROMPT))
            request.kv.CopyFrom(kv)
            await to_decode.submit(request)
            ended = await to_decode.event(1, outcome)
            if outcome == "failed":
                assert ended.code == pb.FAILURE_CODE_KV_LOST and "token" in ended.detail, ended


async def test_blocks_cannot_be_pulled_by_who_was_not_given_their_handle() -> None:
    """Neither counting handles nor knowing the worker and its incarnation, which the registry tells, is enough."""
    async with local_worker("prefill-0", "prefill") as worker, gateway_probe(worker) as gateway:
        await gateway.until(lambda: gateway.prefill_credits > 0)
        await gateway.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        kv = (await gateway.event(1, "prefilled")).kv
        handle = KvHandle(kv.worker_id, kv.incarnation, kv.address, kv.handle, kv.tokens, kv.blocks, kv.kv_layout)
        fetcher = GrpcKvFetcher(SystemTransport(worker.settings), "stranger")
        for guess in (pack("<QQ", kv.incarnation, 1), pack("<QQ", kv.incarnation, 2), bytes(16), b""):
            with pytest.raises(KvLost):
                async for _ in fetcher.fetch(replace(handle, opaque=guess), kv.kv_layout, 0):
                    pass
        assert [chunk async for chunk in fetcher.fetch(handle, kv.kv_layout, 0)]
        await fetcher.close()
