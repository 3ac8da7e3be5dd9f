"""A worker that listens beyond loopback: who may call which of its services, and that its peers can."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.runtime.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.runtime.transport import SystemTransport
from libs.testing.worker import TOKEN, LocalWorker, gateway_probe, local_worker, submit

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
@pytest.mark.parametrize("stub", [pb_grpc.WorkerServiceStub, pb_grpc.KvServiceStub, None])
async def test_a_stream_without_the_token_is_refused_before_it_says_anything(
    stranger: grpc.aio.Channel, stub: Any, token: str
) -> None:
    """The worker's stream, pulls of KV blocks, and reflection."""
    method = {
        pb_grpc.WorkerServiceStub: lambda: stub(stranger).Serve,
        pb_grpc.KvServiceStub: lambda: stub(stranger).Pull,
        None: lambda: reflection_pb2_grpc.ServerReflectionStub(stranger).ServerReflectionInfo,
    }[stub]()
    call = method(metadata=(("authorization", f"Bearer {token}"),) if token else None, timeout=5)
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
