"""Tests of a worker's admin calls, and of running work during a move or a drain."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.runtime.net.rpc import make_channel
from libs.testing.workers.hosts import TOKEN, LocalWorker, eventually, gateway_probe, local_worker, submit

PROMPT = list(range(100))
AUTH = (("authorization", f"Bearer {TOKEN}"),)


@asynccontextmanager
async def admin(worker: LocalWorker) -> AsyncIterator[pb_grpc.WorkerAdminServiceStub]:
    async with make_channel(worker.settings, worker.address) as channel:
        yield pb_grpc.WorkerAdminServiceStub(channel)


def to_decode(epoch: int) -> pb.SetRoleRequest:
    return pb.SetRoleRequest(expected_epoch=epoch, role=common.ROLE_MIXED, reason="test")


async def test_admin_calls_need_the_token() -> None:
    async with local_worker("prefill-0", "prefill") as worker, admin(worker) as stub:
        wrong = (("authorization", "Bearer wrong"),)
        for metadata in ((), wrong, wrong + AUTH, AUTH + AUTH):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(pb.DescribeRequest(), metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        described = await stub.Describe(pb.DescribeRequest(), metadata=AUTH)
        assert described.worker.id == "prefill-0"
        assert described.integrity == pb.Integrity()


async def test_health_is_served() -> None:
    async with (
        local_worker("prefill-0", "prefill") as worker,
        make_channel(worker.settings, worker.address) as channel,
    ):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_stale_epoch_is_refused_and_a_move_reaches_gateways_and_registry() -> None:
    async with (
        local_worker("prefill-0", "prefill") as worker,
        admin(worker) as stub,
        gateway_probe(worker) as gateway,
    ):
        await gateway.until(lambda: gateway.prefill_credits == 8)
        answer = await stub.SetRole(to_decode(1), metadata=AUTH)
        assert answer.assignment.epoch == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetRole(to_decode(1), metadata=AUTH)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert str(caught.value.details()).startswith("stale_role: ")
        await gateway.until(lambda: gateway.worker and gateway.worker.assignment.epoch == 2)
        await gateway.until(lambda: (gateway.prefill_credits, gateway.decode_credits) == (0, 8))
        await eventually(lambda: worker.registry.seen[-1].assignment.epoch == 2)  # type: ignore[union-attr]


async def test_prompts_accepted_before_a_move_are_computed_to_their_end() -> None:
    async with (
        local_worker("prefill-0", "prefill", sim_speedup=1.0, prefill_chunk_tokens=16) as worker,
        admin(worker) as stub,
        gateway_probe(worker) as gateway,
    ):
        await gateway.until(lambda: gateway.prefill_credits == 4)
        await gateway.submit(*(submit(i, pb.PHASE_PREFILL, PROMPT[i:]) for i in range(1, 5)))
        await eventually(lambda: worker.host.running == 4)
        await stub.SetRole(to_decode(1), metadata=AUTH)
        for i in range(1, 5):
            await gateway.event(i, "prefilled")


async def test_a_drain_finishes_running_work_and_refuses_new_work() -> None:
    async with (
        local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=5.0) as worker,
        admin(worker) as stub,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=100))
        await gateway.until(lambda: gateway.tokens[1])
        drain = stub.Drain(pb.DrainRequest(deadline_ms=5000), metadata=AUTH)
        await gateway.until(lambda: gateway.worker and gateway.worker.state == common.WORKER_STATE_DRAINING)
        await gateway.submit(submit(2, pb.PHASE_BOTH, PROMPT))
        assert (await gateway.event(2, "refused")).code == pb.REFUSAL_CODE_DRAINING
        assert (await gateway.event(1, "finished")).output_tokens == 100
        drained = await drain
        assert (drained.finished, drained.aborted) == (1, 0)
        await gateway.until(lambda: gateway.decode_credits <= 0)


async def test_a_drain_waits_for_held_kv_to_be_pulled() -> None:
    async with (
        local_worker("prefill-0", "prefill") as a,
        local_worker("decode-0", "decode") as b,
        admin(a) as stub,
        gateway_probe(a) as prefill,
        gateway_probe(b) as decode,
    ):
        await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        kv = (await prefill.event(1, "prefilled")).kv
        drain = stub.Drain(pb.DrainRequest(deadline_ms=5000), metadata=AUTH)
        await prefill.until(lambda: prefill.worker and prefill.worker.state == common.WORKER_STATE_DRAINING)
        assert not drain.done()
        late = submit(1, pb.PHASE_DECODE, [*PROMPT, *prefill.tokens[1]], prompt_tokens=len(PROMPT))
        late.kv.CopyFrom(kv)
        await decode.submit(late)
        await decode.event(1, "finished")
        assert (await drain).aborted == 0


async def test_a_drain_aborts_stragglers_at_its_deadline() -> None:
    async with (
        local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=1.0) as worker,
        admin(worker) as stub,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=4000))
        await gateway.until(lambda: gateway.tokens[1])
        drained = await stub.Drain(pb.DrainRequest(deadline_ms=50), metadata=AUTH)
        assert (drained.finished, drained.aborted) == (0, 1)
        assert (await gateway.event(1, "finished")).reason == pb.FINISH_REASON_ABORTED


async def test_a_drain_ends_with_the_lease_of_kv_that_no_worker_pulls() -> None:
    async with (
        local_worker("prefill-0", "prefill", kv_lease_ms=200) as worker,
        admin(worker) as stub,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        await gateway.event(1, "prefilled")
        drained = await stub.Drain(pb.DrainRequest(deadline_ms=60_000), metadata=AUTH, timeout=20)
        assert (drained.finished, drained.aborted) == (0, 0)
        assert worker.host.integrity().leased_handles == 0
