"""Tests of decodes that are submitted together with their prompts, whatever then fails or comes too early."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text, scripted_worker
from tests.faults.gateway.test_gateway_reroutes import REROUTED, TOKENS, phases

pytestmark = pytest.mark.alone


async def workers(
    stack: AsyncExitStack, *names: str, named_kv: str = "pd", **plans: tuple[Plan, ...]
) -> list[ScriptedWorker]:
    """ "p0" is a prefill worker, "d0" decode. Those whose letter is in `named_kv` take named KV."""
    roles = {"p": "prefill", "d": "decode"}
    return [
        await stack.enter_async_context(
            scripted_worker(name, roles[name[0]], plans=plans.get(name, ()), named_kv=name[0] in named_kv)
        )
        for name in names
    ]


@pytest.mark.parametrize("plans", REROUTED.values(), ids=REROUTED.keys())
async def test_the_text_is_complete_whatever_fails(open_gateway_over: Any, plans: dict[str, tuple[Plan, ...]]) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "p0", "p1", "d0", "d1", **plans)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        answer = await gateway.complete(TOKENS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        await until(gateway.idle)


async def test_a_decode_that_overtakes_its_prompt_is_read_after_it(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0", p0=(Plan(opens=True),))
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: decode.pulled)
        assert decode.submits[0].kv.handle == prefill.submits[0].kv_name
        prefill.gate.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert not decode.proceeds
        assert gateway.events()[0].reroutes == 0
        await until(gateway.idle)


async def test_a_prompt_lost_after_its_decode_has_ended_is_computed_again(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        plans = {"p0": (Plan(opens=True, tokens=0, cut=True),)}
        prefill, decode, _ = found = await workers(stack, "p0", "d0", "p1", **plans)
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: decode.pulled or found[2].submits)
        prefill.gate.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        await until(gateway.idle)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("end", [Plan(fail=pb.FAILURE_CODE_ENGINE), Plan(cut=True)], ids=["fails", "is lost"])
async def test_a_decode_that_ends_badly_before_its_prompt_is_reported_leaves_no_stale_blocks(
    open_gateway_over: Any, tokens: int, end: Plan
) -> None:
    """A decode that has read its blocks has had them freed at their source."""
    async with AsyncExitStack() as stack:
        plans = {"p0": (Plan(opens=True),), "d0": (replace(end, tokens=tokens),)}
        prefill, decode = found = await workers(stack, "p0", "d0", **plans)
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: decode.pulled)
        if end.cut:
            await until(lambda: decode.streams > 1 and "d0" in gateway.connected)
        prefill.gate.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        read_nothing = end.cut and not tokens
        assert len(prefill.submits) == (1 if read_nothing else 2)
        assert len(decode.submits) == 2
        await until(gateway.idle)


async def test_a_first_token_that_ends_the_answer_ends_the_waiting_decode(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        _, decode = found = await workers(stack, "p0", "d0", d0=(Plan(hang=True, tokens=0),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        answer = await gateway.complete(TOKENS, stop=["a"])
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        await until(lambda: decode.aborts == [decode.submits[0].sequence])
        await until(gateway.idle)


async def test_a_refusal_during_prefill_costs_no_second_prefill(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        refuse = Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE)
        prefill, *_ = found = await workers(stack, "p0", "d0", "d1", d0=(refuse,), d1=(refuse,), p0=(Plan(opens=True),))
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: found[1].submits or found[2].submits)
        prefill.gate.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert phases(prefill) == ["prefill"]
        await until(gateway.idle)


@pytest.mark.parametrize("named_kv", ["p", "d", ""])
async def test_workers_of_an_older_release_get_no_names(open_gateway_over: Any, named_kv: str) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0", named_kv=named_kv)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert not prefill.submits[0].kv_name
        assert not decode.submits[0].kv.named


async def test_no_names_are_given_if_the_setting_forbids_them(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0")
        gateway = await stack.enter_async_context(
            open_gateway_over(*(each.worker for each in found), early_decodes=False)
        )
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert not prefill.submits[0].kv_name
        assert not decode.submits[0].kv.named


async def test_a_prompt_of_several_steps_and_one_with_logprobs_get_no_name(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0")
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        await gateway.complete(TOKENS, prompt="x" * 65)
        await gateway.complete(TOKENS, logprobs=1)
        assert [bool(submit.kv_name) for submit in prefill.submits] == [False, False]
        assert [submit.kv.named for submit in decode.submits] == [False, False]
