"""Tests of a prompt that kills its workers: it kills at most two, and neighbouring requests are answered."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.bus.kafka_work import KafkaWork
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_REJECTED
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS
from libs.filestore.local import LocalFiles
from libs.testing.batch.jobs import answered, submit, unanswered, until_answered, write_lines
from libs.testing.suites.processes import gateway_metrics
from libs.testing.wait import until
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text, scripted_worker
from services.gateway.batch.run import BatchPorts
from services.gateway.link import WorkerLink

TOKENS = 12
POISON = "kills"
OTHER = "kills too"


def of(*prompts: str) -> Any:
    """Build a check of whether a submit is of one of these prompts; the sim model's tokens are bytes."""
    packed = {b"".join(byte.to_bytes(4, "little") for byte in prompt.encode()) for prompt in prompts}
    return lambda submit: submit.token_ids[: 4 * submit.prompt_tokens] in packed


@asynccontextmanager
async def cluster(open_gateway_over: Any, *names: str, dies: Any = None, **settings: Any) -> AsyncIterator[Any]:
    """A gateway over workers that die of POISON and OTHER: "p0" is a prefill worker, "d0" decode, "m0" mixed."""
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(scripted_worker(name, roles[name[0]])) for name in names]
        for worker in found:
            worker.dies = dies or of(POISON, OTHER)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found), **settings))
        yield gateway, found


def dead(workers: Sequence[ScriptedWorker]) -> int:
    return sum(worker.dead.is_set() for worker in workers)


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 422 and answer.json()["error"]["code"] == "poison_request"


MIXED = tuple(f"m{number}" for number in range(6))
SPLIT = ("p0", "p1", "p2", "d0", "d1", "d2")


@pytest.mark.parametrize("names", [MIXED, SPLIT], ids=["mixed", "split"])
async def test_two_workers_die_and_the_client_learns_the_reason(open_gateway_over: Any, names: tuple[str, ...]) -> None:
    async with cluster(open_gateway_over, *names) as (gateway, workers):
        answer = await gateway.complete(TOKENS, prompt=POISON)
        assert is_refused(answer)
        assert answer.headers["x-should-retry"] == "false"
        assert "2 workers" in answer.json()["error"]["message"]
        assert dead(workers) == 2
        (event,) = gateway.events()
        assert (event.outcome, event.error_code) == (OUTCOME_REJECTED, "poison_request")
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        await until(gateway.idle, what="an idle gateway")


async def test_the_same_prompt_is_refused_at_once_for_a_while(open_gateway_over: Any) -> None:
    async with cluster(open_gateway_over, *MIXED) as (gateway, workers):
        assert is_refused(await gateway.complete(TOKENS, prompt=POISON))
        submits = sum(len(worker.submits) for worker in workers)
        again = await asyncio.gather(
            gateway.complete(3, prompt=POISON, temperature=0.5, seed=7),
            gateway.complete(TOKENS, prompt=["hello", POISON]),
            gateway.complete(TOKENS, prompt=POISON, stream=True),
        )
        assert all(map(is_refused, again))
        assert sum(len(worker.submits) for worker in workers) == submits
        assert dead(workers) == 2
        metrics = await gateway_metrics(gateway.http, gateway.url)
        assert metrics["poison_prompts"] == 1
        assert metrics["poison_found_total"] == 1
        assert metrics["poison_refused_total"] == 3


async def test_the_prompt_is_tried_again_once_it_is_forgotten(open_gateway_over: Any) -> None:
    async with cluster(open_gateway_over, *MIXED, poison_s=0) as (gateway, workers):
        assert is_refused(await gateway.complete(TOKENS, prompt=POISON))
        for worker in workers:
            worker.dies = lambda _: False
        assert (await gateway.complete(TOKENS, prompt=POISON)).status_code == 200


@pytest.mark.parametrize("body", [{"prompt": POISON, "n": 3}, {"prompt": ["hello", "hi", POISON]}], ids=["n", "many"])
async def test_all_choices_of_a_request_count_as_one_prompt(open_gateway_over: Any, body: dict[str, Any]) -> None:
    async with cluster(open_gateway_over, *MIXED) as (gateway, workers):
        answer = await gateway.complete(TOKENS, **body)
        assert is_refused(answer)
        assert dead(workers) == 2
        await until(gateway.idle, what="an idle gateway")


@pytest.mark.parametrize("overdue", [False, True], ids=["in time", "overdue when it was sent there"])
async def test_a_stream_that_has_begun_ends_with_the_error(
    open_gateway_over: Any, monkeypatch: pytest.MonkeyPatch, overdue: bool
) -> None:
    """The prompt is harmless, but its third token kills the worker that generates it."""
    if overdue:  # a busy machine notices some workers late; their later messages show that they had lived
        counted_ms: dict[WorkerLink, float] = {}
        late = 1.5 * RESTING_SIGN_OF_LIFE_MS  # until it has work
        late_ms = property(lambda link: counted_ms.get(link, 0.0) if link.running else late, counted_ms.__setitem__)
        monkeypatch.setattr(WorkerLink, "silent_ms", late_ms, raising=False)
    async with cluster(open_gateway_over, *MIXED, dies=lambda _: False) as (gateway, found):
        for worker in found:
            worker.plans.extend((Plan(tokens=3, hang=True), Plan(tokens=1, hang=True)))
        completion = asyncio.create_task(gateway.complete(TOKENS, stream=True))
        for number in (1, 2):
            await until(lambda: [attempt.tokens >= 1 for attempt in attempts(gateway)] == [True], what="its tokens")
            (attempt,) = attempts(gateway)
            worker = next(worker for worker in found if worker.worker.id == attempt.worker[0])
            worker.dead.set()
            gone = worker.worker.id
            await until(lambda gone=gone: completion.done() or gone not in gateway.connected, what=f"death {number}")
        text = (await completion).text
        assert '"code":"poison_request"' in text and "data: [DONE]" not in text
        assert dead(found) == 2


def attempts(gateway: Any) -> list[Any]:
    return [attempt for _, attempt in gateway.running.dispatcher.attempts]


async def test_neighbours_of_the_prompt_are_answered_in_any_state(open_gateway_over: Any) -> None:
    """Four requests on each of its workers, all of them before their first token."""
    async with cluster(open_gateway_over, *MIXED) as (gateway, workers):
        completions = [
            asyncio.create_task(gateway.complete(TOKENS, prompt=f"innocent {number}")) for number in range(12)
        ]
        poison = asyncio.create_task(gateway.complete(TOKENS, prompt=POISON))
        completions += [
            asyncio.create_task(gateway.complete(TOKENS, prompt=f"harmless {number}")) for number in range(12)
        ]
        answers = await asyncio.gather(*completions)
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected_text(TOKENS)}
        assert is_refused(await poison)
        assert dead(workers) == 2


async def test_a_neighbour_in_prefill_on_both_workers_is_not_blamed(open_gateway_over: Any) -> None:
    """Each worker computes several prompts and dies of one; the others are retried one by one."""
    async with cluster(open_gateway_over, "p0", "p1", "p2", "d0") as (gateway, workers):
        prompts = [worker for worker in workers if worker.worker.id.startswith("p")]
        completions = [
            asyncio.create_task(gateway.complete(TOKENS, prompt=f"innocent {number}")) for number in range(9)
        ]
        poison = asyncio.create_task(gateway.complete(TOKENS, prompt=POISON))
        assert [answer.status_code for answer in await asyncio.gather(*completions)] == [200] * 9
        assert is_refused(await poison)
        assert dead(prompts) == 2


async def test_each_of_several_such_prompts_kills_two_workers(open_gateway_over: Any) -> None:
    async with cluster(open_gateway_over, *MIXED) as (gateway, workers):
        answers = await asyncio.gather(*(gateway.complete(TOKENS, prompt=prompt) for prompt in (POISON, OTHER)))
        assert all(map(is_refused, answers))
        assert dead(workers) <= 4
        assert (await gateway.complete(TOKENS)).status_code == 200


async def test_concurrent_clients_with_the_same_prompt_kill_two_workers_in_all(open_gateway_over: Any) -> None:
    async with cluster(open_gateway_over, *MIXED) as (gateway, workers):
        answers = await asyncio.gather(*(gateway.complete(TOKENS, prompt=POISON) for _ in range(12)))
        assert all(map(is_refused, answers))
        assert dead(workers) == 2
        await until(gateway.idle, what="an idle gateway")


async def test_a_prompt_that_was_computed_lately_goes_to_all_workers_at_once(open_gateway_over: Any) -> None:
    async with cluster(open_gateway_over, *MIXED, dies=lambda _: False) as (gateway, workers):
        assert (await gateway.complete(TOKENS)).status_code == 200
        for worker in workers:
            worker.submits.clear()
            worker.plans.extend([Plan(tokens=0, hang=True)] * 12)
        completions = [asyncio.create_task(gateway.complete(TOKENS)) for _ in range(12)]
        await until(lambda: sum(len(worker.submits) for worker in workers) == 12, what="all of them on workers")
        for each in completions:
            each.cancel()
        await asyncio.gather(*completions, return_exceptions=True)


async def test_a_client_that_leaves_and_retries_kills_no_more_workers(open_gateway_over: Any) -> None:
    async with cluster(open_gateway_over, "m0", no_workers_wait_ms=300) as (gateway, first):
        assert (await gateway.complete(TOKENS, prompt=POISON)).status_code == 503
        async with scripted_worker("m1", "mixed") as second, scripted_worker("m2", "mixed") as third:
            second.dies = third.dies = of(POISON)
            for worker in (second, third):
                await gateway.registry.announce(worker.worker, lease_ms=60_000)
            await until(lambda: gateway.connected == {"m1", "m2"})
            assert is_refused(await gateway.complete(TOKENS, prompt=POISON))
            assert dead([*first, second, third]) == 2


async def test_workers_that_break_a_stream_and_return_do_not_count_as_killed(open_gateway_over: Any) -> None:
    plan = (Plan(tokens=0, cut=True),)
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(scripted_worker(name, "mixed", plans=plan)) for name in MIXED]
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        assert (await gateway.complete(TOKENS)).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert (await gateway.complete(TOKENS)).status_code == 200


async def test_workers_that_drain_and_end_do_not_count_as_killed(open_gateway_over: Any) -> None:
    """A rolling restart ends requests at their deadline."""
    hangs = (Plan(tokens=0, hang=True),)
    async with AsyncExitStack() as stack:
        names = ("m0", "m1", "m2")
        found = [await stack.enter_async_context(scripted_worker(name, "mixed", plans=hangs)) for name in names]
        found.append(await stack.enter_async_context(scripted_worker("m3", "mixed")))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        found[3].assign("standby")
        await until(lambda: sum(link.takes(pb.PHASE_BOTH) for link in gateway.running.fleet.links) == 3)
        completion = asyncio.create_task(gateway.complete(TOKENS))
        for number in range(3):
            await until(lambda number=number: sum(bool(each.submits) for each in found) == number + 1, what="a worker")
            if number == 2:
                found[3].assign("mixed")
                await until(lambda: any(link.id == "m3" and link.serving for link in gateway.running.fleet.links))
            worker = next(each for each in found if each.submits and not each.dead.is_set())
            worker.worker.state = common.WORKER_STATE_DRAINING
            worker.send(pb.WorkerFrame(worker=worker.worker))
            await until(lambda worker=worker: all(not (k.id == worker.worker.id and k.serving) for k in links(gateway)))
            worker.dead.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)


def links(gateway: Any) -> list[Any]:
    return list(gateway.running.fleet.links)


async def test_a_batch_line_kills_two_workers_in_all_and_its_error_says_so(
    work: KafkaWork, cluster: str, tmp_path: Path, open_gateway_over: Any
) -> None:
    lines, bad = 30, 7
    batch_ports = BatchPorts(work, LocalFiles(tmp_path / "files", max_bytes=10**7))
    write_lines(tmp_path / "lines.jsonl", lines, max_tokens=2)
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(scripted_worker(name, "mixed")) for name in MIXED]
        for worker in found:
            worker.dies = lambda each: each.request_id.startswith("batch_") and each.request_id.endswith(f"-{bad}")
        gateway = await stack.enter_async_context(
            open_gateway_over(*(each.worker for each in found), batch=batch_ports, cluster=cluster)
        )
        batch_id = await submit(gateway.http, gateway.url, tmp_path / "lines.jsonl")
        batch = await until_answered(gateway.http, [gateway.url], batch_id)
        assert batch["request_counts"] == {"total": lines, "completed": lines - 1, "failed": 1}
        assert not list(unanswered(await answered(gateway.http, gateway.url, batch), lines))
        errors = (await gateway.http.get(f"/v1/files/{batch['error_file_id']}/content")).text
        error = json.loads(errors.splitlines()[0])
        assert (error["custom_id"], error["error"]["code"]) == (f"line-{bad}", "poison_request")
        assert dead(found) == 2
