"""Tests of a gateway's stream to a worker: its beginning, credits, order and end."""

import asyncio

import grpc
import pytest

from libs.contracts.packing import unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.testing.workers.hosts import eventually, gateway_probe, local_worker, submit
from libs.worker.gateways import OUTPUT_PAUSE_S
from tests.contract.worker.serving_rig import BLOCK, PROMPT, is_clean


async def test_two_gateways_share_the_credits_and_never_exceed_them() -> None:
    async with (
        local_worker("prefill-0", "prefill") as worker,
        gateway_probe(worker, "gateway-0") as first,
        gateway_probe(worker, "gateway-1") as second,
    ):
        await second.until(lambda: first.prefill_credits + second.prefill_credits == 8 and second.prefill_credits)
        outstanding_max = 0
        for gateway, base in ((first, 0), (second, 100)):
            for i in range(1, 21):
                demand = pb.Demand(waiting=21 - i, head_deadline_unix_ns=10**18 + base)
                await gateway.send(pb.GatewayFrame(demand=demand))
                await gateway.until(lambda gateway=gateway: gateway.prefill_credits)
                await gateway.submit(submit(base + i, pb.PHASE_PREFILL, PROMPT))
                outstanding_max = max(outstanding_max, worker.host.running)
            await gateway.send(pb.GatewayFrame(demand=pb.Demand()))
        for gateway, base in ((first, 0), (second, 100)):
            for i in range(1, 21):
                await gateway.event(base + i, "prefilled")
            assert not any(e.HasField("refused") for events in gateway.events.values() for e in events)
        assert outstanding_max <= 8
        await eventually(lambda: first.prefill_credits + second.prefill_credits == 8)


async def test_the_first_frame_names_the_worker_and_grants_standing_credit() -> None:
    async with local_worker("decode-0", "decode") as worker, gateway_probe(worker) as gateway:
        first = gateway.frames[0]
        assert (first.worker.id, first.worker.assignment.model) == ("decode-0", "sim")
        assert first.credit.decode_grant == 8
        assert first.worker.capabilities.block_size_tokens == BLOCK


@pytest.mark.parametrize("hello", [pb.GatewayFrame(), pb.GatewayFrame(hello=pb.Hello(cluster="another"))])
async def test_a_stream_without_a_matching_hello_is_refused(hello: pb.GatewayFrame) -> None:
    from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
    from libs.runtime.net.rpc import make_channel

    async with local_worker("decode-0", "decode") as worker, make_channel(worker.settings, worker.address) as channel:
        call = pb_grpc.WorkerServiceStub(channel).Serve()
        await call.write(hello)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_duplicate_sequence_number_ends_the_stream_with_invalid_argument() -> None:
    async with local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=1.0) as worker:
        async with gateway_probe(worker) as gateway:
            await gateway.submit(*[submit(1, pb.PHASE_BOTH, PROMPT, output=4000)] * 2)
            await gateway.until(lambda: gateway.error)
            assert gateway.error is not None
            assert gateway.error.code() == grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: is_clean(worker))


async def test_logprobs_accompany_their_tokens() -> None:
    async with local_worker("mixed-0", "mixed", budget_tokens=64) as worker, gateway_probe(worker) as gateway:
        sampling = pb.Sampling(repetition_penalty=1, ignore_eos=True, logprobs=True, top_logprobs=2)
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, sampling=sampling, output=3))
        await gateway.event(1, "finished")
        reported = [
            (unpack_u32(frame.token_ids)[entry.index], unpack_u32(entry.top_ids))
            for frame in gateway.frames
            for entry in frame.logprobs
        ]
        assert [token for token, _ in reported] == gateway.tokens[1]
        assert all(token in top for token, top in reported)


async def test_tokens_of_steps_shorter_than_the_pause_leave_in_one_frame() -> None:
    now_s = asyncio.get_running_loop().time
    async with local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=1e6) as worker:
        async with gateway_probe(worker) as gateway:
            began_s = now_s()
            await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=500))
            await gateway.event(1, "finished")
            pauses = (now_s() - began_s) / OUTPUT_PAUSE_S
        frames = sum(bool(frame.token_ids or frame.events) for frame in gateway.frames)
        assert len(gateway.tokens[1]) == 500
        assert frames <= pauses + 1


async def test_a_gateway_that_stops_reading_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.worker.gateways.MAX_PENDING", 500)
    async with local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=1000.0, max_sequences=64) as worker:
        async with gateway_probe(worker) as gateway:
            held = asyncio.Event()
            gateway._take = lambda _frame: held.wait()  # type: ignore[method-assign,assignment,return-value]
            logprobs = pb.Sampling(repetition_penalty=1, ignore_eos=True, logprobs=True, top_logprobs=20)
            waiting = [submit(i, pb.PHASE_BOTH, PROMPT[:5], output=8000, sampling=logprobs) for i in range(1, 65)]
            await gateway.submit(*waiting)
            await eventually(lambda: not worker.host.integrity().attached_gateways, within_s=30)
        await eventually(lambda: is_clean(worker))
