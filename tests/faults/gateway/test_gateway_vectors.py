"""Tests of prompts that become vectors on prefill workers, while those workers fail."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, ScriptedWorker, scripted_worker

pytestmark = pytest.mark.alone

INPUTS = 5
BODY = {"model": "sim", "input": [f"text {number}" for number in range(INPUTS)]}
UNIT = [pytest.approx(0.6), pytest.approx(0.8)]


async def worker(stack: AsyncExitStack, name: str, *plans: Plan) -> ScriptedWorker:
    """ "p0" is a prefill worker, "d0" decode, "m0" mixed."""
    role = {"p": "prefill", "d": "decode", "m": "mixed"}[name[0]]
    return await stack.enter_async_context(scripted_worker(name, role, plans=plans))


async def embed(gateway: Any) -> None:
    answer = await gateway.http.post("/v1/embeddings", json=BODY)
    assert answer.status_code == 200, answer.text
    assert [item["embedding"] for item in answer.json()["data"]] == [UNIT] * INPUTS
    await until(gateway.idle)


async def test_a_vector_needs_and_reserves_no_decode_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        alone = await worker(stack, "p0")
        await embed(await stack.enter_async_context(open_gateway_over(alone.worker)))
        decode = await worker(stack, "d0")
        gateway = await stack.enter_async_context(open_gateway_over(alone.worker, decode.worker))
        await embed(gateway)
        assert decode.submits == []
        assert {each.phase for each in alone.submits} == {pb.PHASE_PREFILL}
        events = gateway.events()
        assert len(events) == INPUTS and {each.outcome for each in events} == {OUTCOME_OK}
        for event in events:
            assert (event.prefill_worker, event.decode_worker) == ("p0", "")
            assert (event.output_tokens, event.decode_ns, event.finish_reason) == (0, 0, "stop")
            assert event.ttft_ns > 0 and event.predicted_ttft_ns > 0


async def test_a_mixed_worker_computes_vectors_if_there_is_no_prefill_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        mixed = await worker(stack, "m0")
        await embed(await stack.enter_async_context(open_gateway_over(mixed.worker)))
        assert {each.phase for each in mixed.submits} == {pb.PHASE_BOTH}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(cut=True),
        Plan(abort=True),
        Plan(fail=pb.FAILURE_CODE_ENGINE),
        Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE),
        Plan(refuse=pb.REFUSAL_CODE_DRAINING),
    ],
)
async def test_a_vector_lost_with_its_worker_comes_from_another(open_gateway_over: Any, plan: Plan) -> None:
    async with AsyncExitStack() as stack:
        found = [await worker(stack, name, *plans) for name, plans in (("p0", (plan, plan)), ("p1", ()), ("d0", ()))]
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        await embed(gateway)
        assert sum(each.reroutes for each in gateway.events()) > 0


async def test_a_worker_that_does_not_know_pooling_is_skipped(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = [await worker(stack, name) for name in ("p0", "p1", "d0")]
        found[0].pools = False
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        await embed(gateway)
        found[1].pools = False
        refused = await gateway.http.post("/v1/embeddings", json=BODY)
        assert refused.status_code == 503 and "vector" in refused.json()["error"]["message"]


async def test_a_prompt_that_no_worker_can_pool_is_the_clients_error(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await worker(stack, "p0", *[Plan(refuse=pb.REFUSAL_CODE_INVALID)] * INPUTS)
        gateway = await stack.enter_async_context(open_gateway_over(found.worker))
        assert (await gateway.http.post("/v1/embeddings", json=BODY)).status_code == 400
        await until(gateway.idle)


async def test_vectors_overtake_answers_that_wait_for_room_to_decode(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill = await worker(stack, "p0")
        decode = await stack.enter_async_context(
            scripted_worker("d0", "decode", plans=(Plan(tokens=0, hang=True),), slots=1)
        )
        gateway = await stack.enter_async_context(open_gateway_over(prefill.worker, decode.worker))
        answers = [asyncio.ensure_future(gateway.complete(8)) for _ in range(3)]
        await until(lambda: gateway.waiting == 2)
        answer = await gateway.http.post("/v1/embeddings", json=BODY)
        assert answer.status_code == 200 and gateway.waiting == 2
        for each in answers:
            each.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await until(gateway.idle)
