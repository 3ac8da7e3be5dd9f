"""Tests of gateways and workers of two releases: neighbours work together, others are refused with a remedy."""

import grpc
import pytest

from libs.contracts.errors import VersionMismatch
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.protocol import OLDEST, PROTOCOL, check_protocol
from libs.runtime.net.rpc import make_channel
from libs.testing.workers.hosts import gateway_probe, local_worker, submit


async def test_a_gateway_of_the_previous_release_gets_an_answer() -> None:
    """Its hello has no protocol field, which did not exist then."""
    async with local_worker("mixed-0", "mixed", budget_tokens=64) as worker, gateway_probe(worker) as gateway:
        assert gateway.frames[0].worker.protocol == PROTOCOL and gateway.frames[0].worker.oldest_protocol == OLDEST
        await gateway.until(lambda: gateway.decode_credits > 0)
        await gateway.submit(submit(1, pb.PHASE_BOTH, [5] * 20, output=4))
        assert (await gateway.event(1, "finished")) is not None
        assert len(gateway.tokens[1]) == 4


async def test_a_gateway_that_understands_only_newer_workers_is_refused_with_a_sentence() -> None:
    async with local_worker("decode-0", "decode") as worker, make_channel(worker.settings, worker.address) as channel:
        call = pb_grpc.WorkerServiceStub(channel).Serve()
        hello = pb.Hello(gateway_id="g", cluster="local", protocol=PROTOCOL + 2, oldest_protocol=PROTOCOL + 1)
        await call.write(pb.GatewayFrame(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError, match="upgrade this first") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert worker.host.integrity().attached_gateways == 0


def test_each_side_checks_which_protocols_the_other_speaks_and_understands() -> None:
    for protocol, oldest in ((0, 0), (PROTOCOL, OLDEST), (PROTOCOL + 1, PROTOCOL), (PROTOCOL + 5, OLDEST)):
        check_protocol("worker w", protocol, oldest)
    with pytest.raises(VersionMismatch, match="worker w understands protocols from"):
        check_protocol("worker w", PROTOCOL + 1, PROTOCOL + 1)
