"""Tests of clients that leave, stall or exceed the queue, and of absent workers."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_CLIENT_GONE, OUTCOME_OK, GatewayQueues
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.testing.wait import until
from libs.testing.workers.hosts import LocalWorker, local_worker
from libs.testing.workers.scripted import Plan, expected_text, scripted_worker
from services.gateway.link import MAX_SUBMIT_BYTES
from services.gateway.run import drain

AT_ONCE_S = 5.0
"""Well under the KV lease of 30 s, which would free what nobody ends; a busy machine may need more than one."""


async def connect(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent its request and reads only if told to."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
    payload = json.dumps({"model": "sim", "prompt": "hello", **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def registration(worker: LocalWorker) -> Worker:
    """Return the worker's registration."""
    await until(lambda: worker.registry.seen, what="a registration")
    return worker.registry.seen[-1]


STAGES = {
    "waiting": (0, (), ()),
    "in prefill": (4, (Plan(tokens=0, hang=True),) * 2, ()),
    "between first and second token": (4, (), (Plan(tokens=0, hang=True),) * 2),
    "in decode": (4, (), (Plan(tokens=3, hang=True),) * 2),
}


@pytest.mark.parametrize(("slots", "prefill_plans", "decode_plans"), STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_frees_its_sequences_at_once(
    open_gateway_over: Any, slots: int, prefill_plans: Any, decode_plans: Any, stream: bool
) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(scripted_worker("p0", "prefill", slots=slots, plans=prefill_plans))
        decode = await stack.enter_async_context(scripted_worker("d0", "decode", slots=slots, plans=decode_plans))
        gateway = await stack.enter_async_context(open_gateway_over(prefill.worker, decode.worker))
        _, writer = await connect(gateway.url, {"stream": stream, "n": 2})
        started = len(prefill_plans) + len(decode_plans)
        await until(lambda: gateway.live == 2 and len(prefill.submits + decode.submits) >= started)
        writer.close()
        await until(gateway.idle, timeout_s=AT_ONCE_S, what="an idle gateway")
        alive = [submit.sequence for submit in prefill.submits[: len(prefill_plans)]]
        await until(lambda: set(alive) <= set(prefill.aborts), timeout_s=AT_ONCE_S, what="the abort in prefill")
        alive = [submit.sequence for submit in decode.submits[: len(decode_plans)]]
        await until(lambda: set(alive) <= set(decode.aborts), timeout_s=AT_ONCE_S, what="the abort in decode")
        gone = [event for event in gateway.events() if event.outcome == OUTCOME_CLIENT_GONE]
        assert gone
        assert len(gateway.events()) == 2


async def test_real_workers_hold_nothing_after_their_clients_left(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        slow = {"sim_speedup": 1.0}
        prefill = await stack.enter_async_context(local_worker("p0", "prefill", **slow))
        decode = await stack.enter_async_context(local_worker("d0", "decode", **slow))
        registered = [await registration(worker) for worker in (prefill, decode)]
        gateway = await stack.enter_async_context(open_gateway_over(*registered))
        clients = [await connect(gateway.url, {"stream": True, "max_tokens": 4000}) for _ in range(6)]
        await until(lambda: decode.host.integrity().live_sequences > 1, what="running decodes")
        for _, writer in clients:
            writer.close()

        def empty() -> bool:
            found = [worker.host.integrity() for worker in (prefill, decode)]
            return all(i.live_sequences + i.leased_handles + i.referenced_blocks == 0 for i in found)

        await until(empty, timeout_s=AT_ONCE_S, what="workers that hold nothing")
        await until(gateway.idle, what="an idle gateway")


async def test_a_stop_string_ends_the_sequence_on_its_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(scripted_worker("p0", "prefill"))
        decode = await stack.enter_async_context(scripted_worker("d0", "decode", plans=(Plan(tokens=10, hang=True),)))
        gateway = await stack.enter_async_context(open_gateway_over(prefill.worker, decode.worker))
        answer = await gateway.complete(100, stop=["fgh", "zz"])
        assert answer.json()["choices"][0]["text"] == "abcde"
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["usage"]["completion_tokens"] == len("abcdefgh")
        await until(lambda: decode.aborts == [decode.submits[0].sequence], timeout_s=AT_ONCE_S, what="the abort")
        await until(gateway.idle, what="an idle gateway")


async def test_a_client_that_reads_nothing_does_not_slow_others_and_receives_everything_later(
    open_gateway_over: Any,
) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(n, r)) for n, r in (("m0", "mixed"),)]
        gateway = await stack.enter_async_context(open_gateway_over(workers[0].worker))
        reader, writer = await connect(gateway.url, {"stream": True, "max_tokens": 8000})
        await until(gateway.events, what="the end of its sequence")
        answer = await gateway.complete(5)
        assert answer.json()["choices"][0]["text"] == expected_text(5)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += await asyncio.wait_for(reader.read(65536), 10)
        chunks = [json.loads(line[6:]) for line in received.decode().split("\n") if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(8000)
        writer.close()
        await until(gateway.idle)


async def test_the_queue_is_bounded_and_a_refusal_has_a_retry_after(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(scripted_worker("m0", "mixed", slots=0))
        gateway = await stack.enter_async_context(open_gateway_over(worker.worker, max_waiting=2))
        held = [asyncio.ensure_future(gateway.complete(5)) for _ in range(2)]
        await until(lambda: gateway.waiting == 2)
        answer = await gateway.complete(5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        await until(lambda: worker.demands and worker.demands[-1].waiting == 2, what="the demand")
        assert worker.demands[-1].waiting_tokens == 2 * len("hello")
        assert worker.demands[-1].head_deadline_unix_ns > 0
        worker.send(pb.WorkerFrame(credit=pb.Credit(decode_grant=2)))
        assert [(await each).json()["choices"][0]["text"] for each in held] == [expected_text(5)] * 2
        await until(lambda: worker.demands[-1].waiting == 0, what="an end of the demand")
        await until(gateway.idle, what="an idle gateway")


async def test_a_wait_in_the_queue_times_out(open_gateway_over: Any) -> None:
    async with (
        scripted_worker("m0", "mixed", slots=0) as worker,
        open_gateway_over(worker.worker, max_wait_ms=100) as gateway,
    ):
        answer = await gateway.complete(5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        await until(gateway.idle, what="an idle gateway")


async def test_a_gateway_without_workers_answers_503_with_a_retry_after(open_gateway_over: Any) -> None:
    async with open_gateway_over(no_workers_wait_ms=100) as gateway:
        ready = await gateway.http.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        answer = await gateway.complete(5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
        assert answer.headers["retry-after"] == "1"
        await until(gateway.idle, what="an idle gateway")


async def test_requests_refused_early_are_published_by_status_and_code(open_gateway_over: Any) -> None:
    async with open_gateway_over() as gateway:
        assert (await gateway.complete(4, model="absent")).status_code == 404
        parts = urlsplit(gateway.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"POST /v1/completions HTTP/9.9\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 ")
        writer.close()

        def published() -> list[tuple[int, dict[tuple[int, str], int]]]:
            queues = [value for value in gateway.bus.published if isinstance(value, GatewayQueues)]
            return [(each.posts, {(row.status, row.code): row.count for row in each.refused}) for each in queues]

        await until(lambda: any(posts == 2 and len(rows) == 2 for posts, rows in published()), what="both refusals")
        assert published()[-1][1][404, "model_not_found"] == 1


async def test_requests_survive_a_restart_of_the_only_worker(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(open_gateway_over())
        async with scripted_worker("m0", "mixed", plans=(Plan(tokens=3, hang=True),)) as old:
            await gateway.registry.announce(old.worker, lease_ms=1000)
            await until(lambda: gateway.connected == {"m0"})
            asking = asyncio.ensure_future(gateway.complete(9))
            await until(lambda: old.submits, what="the submit")
        await until(lambda: not gateway.connected, what="the loss")
        new = await stack.enter_async_context(scripted_worker("m0", "mixed"))
        await gateway.registry.announce(new.worker, lease_ms=1000)
        assert (await asking).json()["choices"][0]["text"] == expected_text(9)
        assert len(list(gateway.running.fleet.links)) == 1  # the old incarnation is forgotten
        await until(gateway.idle, what="an idle gateway")


async def test_a_worker_missing_from_the_registry_serves_until_its_stream_breaks(open_gateway_over: Any) -> None:
    async with scripted_worker("m0", "mixed") as worker, open_gateway_over(worker.worker) as gateway:
        await gateway.registry.withdraw("m0", worker.worker.incarnation)
        assert (await gateway.complete(5)).status_code == 200
        worker.cut()
        await until(lambda: not list(gateway.running.fleet.links), what="the link given up")
        await until(gateway.idle)


async def test_a_broken_stream_reconnects(open_gateway_over: Any) -> None:
    async with scripted_worker("m0", "mixed") as worker, open_gateway_over(worker.worker) as gateway:
        worker.cut()
        await until(lambda: worker.streams == 2 and gateway.connected, what="a second stream")
        assert (await gateway.complete(5)).json()["choices"][0]["text"] == expected_text(5)
        await until(gateway.idle, what="an idle gateway")


async def test_recalled_credits_are_returned(open_gateway_over: Any) -> None:
    async with scripted_worker("m0", "mixed", slots=3) as worker, open_gateway_over(worker.worker) as gateway:
        (link,) = gateway.running.fleet.links
        worker.send(pb.WorkerFrame(credit=pb.Credit(decode_recall=2)))
        await until(lambda: link.decode.free == 1, what="the return")
        assert (await gateway.complete(5)).status_code == 200
        await until(gateway.idle, what="an idle gateway")


async def test_two_gateways_alternate_on_shared_workers(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(local_worker("p0", "prefill"))
        decode = await stack.enter_async_context(local_worker("d0", "decode", max_sequences=2))
        registered = [await registration(worker) for worker in (prefill, decode)]
        gateways = [await stack.enter_async_context(open_gateway_over(*registered, id=f"g{i}")) for i in range(2)]
        completions = [gateways[i % 2].complete(20, seed=i // 2) for i in range(24)]
        answers = [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*completions)]
        assert answers[0::2] == answers[1::2]  # a seed's text is the same on any worker
        await until(lambda: all(gateway.idle() for gateway in gateways), what="idle gateways")


async def test_a_prompt_goes_where_its_prefix_is_cached(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        names = ("p0", "p1", "p2")
        prefills = [await stack.enter_async_context(scripted_worker(name, "prefill")) for name in names]
        decode = await stack.enter_async_context(scripted_worker("d0", "decode"))
        workers = [worker.worker for worker in (*prefills, decode)]
        gateway = await stack.enter_async_context(open_gateway_over(*workers, held={"p1": 20, "p2": 60}))
        for _ in range(3):
            assert (await gateway.complete(5, prompt="x" * 1024)).status_code == 200
        assert [len(worker.submits) for worker in prefills] == [0, 0, 3]
        before = gateway.index.look_ups
        await gateway.complete(5, prompt=["a" * 1024, "b" * 1024, "c" * 1024])
        assert gateway.index.look_ups == before + 1  # one round trip for all that arrive together


async def test_submits_that_exceed_one_frame_follow_in_the_next(open_gateway_over: Any) -> None:
    prompt = [7] * 7000  # 28 kB packed: these together are above the bound of a frame, and of a gRPC message
    count = 2 * MAX_SUBMIT_BYTES // (4 * len(prompt))
    async with scripted_worker("m0", "mixed", slots=count) as worker, open_gateway_over(worker.worker) as gateway:
        (link,) = gateway.running.fleet.links
        completions = [gateway.complete(3, prompt=[prompt] * 100, n=1) for _ in range(count // 100)]
        answers = await asyncio.gather(*completions)
        assert {choice["text"] for answer in answers for choice in answer.json()["choices"]} == {"abc"}
        assert link.connected
        assert worker.streams == 1
        await until(gateway.idle, what="an idle gateway")


async def test_headers_are_passed_to_workers_and_into_events(open_gateway_over: Any) -> None:
    async with scripted_worker("m0", "mixed") as worker, open_gateway_over(worker.worker, id="g7") as gateway:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {
            "x-request-id": "my-id", "x-fulcrum-tenant": "acme", "x-fulcrum-class": "batch", "traceparent": trace,
            "x-fulcrum-ttft-deadline-ms": "250", "x-fulcrum-tpot-target-ms": "12.5", "x-fulcrum-details": "1",
        }  # fmt: skip
        body = {"model": "sim", "prompt": "hello", "max_tokens": 3}
        answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "my-id"
        served = answer.json()["fulcrum"]
        assert (served["prefill_worker"], served["decode_worker"]) == ("m0", "m0")
        assert served["ttft_ms"] > 0
        context = worker.submits[0].context
        assert (context.tenant, context.service_class, context.gateway_id) == ("acme", "batch", "g7")
        assert context.traceparent == trace
        assert context.ttft_deadline_unix_ns - context.arrival_unix_ns == 250_000_000
        assert context.tpot_target_us == 12_500
        (event,) = gateway.events()
        assert (event.request_id, event.tenant, event.traceparent) == ("my-id", "acme", trace)
        assert event.outcome == OUTCOME_OK
        assert (event.prompt_tokens, event.output_tokens, event.finish_reason) == (5, 3, "length")
        assert 0 < event.queue_ns < event.ttft_ns


async def test_a_stop_gives_requests_a_bounded_time_and_answers_the_rest(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(scripted_worker("m0", "mixed", plans=(Plan(tokens=2, hang=True),) * 2))
        gateway = await stack.enter_async_context(open_gateway_over(worker.worker))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
        body = {"model": "sim", "prompt": "x", "max_tokens": 3}
        ended, cut = [asyncio.ensure_future(http.post(f"{gateway.url}/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: len(worker.submits) == 2 and gateway.live == 2)
        draining = asyncio.ensure_future(drain(gateway.running.dispatcher, 1))
        refused = await http.post(f"{gateway.url}/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
        sequence = worker.submits[0].sequence
        reason = pb.Finished(reason=pb.FINISH_REASON_STOP)
        worker.send(pb.WorkerFrame(events=[pb.SequenceEvent(sequence=sequence, finished=reason)]))
        answers = [await ended, await cut]
        await draining
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        assert gateway.live == 0


async def test_requests_wait_a_bounded_time_for_the_last_worker_of_a_role_and_continue_with_a_new_one(
    open_gateway_over: Any,
) -> None:
    """The queue fills, refuses with a message, waits time out, and open streams end with an error."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(scripted_worker("p0", "prefill"))
        gateway = await stack.enter_async_context(
            open_gateway_over(prefill.worker, max_waiting=3, no_workers_wait_ms=300)
        )
        async with scripted_worker("d0", "decode", plans=(Plan(tokens=3, hang=True),)) as decode:
            await gateway.registry.announce(decode.worker, lease_ms=1000)
            await until(lambda: gateway.connected == {"p0", "d0"}, what="both links")
            reader, writer = await connect(gateway.url, {"stream": True, "max_tokens": 9})
            await until(lambda: decode.submits, what="an open stream")
            await gateway.registry.withdraw("d0", decode.worker.incarnation)
        await until(lambda: gateway.connected == {"p0"}, what="the loss")
        asking = [asyncio.ensure_future(gateway.complete(5)) for _ in range(6)]
        received = (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)).decode()
        events = [json.loads(line[6:]) for line in received.split("\n") if line.startswith("data: ")]
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected_text(4)
        assert events[-1]["error"]["code"] == "no_workers"
        answers = [await each for each in asking]
        assert {answer.status_code for answer in answers} == {429, 503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert {answer.json()["error"]["code"] for answer in answers} == {"queue_full", "no_workers"}
        await until(gateway.idle, what="an idle gateway")
        writer.close()

        patient = asyncio.ensure_future(gateway.complete(5))
        await until(lambda: gateway.waiting == 1, what="one that waits")
        new = await stack.enter_async_context(scripted_worker("d1", "decode"))
        await gateway.registry.announce(new.worker, lease_ms=1000)
        assert (await patient).json()["choices"][0]["text"] == expected_text(5)
        await until(gateway.idle, what="an idle gateway")


async def test_the_loss_of_the_last_prefill_worker_ends_only_the_prompts_it_was_computing(
    open_gateway_over: Any,
) -> None:
    async with AsyncExitStack() as stack:
        plans = (Plan(), Plan(tokens=0, hang=True))
        decode = await stack.enter_async_context(scripted_worker("d0", "decode", plans=(Plan(tokens=3, hang=True),)))
        gateway = await stack.enter_async_context(open_gateway_over(decode.worker, no_workers_wait_ms=300))
        async with scripted_worker("p0", "prefill", plans=plans) as prefill:
            await gateway.registry.announce(prefill.worker, lease_ms=1000)
            await until(lambda: gateway.connected == {"p0", "d0"}, what="both links")
            decoding = asyncio.ensure_future(gateway.complete(5))
            await until(lambda: decode.submits, what="one that is past its prompt")
            prefilling = asyncio.ensure_future(gateway.complete(5))
            await until(lambda: len(prefill.submits) == 2, what="one in its prompt")
            await gateway.registry.withdraw("p0", prefill.worker.incarnation)
        waiting = asyncio.ensure_future(gateway.complete(5))
        for reported in (await prefilling, await waiting):
            assert (reported.status_code, reported.json()["error"]["code"]) == (503, "no_workers")
            assert int(reported.headers["retry-after"]) >= 1
        assert not decoding.done()
        sequence = decode.submits[0].sequence
        event = pb.SequenceEvent(sequence=sequence, finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))
        last = pb.WorkerFrame(token_sequences=pack_u32([sequence]), token_ids=pack_u32([ord("e")]), events=[event])
        decode.send(last)
        assert (await decoding).json()["choices"][0]["text"] == expected_text(5)
        await until(gateway.idle, what="an idle gateway")
