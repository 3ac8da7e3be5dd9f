"""Tests of choices that lose their worker at every stage: no token is lost or repeated, and nothing is left behind."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, OUTCOME_OK, OUTCOME_REJECTED
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.protocol import PROTOCOL
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text, scripted_worker

pytestmark = pytest.mark.alone

TOKENS = 12


async def workers(stack: AsyncExitStack, *names_and_roles: str, **plans: tuple[Plan, ...]) -> list[ScriptedWorker]:
    """ "p0" is a prefill worker, "d0" decode, "m0" mixed; `plans` by name."""
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    return [
        await stack.enter_async_context(scripted_worker(name, roles[name[0]], plans=plans.get(name, ())))
        for name in names_and_roles
    ]


def phases(worker: ScriptedWorker) -> list[str]:
    return [pb.Phase.Name(submit.phase).removeprefix("PHASE_").lower() for submit in worker.submits]


REROUTED = {
    "prefill refuses: stale role": {"p0": (Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE),)},
    "prefill refuses: draining": {"p0": (Plan(refuse=pb.REFUSAL_CODE_DRAINING),)},
    "prefill refuses: no capacity": {"p0": (Plan(refuse=pb.REFUSAL_CODE_NO_CAPACITY),)},
    "prefill is lost before its token": {"p0": (Plan(tokens=0, cut=True),)},
    "prefill is lost after its token": {"p0": (Plan(cut=True),)},
    "prefill fails": {"p0": (Plan(tokens=0, fail=pb.FAILURE_CODE_ENGINE),)},
    "prefill aborts": {"p0": (Plan(tokens=0, abort=True),)},
    "decode refuses: stale role": {"d0": (Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE),)},
    "decode refuses: kv mismatch": {"d0": (Plan(refuse=pb.REFUSAL_CODE_KV_MISMATCH),)},
    "decode loses the blocks": {"d0": (Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),)},
    "decode is lost before its first token": {"d0": (Plan(tokens=0, cut=True),)},
    "decode is lost in the middle": {"d0": (Plan(tokens=4, cut=True),)},
    "decode fails in the middle": {"d0": (Plan(tokens=4, fail=pb.FAILURE_CODE_ENGINE),)},
    "decode aborts in the middle": {"d0": (Plan(tokens=4, abort=True),)},
    "prefill is lost in mid-stream": {"p0": (Plan(opens=True, tokens=0, cut=True),)},
    "prefill fails in mid-stream": {"p0": (Plan(opens=True, tokens=0, fail=pb.FAILURE_CODE_ENGINE),)},
    "decode refuses a streamed prompt": {
        "p0": (Plan(opens=True),),
        "d0": (Plan(refuse=pb.REFUSAL_CODE_KV_MISMATCH),),
    },
    "decode loses streamed blocks": {
        "p0": (Plan(opens=True),),
        "d0": (Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),),
    },
    "decode is lost in mid-stream": {"p0": (Plan(opens=True),), "d0": (Plan(tokens=0, cut=True),)},
    "everything goes wrong": {
        "p0": (Plan(cut=True), Plan(refuse=pb.REFUSAL_CODE_DRAINING)),
        "p1": (Plan(tokens=0, fail=pb.FAILURE_CODE_ENGINE),),
        "d0": (Plan(tokens=3, cut=True), Plan(refuse=pb.REFUSAL_CODE_KV_MISMATCH)),
        "d1": (Plan(tokens=2, abort=True),),
    },
}


@pytest.mark.parametrize("plans", REROUTED.values(), ids=REROUTED.keys())
async def test_the_text_is_complete_whatever_fails(open_gateway_over: Any, plans: dict[str, tuple[Plan, ...]]) -> None:
    """With another worker of each role, and with none besides the plans'."""

    async def ask(*names: str) -> None:
        async with AsyncExitStack() as stack:
            found = await workers(stack, *names, **plans)
            gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
            answer = await gateway.complete(TOKENS)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
            assert answer.json()["usage"]["completion_tokens"] == TOKENS
            assert answer.json()["usage"]["prompt_tokens"] == len("hello")
            (event,) = gateway.events()
            assert event.outcome == OUTCOME_OK
            assert event.reroutes > 0
            assert event.output_tokens == TOKENS
            await until(gateway.idle, what="an idle gateway")

    await asyncio.gather(ask("p0", "p1", "d0", "d1"), ask(*sorted({"p0", "d0", *plans})))


async def test_a_refused_decode_goes_elsewhere_with_the_same_blocks(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        plan = (Plan(refuse=pb.REFUSAL_CODE_DRAINING),)
        prefill, first, second = found = await workers(stack, "p0", "d0", "d1", d0=plan)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        answer = await gateway.complete(TOKENS)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert [phases(worker) for worker in found] == [["prefill"], ["decode"], ["decode"]]
        assert first.submits[0].kv == second.submits[0].kv
        assert prefill.aborts == []  # its lease ends with the pull


async def test_blocks_that_do_not_arrive_are_computed_by_another_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        plan = (Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),)
        found = await workers(stack, "p0", "p1", "d0", d0=plan)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        answer = await gateway.complete(TOKENS)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert [phases(worker) for worker in found] == [["prefill"], ["prefill"], ["decode", "decode"]]


async def test_a_decode_submitted_during_prefill_continues_from_the_prompts_first_token(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0", p0=(Plan(opens=True),))
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: decode.submits)
        assert decode.submits[0].kv.streamed and not decode.proceeds
        prefill.gate.set()
        answer = await completion
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert [proceed.token_ids for proceed in decode.proceeds] == [pack_u32([ord("a")])]
        (event,) = gateway.events()
        assert (event.reroutes, event.prefill_worker, event.decode_worker) == (0, "p0", "d0")
        await until(gateway.idle)


@pytest.mark.parametrize(
    "plan",
    [Plan(tokens=0, cut=True), Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST), Plan(refuse=pb.REFUSAL_CODE_DRAINING)],
)
async def test_a_decode_worker_lost_in_mid_stream_costs_no_second_prefill(open_gateway_over: Any, plan: Plan) -> None:
    async with AsyncExitStack() as stack:
        prefill, first, _ = found = await workers(stack, "p0", "d0", "d1", p0=(Plan(opens=True),), d0=(plan,))
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.submits)
        await until(lambda: not any(link.running for link in gateway.running.fleet.links if link.id == "d0"))
        prefill.gate.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert phases(prefill) == ["prefill"]
        assert gateway.events()[0].reroutes == 1
        await until(gateway.idle)


async def test_a_first_token_that_ends_the_answer_ends_the_streamed_decode(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0", p0=(Plan(opens=True),))
        prefill.gate.clear()
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS, stop=["a"]))
        await until(lambda: decode.submits)
        prefill.gate.set()
        assert (await completion).json()["choices"][0]["finish_reason"] == "stop"
        await until(lambda: decode.aborts == [decode.submits[0].sequence])
        assert not decode.proceeds
        await until(gateway.idle)


async def test_a_lost_stream_resumes_from_prompt_and_tokens_so_far(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", m0=(Plan(tokens=5, cut=True),))
        gateway = await stack.enter_async_context(open_gateway_over(found[0].worker))
        answer = await gateway.complete(TOKENS)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        again = found[0].submits[1]
        assert phases(found[0]) == ["both", "both"]
        assert (len(again.token_ids) // 4, again.prompt_tokens, again.max_output_tokens) == (10, 5, TOKENS)


async def test_attempts_are_bounded_and_the_client_gets_an_error(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", m0=(Plan(tokens=1, abort=True),) * 10)
        gateway = await stack.enter_async_context(open_gateway_over(found[0].worker, max_reroutes=3))
        answer = await gateway.complete(TOKENS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sequence_failed")
        assert len(found[0].submits) == 4
        assert gateway.events()[0].outcome == OUTCOME_FAILED
        assert gateway.idle()


async def test_a_request_that_every_worker_refuses_is_the_clients_error(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "p0", "d0", p0=(Plan(refuse=pb.REFUSAL_CODE_INVALID),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        answer = await gateway.complete(TOKENS)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "by plan" in answer.json()["error"]["message"]
        assert gateway.events()[0].outcome == OUTCOME_REJECTED
        assert gateway.idle()


async def test_a_first_token_that_is_the_last_needs_no_decode_and_frees_the_blocks(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = found = await workers(stack, "p0", "d0")
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        for _ in range(2 * decode.decode_credits):  # more than there are credits: each is kept
            answer = await gateway.complete(1)
            assert answer.json()["choices"][0] == {
                "index": 0, "text": "a", "logprobs": None, "finish_reason": "length",
            }  # fmt: skip
        assert decode.submits == []
        await until(lambda: len(prefill.aborts) == len(prefill.submits), what="every lease given up")
        assert gateway.idle()


async def test_a_role_that_changes_during_prefill_sends_the_decode_elsewhere(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill, first, _ = found = await workers(stack, "p0", "d0", "d1", p0=(Plan(tokens=1, hang=True),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        asking = asyncio.ensure_future(gateway.complete(TOKENS))
        await until(lambda: prefill.submits, what="the prefill")
        first.assign("prefill")
        views = gateway.running.fleet.views
        await until(lambda: sum(view.takes_decode for view in views()) == 1, what="news of the role")
        kv = pb.KvSource(worker_id="p0", address=prefill.worker.address, handle=b"blocks")
        event = pb.SequenceEvent(sequence=prefill.submits[0].sequence, prefilled=pb.Prefilled(kv=kv))
        prefill.send(pb.WorkerFrame(events=[event]))
        answer = await asking
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert [phases(worker) for worker in found] == [["prefill"], [], ["decode"]]


async def test_a_stream_survives_the_loss_of_its_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "p0", "d0", "d1", d0=(Plan(tokens=3, cut=True),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        body = {"model": "sim", "prompt": "hello", "max_tokens": TOKENS, "stream": True}
        async with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert text == expected_text(TOKENS)
        assert found[1].submits or found[2].submits


@pytest.mark.parametrize(
    "plan", [Plan(cut=True), Plan(abort=True), Plan(fail=pb.FAILURE_CODE_ENGINE)], ids=["lost", "aborted", "failed"]
)
async def test_a_complete_output_is_not_requested_again(open_gateway_over: Any, plan: Plan) -> None:
    """A worker would refuse a sequence that has all its tokens, and the client would be blamed for it."""
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", m0=(plan,))
        gateway = await stack.enter_async_context(open_gateway_over(found[0].worker))
        answer = await gateway.complete(TOKENS)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert len(found[0].submits) == 1
        assert gateway.events()[0].reroutes == 0
        await until(gateway.idle, what="an idle gateway")


async def test_only_the_newer_of_two_incarnations_of_a_worker_gets_work(open_gateway_over: Any) -> None:
    """The older one may still be connected, but work bound by its credits must not go to the newer."""
    hanging = (Plan(hang=True),) * 3
    async with AsyncExitStack() as stack:
        old, new = [await stack.enter_async_context(scripted_worker("m0", "mixed", plans=hanging)) for _ in range(2)]
        new.decode_credits = 1
        gateway = await stack.enter_async_context(open_gateway_over(old.worker))
        fleet = gateway.running.fleet
        await gateway.registry.announce(new.worker, lease_ms=1000)
        await until(lambda: sum(link.connected for link in fleet.links) == 2, what="both links")
        assert [view.decode_credits for view in fleet.views()] == [1]
        asking = [asyncio.ensure_future(gateway.complete(TOKENS)) for _ in range(2)]
        await until(lambda: new.submits and gateway.waiting == 1, what="one bound, one waiting")
        assert old.submits == []
        assert min(link.decode.free for link in fleet.links) == 0
        for request in asking:
            request.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


MALFORMED = {
    "tokens that are no whole numbers": pb.WorkerFrame(token_sequences=b"\1\0\0\0", token_ids=b"\1\0\0"),
    "tokens of nobody": pb.WorkerFrame(token_ids=b"\1\0\0\0"),
    "logprobs that are no whole numbers": pb.WorkerFrame(
        token_ids=b"\1\0\0\0", logprobs=[pb.TokenLogprobs(top_logprobs=b"\1")]
    ),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_worker_that_sends_garbage_is_disconnected_and_the_gateway_keeps_serving(
    open_gateway_over: Any, frame: pb.WorkerFrame
) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", m0=(Plan(tokens=3, hang=True),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: found[0].submits)
        found[0].send(frame)
        answer = await completion
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert found[0].streams == 2
        await until(gateway.idle, what="an idle gateway")


async def test_work_goes_to_workers_of_the_previous_release_and_not_to_one_that_is_too_new(
    open_gateway_over: Any,
) -> None:
    """A worker without a protocol field is of a release before the handshake."""
    async with AsyncExitStack() as stack:
        old, new = await workers(stack, "m0", "m1")
        gateway = await stack.enter_async_context(open_gateway_over(old.worker, new.worker))
        streams = new.streams
        new.worker.protocol, new.worker.oldest_protocol = PROTOCOL + 2, PROTOCOL + 1  # it returns upgraded
        new.cut()
        await until(lambda: new.streams > streams, what="a stream to the upgraded worker")
        answers = [await gateway.complete(4) for _ in range(4)]
        assert [each.status_code for each in answers] == [200] * 4
        assert len(old.submits) == 4 and not new.submits
        assert gateway.connected == {"m0"}
