"""Tests of blocks for one reader, like vLLM's: a second one would answer with another prompt's tokens unnoticed.

So the gateway is held to this: nobody is given blocks that another worker may have begun to read, and none are freed at
their source while somebody may still read them.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text, scripted_worker

TOKENS = 12
ROLES = {"p": "prefill", "d": "decode"}
LOST = Plan(tokens=0, cut=True)
HANGS = Plan(tokens=0, hang=True)
REFUSALS = (pb.REFUSAL_CODE_STALE_ROLE, pb.REFUSAL_CODE_DRAINING, pb.REFUSAL_CODE_NO_CAPACITY)
FAULTS = (
    LOST,
    Plan(tokens=1, cut=True),
    Plan(tokens=0, abort=True),
    Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),
    Plan(tokens=2, fail=pb.FAILURE_CODE_ENGINE),
    *(Plan(refuse=code) for code in REFUSALS),
)
SEEDS, REQUESTS, FAULTS_EACH = 6, 8, 8


async def workers(stack: AsyncExitStack, *names: str, **plans: tuple[Plan, ...]) -> list[ScriptedWorker]:
    """ "p0" is a prefill worker, "d0" decode; `plans` by name."""
    return [
        await stack.enter_async_context(scripted_worker(name, ROLES[name[0]], plans=plans.get(name, ()), kv_once=True))
        for name in names
    ]


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_blocks_have_two_readers_whatever_fails(open_gateway_over: Any, seed: int) -> None:
    rng = random.Random(seed)
    names = ("p0", "p1", "d0", "d1")
    plans = {name: tuple(rng.choices((Plan(), *FAULTS), k=FAULTS_EACH)) for name in names}
    async with AsyncExitStack() as stack:
        found = await workers(stack, *names, **plans)
        gateway = await stack.enter_async_context(
            open_gateway_over(*(each.worker for each in found), max_reroutes=FAULTS_EACH * len(names))
        )
        answers = await asyncio.gather(*(gateway.complete(TOKENS) for _ in range(REQUESTS)))
        assert [answer.status_code for answer in answers] == [200] * REQUESTS
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected_text(TOKENS)}
        pulled = [handle for worker in found for handle in worker.pulled]
        assert len(pulled) == len(set(pulled)) > 0
        await until(gateway.idle, what="an idle gateway")


@pytest.mark.parametrize("lose", [ScriptedWorker.cut, lambda worker: worker.voice.clear()], ids=["lost", "silent"])
async def test_a_worker_lost_before_its_first_token_costs_a_second_prefill(
    open_gateway_over: Any, lose: Callable[[ScriptedWorker], None]
) -> None:
    async with AsyncExitStack() as stack:
        prefill, first, second = found = await workers(stack, "p0", "d0", "d1", d0=(HANGS,))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.pulled, what="the pull")
        lose(first)
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert len(prefill.submits) == 2
        assert not set(first.pulled[:1]) & set(second.pulled)
        assert prefill.aborts == [], "it may be alive, and still read them"
        await until(gateway.idle, what="an idle gateway")


@pytest.mark.parametrize("code", REFUSALS)
async def test_a_worker_that_refused_blocks_has_not_read_them(open_gateway_over: Any, code: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, first, second = found = await workers(stack, "p0", "d0", "d1", d0=(Plan(refuse=code),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert len(prefill.submits) == 1
        assert [submit.kv for submit in first.submits] == [submit.kv for submit in second.submits]


async def test_refused_blocks_offered_to_a_worker_that_is_lost_are_offered_to_no_other(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        plans = {name: (Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE), LOST) for name in ("d0", "d1")}
        prefill, *decodes = found = await workers(stack, "p0", "d0", "d1", **plans)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        pulled = [handle for worker in decodes for handle in worker.pulled]
        assert len(pulled) == len(set(pulled)) == len(prefill.submits) > 1


async def test_blocks_that_a_worker_reports_as_read_are_freed_at_their_source(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        plan = (Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),)
        prefill, *_ = found = await workers(stack, "p0", "d0", d0=plan)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        await until(lambda: prefill.aborts == [prefill.submits[0].sequence], what="the blocks to be freed")


async def test_blocks_of_a_client_that_leaves_are_freed_by_their_reader(open_gateway_over: Any) -> None:
    """If both were notified at once, the source might free them first, and another prompt's blocks be read in their
    place, even into the decode worker's prefix cache."""
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0", d0=(HANGS,))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: decode.pulled, what="the pull")
        completion.cancel()
        await until(lambda: decode.aborts == [decode.submits[0].sequence], what="the end of the decode")
        await until(gateway.idle, what="an idle gateway")
        assert (await gateway.complete(TOKENS)).status_code == 200  # whatever was on its way has come by now
        assert prefill.aborts == []


async def test_blocks_offered_to_no_worker_are_freed_at_their_source(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0")
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(1)).json()["choices"][0]["text"] == expected_text(1)
        await until(lambda: prefill.aborts == [prefill.submits[0].sequence], what="the blocks to be freed")
        assert decode.submits == []


async def test_blocks_are_not_offered_while_their_prompt_is_computed(open_gateway_over: Any) -> None:
    """Blocks that a first reader has consumed are gone when it is lost, even if the prompt is unfinished."""
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0", p0=(Plan(opens=True),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert [submit.kv.streamed for submit in decode.submits] == [False]
        assert len(prefill.submits) == 1
