"""Tests of malformed messages on each stream of a worker: refused by status, and the worker continues."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.net.rpc import make_channel
from libs.testing.workers.hosts import LocalWorker, gateway_probe, local_worker, submit

GARBAGE = b"\xff\xff\xff\xff garbage"
STATUS_S = 5.0


async def _status(worker: LocalWorker, method: str, *messages: bytes) -> grpc.StatusCode:
    """Return the status with which the call ends."""
    async with make_channel(worker.settings, worker.address) as channel:
        call: Any = channel.stream_stream(f"/fulcrum.worker.v1.{method}")()
        for message in messages:
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with asyncio.timeout(STATUS_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
        return ended.value.code()


@pytest.mark.parametrize("method", ["WorkerService/Serve", "KvService/Pull"])
async def test_garbage_is_refused_as_invalid(method: str) -> None:
    async with local_worker("prefill-0", "prefill") as worker:
        assert await _status(worker, method, GARBAGE) == grpc.StatusCode.INVALID_ARGUMENT
        async with gateway_probe(worker) as gateway:
            await gateway.submit(submit(1, pb.PHASE_PREFILL, [1, 2, 3]))
            await gateway.event(1, "prefilled")


async def test_a_stream_refused_at_its_first_frame_always_learns_the_reason() -> None:
    async with local_worker("prefill-0", "prefill") as worker:
        hello = pb.GatewayFrame(hello=pb.Hello(gateway_id="g", cluster=worker.settings.cluster)).SerializeToString()
        for _ in range(40):  # the moment at which the first frame returns varies
            assert await _status(worker, "WorkerService/Serve", hello, GARBAGE) == grpc.StatusCode.INVALID_ARGUMENT
        assert worker.host.integrity().attached_gateways == 0
