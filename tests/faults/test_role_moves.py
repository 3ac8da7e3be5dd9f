"""Tests of workers that change roles under load: nothing is aborted, and no token is lost, repeated or changed."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_CLIENT_GONE, OUTCOME_OK
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.local import LocalEngine
from libs.policy.gateway import placement
from libs.testing.suites.role_moves import RoleChanger, SteadyTraffic, open_admins, request_bodies
from libs.testing.wait import until
from libs.testing.workers.hosts import TOKEN, LocalWorker, local_worker
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text, scripted_worker

TOKENS = 12
LEAVES = Plan(leaves=True, tokens=4)


# ---------------------------------------------------------------- one choice that moves, by script


async def scripted(stack: AsyncExitStack, **plans: tuple[Plan, ...]) -> list[ScriptedWorker]:
    """p0 prefills; d0 and d1 decode, and d0 leaves that role as soon as it has a request."""
    return [
        await stack.enter_async_context(
            scripted_worker(name, "prefill" if name == "p0" else "decode", plans=plans.get(name, ()))
        )
        for name in ("p0", "d0", "d1")
    ]


@pytest.mark.parametrize(
    ("second", "moves", "reroutes"),
    [
        ((), 1, 0),
        ((Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE),), 1, 1),
        ((Plan(refuse=pb.REFUSAL_CODE_KV_MISMATCH),), 1, 1),
        ((Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),), 1, 1),
        ((Plan(tokens=0, cut=True),), 1, 1),
        ((Plan(tokens=3, cut=True),), 1, 1),
    ],
    ids=["well", "refused", "mismatch", "blocks lost", "target lost while pulling", "target lost later"],
)
async def test_a_choice_that_moves_is_complete_whatever_fails(
    open_gateway_over: Any, second: tuple[Plan, ...], moves: int, reroutes: int
) -> None:
    async with AsyncExitStack() as stack:
        prefill, first, other = found = await scripted(stack, d0=(LEAVES,), d1=second)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        answer = await completion
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        (event,) = gateway.events()
        assert (event.outcome, event.moves, event.reroutes) == (OUTCOME_OK, moves, reroutes)
        assert first.hand_overs == [first.submits[0].sequence]
        assert other.submits[0].kv.worker_id == "d0"
        assert prefill.aborts == []  # the leases of blocks that were pulled have ended
        await until(gateway.idle, what="an idle gateway")


@pytest.mark.parametrize(
    ("min_tokens", "stops", "text"),
    [(3, ["c"], expected_text(TOKENS)), (3, ["f"], "abcde"), (6, ["e", "f", "h"], "abcdefg"), (6, ["fg"], "abcde")],
)
async def test_min_tokens_count_over_both_workers_of_a_choice_that_moves(
    open_gateway_over: Any, min_tokens: int, stops: list[str], text: str
) -> None:
    async with AsyncExitStack() as stack:
        found = await scripted(stack, d0=(LEAVES,))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        answer = await gateway.complete(TOKENS, min_tokens=min_tokens, stop=stops)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text
        (event,) = gateway.events()
        assert (event.outcome, event.moves) == (OUTCOME_OK, 1)
        await until(gateway.idle, what="an idle gateway")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("code", [pb.REFUSAL_CODE_STALE_ROLE, pb.REFUSAL_CODE_DRAINING])
async def test_a_choice_that_repeatedly_meets_changed_roles_does_not_fail(
    open_gateway_over: Any, role: str, code: pb.RefusalCode
) -> None:
    async with AsyncExitStack() as stack:
        refusals = (Plan(refuse=code),) * 10
        prefill = await stack.enter_async_context(
            scripted_worker("p0", "prefill", plans=refusals if role == "prefill" else ())
        )
        decode = await stack.enter_async_context(
            scripted_worker("d0", "decode", plans=refusals if role == "decode" else ())
        )
        gateway = await stack.enter_async_context(open_gateway_over(prefill.worker, decode.worker, max_reroutes=0))
        answer = await gateway.complete(TOKENS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        assert len((prefill if role == "prefill" else decode).submits) == 11
        assert gateway.events()[0].recomputes == 0  # available blocks wait for the next decode worker
        shown = (await gateway.http.get("/metrics")).text
        assert 'fulcrum_gateway_bounces_total{model="sim"} 10.0' in shown
        assert 'fulcrum_gateway_reroutes_total{model="sim"} 0.0' in shown
        await until(gateway.idle, what="an idle gateway")


async def test_a_role_change_of_the_chosen_worker_is_no_failure(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        _, first, other = found = await scripted(stack, d0=(LEAVES,))
        first.in_step = True
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found), max_reroutes=0))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.hand_overs, what="the word to hand over")
        other.assign("prefill")
        await until(lambda: other.epochs[-1:] == [2], what="news of the place's other role")
        first.end_step()
        await until(lambda: gateway.events() or gateway.live == gateway.waiting == 1, what="a choice that waits")
        other.assign("decode")
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        await until(gateway.idle, what="an idle gateway")


async def test_a_worker_that_refuses_for_its_role_without_end_counts_as_failed(
    open_gateway_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MAX_STALE_ROLE_RETRIES", 3)
    refusals = (Plan(refuse=pb.REFUSAL_CODE_STALE_ROLE),) * 10
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(scripted_worker("m0", "mixed", plans=refusals))
        gateway = await stack.enter_async_context(open_gateway_over(worker.worker, max_reroutes=2))
        answer = await gateway.complete(TOKENS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sequence_failed")
        assert len(worker.submits) == 1 + 3 + 2
        await until(gateway.idle, what="an idle gateway")


async def load(gateway: Any, worker: ScriptedWorker) -> None:
    """Make a worker report more load than others, and wait until the gateway knows."""
    worker.send(pb.WorkerFrame(load=common.Load(waiting=9)))
    await until(lambda: any(view.load == 9 for view in gateway.running.fleet.views()), what="news of its load")


async def test_missing_blocks_of_a_moved_choice_are_not_blamed_on_its_prefill_worker(
    open_gateway_over: Any,
) -> None:
    """The same worker computes it again, as its part of the prompt is cached there."""
    async with AsyncExitStack() as stack:
        lost = (Plan(tokens=0, fail=pb.FAILURE_CODE_KV_LOST),)
        prefill, first, other = await scripted(stack, d0=(LEAVES,), d1=lost)
        second = await stack.enter_async_context(scripted_worker("p1", "prefill"))
        found = (prefill, first, other, second)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        await load(gateway, second)
        answer = await gateway.complete(TOKENS)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        # d0 prefills by now, and is the one to avoid; of the others p1 has more load.
        assert [len(each.submits) for each in (prefill, second, first)] == [2, 0, 1]
        await until(gateway.idle, what="an idle gateway")


async def test_a_choice_does_not_move_to_a_worker_that_failed_it(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        failed = (Plan(tokens=2, fail=pb.FAILURE_CODE_ENGINE),)
        prefill, first, other = await scripted(stack, d0=failed, d1=(LEAVES,))
        last = await stack.enter_async_context(scripted_worker("d2", "decode"))
        found = (prefill, first, other, last)
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        await load(gateway, last)
        answer = await gateway.complete(TOKENS)
        assert answer.json()["choices"][0]["text"] == expected_text(TOKENS)
        # After its failure at d0 it ran at d1 and moved from there, not back to d0, which has less load than d2.
        assert [len(each.submits) for each in (first, other, last)] == [1, 1, 1]
        await until(gateway.idle, what="an idle gateway")


async def test_a_choice_does_not_move_to_a_silent_worker_until_it_answers_again(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        _, first, other = found = await scripted(stack, d0=(LEAVES,))
        gateway = await stack.enter_async_context(
            open_gateway_over(*(each.worker for each in found), silent_after_ms=2000)
        )
        other.voice.clear()
        await until(lambda: gateway.running.fleet.quiet == {"d1"}, what="news of a silence")
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.epochs[-1:] == [2], what="news of the first role")
        first.leave_again("standby")
        await until(lambda: first.epochs[-1:] == [3], what="news of the second role")
        assert not first.hand_overs
        other.voice.set()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert (len(first.hand_overs), gateway.events()[0].moves) == (1, 1)
        await until(gateway.idle, what="an idle gateway")


async def test_gateways_report_to_each_worker_the_epoch_they_route_by(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        found = await scripted(stack)
        await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        await until(lambda: found[1].epochs == [1])
        found[1].assign("prefill")
        await until(lambda: found[1].epochs == [1, 2])
        assert found[2].epochs == [1]


async def test_a_choice_without_another_worker_stays_and_ends_where_it_is(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        _, first, other = found = await scripted(stack, d0=(LEAVES,))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        other.assign("standby")
        await until(lambda: other.epochs[-1:] == [2])
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.epochs[-1:] == [2])
        first.finish_leaving()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        (event,) = gateway.events()
        assert (event.moves, event.reroutes, first.hand_overs) == (0, 0, [])
        await until(gateway.idle, what="an idle gateway")


async def test_a_worker_that_joins_later_is_used_and_one_no_longer_needed_is_not(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        _, first, other = found = await scripted(stack, d0=(LEAVES, LEAVES))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        other.assign("standby")
        await until(lambda: other.epochs[-1:] == [2])
        completions = [asyncio.create_task(gateway.complete(TOKENS))]
        await until(lambda: first.epochs[-1:] == [2])
        assert not first.hand_overs
        other.assign("decode")
        answers = [await completions.pop()]
        assert len(first.hand_overs) == 1
        other.assign("standby")
        first.assign("decode")
        await until(lambda: [*first.epochs[-1:], *other.epochs[-1:]] == [3, 4])
        completions.append(asyncio.create_task(gateway.complete(TOKENS)))
        await until(lambda: first.epochs[-1:] == [4])
        first.assign("decode")  # again: sequences offered before may stay
        await until(lambda: first.epochs[-1:] == [5])
        other.assign("decode")
        await until(lambda: [*first.epochs[-1:], *other.epochs[-1:]] == [5, 5])
        first.finish_leaving()
        answers.append(await completions.pop())
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected_text(TOKENS)}
        await until(gateway.idle, what="an idle gateway")


async def test_a_client_that_leaves_while_its_choice_moves_frees_both_workers(open_gateway_over: Any) -> None:
    async with AsyncExitStack() as stack:
        _, first, other = found = await scripted(stack, d0=(LEAVES,), d1=(Plan(tokens=0, hang=True),))
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: other.submits)
        completion.cancel()
        await until(gateway.events)
        await until(lambda: first.aborts and other.aborts)
        (event,) = gateway.events()
        assert event.outcome == OUTCOME_CLIENT_GONE
        assert first.aborts == [first.submits[0].sequence]  # whose blocks wait there
        await until(gateway.idle, what="an idle gateway")


@pytest.mark.parametrize("others", [("d1",), ("d1", "d2")], ids=["one other place", "two"])
async def test_a_choice_offered_twice_before_it_has_moved_takes_one_slot(
    open_gateway_over: Any, others: tuple[str, ...]
) -> None:
    """This happens if its worker gets a second role or a stop before the step of the hand-over ends."""
    async with AsyncExitStack() as stack:
        found = await scripted(stack, d0=(LEAVES,))
        for name in others[1:]:
            found.append(await stack.enter_async_context(scripted_worker(name, "decode")))
        first = found[1]
        first.in_step = True
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.hand_overs, what="the word to hand over")
        first.leave_again("standby")
        await until(lambda: first.epochs[-1:] == [3], what="news of the second role")
        links = [link for link in gateway.running.fleet.links if link.id in others]
        assert sum(link.decode.reserved for link in links) == 1
        first.end_step()
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert (len(first.hand_overs), gateway.events()[0].moves) == (1, 1)
        await until(gateway.idle, what="an idle gateway")
        assert sum(link.decode.free for link in links) == 4 * len(others)


async def test_a_choice_that_lost_its_worker_during_the_move_is_not_bound_twice(open_gateway_over: Any) -> None:
    """Offered again after the loss of its worker, it leaves before there is another, and then waits in the queue."""
    async with AsyncExitStack() as stack:
        _, first, other = found = await scripted(stack, d0=(LEAVES,))
        first.in_step = True
        gateway = await stack.enter_async_context(open_gateway_over(*(each.worker for each in found)))
        completion = asyncio.create_task(gateway.complete(TOKENS))
        await until(lambda: first.hand_overs, what="the word to hand over")
        other.decode_credits = 0
        other.cut()
        await until(lambda: other.streams == 2 and "d1" in gateway.connected, what="the other worker's new stream")
        first.leave_again("standby")
        await until(lambda: first.epochs[-1:] == [3], what="news of the second role")
        first.end_step()
        await until(lambda: gateway.waiting == 1, what="a choice between two workers")
        other.send(pb.WorkerFrame(credit=pb.Credit(decode_grant=4)))
        assert (await completion).json()["choices"][0]["text"] == expected_text(TOKENS)
        assert (len(first.hand_overs), other.submits[0].kv.worker_id) == (1, "d0")
        await until(gateway.idle, what="an idle gateway")


# ---------------------------------------------------------------- engines under load

ROLES = {"a": "prefill", "b": "decode", "c": "decode", "d": "decode"}


def is_clean(worker: LocalWorker) -> bool:
    integrity = worker.host.integrity()
    return not (integrity.live_sequences or integrity.referenced_blocks or integrity.leased_handles)


async def moves_under_load(
    open_gateway_over: Any, moves: int, *, output_tokens: int = 60, with_kv: bool = True, **engine: Any
) -> None:
    async with AsyncExitStack() as stack:
        workers = {
            name: await stack.enter_async_context(local_worker(name, role, max_sequences=8, **engine))
            for name, role in ROLES.items()
        }
        gateway = await stack.enter_async_context(
            open_gateway_over(*(worker.host.worker() for worker in workers.values()))
        )
        addresses = {name: worker.address for name, worker in workers.items()}
        mover = RoleChanger(await stack.enter_async_context(open_admins(addresses, TOKEN)), ROLES)
        traffic = SteadyTraffic(gateway.http, request_bodies("sim", 8, prompt_tokens=60, output_tokens=output_tokens))
        await traffic.learn()
        async with traffic.flowing(18):  # of 24 slots
            for _ in range(moves):
                answered = traffic.answered
                await until(lambda answered=answered: traffic.answered > answered + 3, what="answers")
                await mover.move_one()
        assert (traffic.failed, traffic.wrong) == ([], [])
        assert sum(moved.move.running > 0 for moved in mover.moves) >= moves // 3
        assert all(moved.move.effect_s is not None for moved in mover.moves)
        moved = sum(event.moves for event in gateway.events())
        left = sum(worker.host.hand_over_costs.count for worker in workers.values())
        assert (moved > 0, left > 0) == (with_kv, with_kv)
        if not with_kv:
            assert sum(event.recomputes for event in gateway.events()) > 0
        await until(gateway.idle, what="an idle gateway")
        await until(lambda: all(map(is_clean, workers.values())), what="clean workers")


def moves_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that cannot hand over running sequences, like vLLM's."""
    can = vars(LocalEngine)["capabilities"].fget
    monkeypatch.setattr(
        LocalEngine, "capabilities", property(lambda self: replace(can(self), hands_over_running_kv=False))
    )


async def test_sequences_of_workers_that_cannot_move_kv_are_computed_again_elsewhere(
    open_gateway_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves_no_kv(monkeypatch)
    await moves_under_load(open_gateway_over, 8, output_tokens=200, with_kv=False, sim_speedup=4.0)


async def test_sim_workers_move_under_load_without_loss(open_gateway_over: Any) -> None:
    await moves_under_load(open_gateway_over, 16, sim_speedup=4.0)


@pytest.mark.torch
async def test_torch_workers_move_under_load_without_loss(open_gateway_over: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from libs.testing.engines.real_model import write_random_llama

    # A wide distribution: with nearly equal logits the maximum would depend on the order of a sum.
    write_random_llama(tmp_path / "sim", initializer_range=0.4)
    await moves_under_load(
        open_gateway_over,
        6,
        output_tokens=40,
        engine="torch",
        model_path=str(tmp_path / "sim"),
        kv_memory_mb=4,
        threads=1,
    )
