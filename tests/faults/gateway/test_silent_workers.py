"""Tests of scripted workers that fall silent while their connection stands."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.gateway.view import SILENT_MS
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text, scripted_worker
from services.gateway.fleet import MAX_COUNTED_MS, SilenceWatch

pytestmark = pytest.mark.alone

TOKENS = 12
STAGES = {
    "in prefill": ("p0", {"p0": (Plan(tokens=0, hang=True),)}),
    "in prefill, while its blocks are pulled": ("p0", {"p0": (Plan(tokens=0, opens=True, hang=True),)}),
    "after prefill, while its blocks are pulled": ("p0", {"d0": (Plan(tokens=0, hang=True),)}),
    "in decode, before its first token": ("d0", {"d0": (Plan(tokens=0, hang=True),)}),
    "in decode, in mid-stream": ("d0", {"d0": (Plan(tokens=4, hang=True),)}),
}


async def workers(stack: AsyncExitStack, *names: str, **plans: tuple[Plan, ...]) -> dict[str, ScriptedWorker]:
    """ "p0" is a prefill worker, "d0" decode, "m0" mixed; `plans` by name."""
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    return {
        name: await stack.enter_async_context(scripted_worker(name, roles[name[0]], plans=plans.get(name, ())))
        for name in names
    }


@pytest.mark.parametrize(("silent", "plans"), STAGES.values(), ids=STAGES.keys())
async def test_a_silent_worker_is_routed_around_and_used_again_once_it_answers(
    open_gateway_over: Any, silent: str, plans: dict[str, tuple[Plan, ...]]
) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "p0", "p1", "d0", "d1", **plans)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found.values())))
        asking = asyncio.ensure_future(gateway.complete(TOKENS))
        planned = found[next(iter(plans))]
        await until(lambda: planned.submits and not planned.plans, what="the work that hangs")
        worker = found[silent]
        worker.voice.clear()
        answer = await asyncio.wait_for(asking, 5)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        assert silent not in gateway.connected
        assert (await gateway.complete(TOKENS)).status_code == 200  # new work goes to the others
        await until(gateway.idle, what="an idle gateway")

        worker.voice.set()
        await until(lambda: silent in gateway.connected, what="the worker's return")
        assert worker.streams > 1
        before = len(worker.submits)
        answers = await asyncio.gather(*(gateway.complete(TOKENS) for _ in range(6)))
        assert {each.json()["choices"][0]["text"] for each in answers} == {expected_text(TOKENS)}
        assert len(worker.submits) > before


@pytest.mark.parametrize("names", [("m0",), ("p0", "d0"), ("p0", "d0", "d1")], ids=str)
async def test_requests_wait_for_the_last_worker_of_a_role(open_gateway_over: Any, names: tuple[str, ...]) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, *names)
        last = found[names[0]]
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found.values())))
        last.voice.clear()
        (link,) = [link for link in gateway.running.fleet.links if link.id == names[0]]
        await until(lambda: link.silent_ms > 2 * SILENT_MS, what="a long silence")
        asking = asyncio.ensure_future(gateway.complete(TOKENS))
        await until(lambda: last.submits, what="work on its way")
        assert link.connected
        last.voice.set()
        assert (await asking).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert last.streams == 1
        assert (await gateway.http.get("/metrics")).text.count("fulcrum_gateway_silences_total 0.0") == 1


@pytest.mark.parametrize("names", [("m0",), ("p0", "d0")], ids=str)
async def test_the_wait_for_the_last_worker_of_a_role_is_bounded(
    open_gateway_over: Any, names: tuple[str, ...]
) -> None:
    """Its loop is stuck, while gRPC's own threads still answer pings."""
    async with AsyncExitStack() as stack:
        plans = {names[-1]: (Plan(tokens=4, hang=True),)}
        found = await workers(stack, *names, **plans)
        gateway = await stack.enter_async_context(
            open_gateway_over(
                *(each.worker for each in found.values()), max_silent_ms=600, no_workers_wait_ms=300, max_waiting=2
            )
        )
        last = found[names[-1]]
        stream = asyncio.ensure_future(gateway.complete(TOKENS, stream=True))
        await until(lambda: last.submits and not last.plans, what="a stream that hangs")
        last.voice.clear()
        asking = asyncio.ensure_future(gateway.complete(TOKENS))
        reported = (await asyncio.wait_for(stream, 5)).text
        assert expected_text(1) in reported and '"no_workers"' in reported
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await gateway.complete(TOKENS)).status_code == 503
        await until(gateway.idle, what="an idle gateway")

        last.voice.set()
        await until(lambda: names[-1] in gateway.connected, what="the worker's return")
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)


async def test_new_work_goes_elsewhere_before_a_worker_counts_as_silent(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", "m1")
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found.values())))
        fleet = gateway.running.fleet
        found["m0"].voice.clear()
        await until(lambda: fleet.quiet == {"m0"}, what="news of a silence")
        assert "m0" in gateway.connected
        assert (await gateway.complete(TOKENS)).status_code == 200
        assert [len(each.submits) for each in found.values()] == [0, 1]


async def test_a_gateway_that_was_itself_delayed_blames_no_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", "m1")
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found.values())))
        watch = SilenceWatch(gateway.running.fleet, gateway.running.metrics)
        before = max(link.silent_ms for link in gateway.running.fleet.links)
        watch.tick(60_000)
        assert all(link.silent_ms <= before + MAX_COUNTED_MS for link in gateway.running.fleet.links)
        assert gateway.connected == {"m0", "m1"}


MALFORMED = {
    "a token cut short": pb.WorkerFrame(token_sequences=b"\1\0\0\0", token_ids=b"\1\0"),
    "a sequence id cut short": pb.WorkerFrame(token_sequences=b"\1", token_ids=b"\1\0\0\0"),
    "a token for no sequence": pb.WorkerFrame(token_ids=b"\1\0\0\0"),
    "logprobs cut short": pb.WorkerFrame(
        token_sequences=b"\1\0\0\0", token_ids=b"\1\0\0\0", logprobs=[pb.TokenLogprobs(top_ids=b"\1\0\0")]
    ),
    "logprobs that do not pair": pb.WorkerFrame(
        token_sequences=b"\1\0\0\0", token_ids=b"\1\0\0\0", logprobs=[pb.TokenLogprobs(top_ids=b"\1\0\0\0")]
    ),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_frame_closes_the_stream_of_its_worker_and_affects_no_other(
    open_gateway_over: Any, frame: pb.WorkerFrame
) -> None:
    async with AsyncExitStack() as stack:
        found = await workers(stack, "m0", "m1", m0=(Plan(tokens=2, hang=True),), m1=(Plan(tokens=2, hang=True),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found.values())))
        asking = asyncio.ensure_future(gateway.complete(TOKENS))
        await until(lambda: found["m0"].submits, what="work at the worker")
        found["m0"].send(frame)
        await until(lambda: found["m0"].streams == 2 and "m0" in gateway.connected, what="a new stream")
        await until(lambda: found["m1"].submits or len(found["m0"].submits) > 1, what="the work elsewhere")
        found["m1"].cut()
        assert (await asking).json()["choices"][0]["text"] == expected_text(TOKENS)
        await until(gateway.idle, what="an idle gateway")
