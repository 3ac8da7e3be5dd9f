"""Tests of role changes: competing orders, notified gateways, and where running sequences continue."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from libs.contracts.errors import NoWorkers, StaleRole, Unauthenticated
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.roles import role_from_name
from libs.engine.local import LocalEngine
from libs.policy.worker.assignment import HandOverTime
from libs.runtime.net.rpc import make_channel
from libs.stores.registry import RedisRegistry
from libs.testing.servers.stores import embedded_redis
from libs.testing.workers.hosts import TOKEN, LocalWorker, Reachable, eventually, gateway_probe, local_worker, submit
from libs.worker.admin_client import RoleMove, WorkerAdmin

PROMPT = [(7 * i) % 256 for i in range(100)]
LONG = 400
"""Output tokens of a sequence that takes longer to end than to move."""


@asynccontextmanager
async def admin(worker: Reachable, token: str = TOKEN) -> AsyncIterator[WorkerAdmin]:
    async with make_channel(worker.settings, worker.address) as channel:
        yield WorkerAdmin(channel, worker.settings.id, token)


async def set_role(to: WorkerAdmin, role: str, epoch: int, *, wait_ms: int = 0, incarnation: int = 0) -> RoleMove:
    wire_role, budget_tokens = role_from_name(role, 64 if role == "mixed" else 0)
    return await to.set_role(
        wire_role, budget_tokens, expected_epoch=epoch, incarnation=incarnation, actor="test", reason="because",
        wait_ms=wait_ms, force=True,
    )  # fmt: skip


def is_clean(worker: LocalWorker) -> bool:
    integrity = worker.host.integrity()
    return not (integrity.live_sequences or integrity.referenced_blocks or integrity.leased_handles)


# ---------------------------------------------------------------- competing orders and notified gateways


async def test_exactly_one_rival_wins_each_epoch_and_epochs_only_grow() -> None:
    async with local_worker("a", "decode") as worker, gateway_probe(worker) as gateway, AsyncExitStack() as stack:
        rivals = [await stack.enter_async_context(admin(worker)) for _ in range(4)]
        won: Counter[int] = Counter()
        lost = 0

        async def planner(to: WorkerAdmin, roles: tuple[str, ...]) -> None:
            nonlocal lost
            for turn in range(25):
                seen = (await to.describe()).worker.assignment.epoch
                try:
                    move = await set_role(to, roles[turn % len(roles)], seen)
                except StaleRole:
                    lost += 1
                else:
                    assert move.assignment.epoch == seen + 1
                    won[move.assignment.epoch] += 1

        roles = (("prefill", "decode"), ("standby", "mixed"), ("mixed", "prefill"), ("decode", "standby"))
        await asyncio.gather(*map(planner, rivals, roles))
        assert set(won.values()) == {1} and lost > 0
        last = worker.host.assignment.current.epoch
        assert sorted(won) == list(range(2, last + 1))
        await gateway.until(lambda: gateway.worker and gateway.worker.assignment.epoch == last)
        reported = [frame.worker.assignment.epoch for frame in gateway.frames if frame.HasField("worker")]
        assert reported == sorted(set(reported))


async def test_epochs_keep_growing_while_redis_dies_and_comes_back(cluster: str) -> None:
    with embedded_redis() as redis:
        registry = RedisRegistry(redis.url, cluster)
        async with local_worker("a", "decode", registry=registry, cluster=cluster) as worker, admin(worker) as to:
            seen: list[int] = []

            async def follow() -> None:
                async for workers in registry.watch(poll_ms=50):
                    seen.extend(each.assignment.epoch for each in workers)

            following = asyncio.create_task(follow())
            for epoch in range(1, 13):
                move = await set_role(to, "prefill" if epoch % 2 else "decode", epoch)
                assert move.assignment.epoch == epoch + 1
                if epoch == 4:
                    redis.server.kill()
                if epoch == 8:
                    redis.server.start()
            await eventually(lambda: seen and seen[-1] == 13)
            assert seen == sorted(seen)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_planner_that_names_an_earlier_incarnation_is_refused() -> None:
    async with local_worker("a", "decode") as worker, admin(worker) as to:
        described = await to.describe()
        with pytest.raises(StaleRole, match="restarted"):
            await set_role(to, "prefill", 1, incarnation=described.worker.incarnation - 1)
        move = await set_role(to, "prefill", 1, incarnation=described.worker.incarnation)
        assert (await to.describe()).worker.role_change.actor == "test"
        assert move.assignment.epoch == 2


async def test_the_answer_reports_whether_gateways_have_the_epoch() -> None:
    async with local_worker("a", "decode") as worker, admin(worker) as to, gateway_probe(worker) as gateway:
        behind = await set_role(to, "prefill", 1, wait_ms=50)
        assert (behind.gateways_behind, behind.effect_s) == (1, None)
        assert (await to.describe()).gateways_behind == 1
        await gateway.send(pb.GatewayFrame(epoch=2))
        waiting = asyncio.create_task(set_role(to, "decode", 2, wait_ms=5000))
        await gateway.until(lambda: gateway.worker and gateway.worker.assignment.epoch == 3)
        assert not waiting.done()
        await gateway.send(pb.GatewayFrame(epoch=3))
        held = await waiting
        assert held.gateways_behind == 0 and held.effect_s is not None and held.effect_s > held.call_s
        left = asyncio.create_task(set_role(to, "standby", 3, wait_ms=5000))
        await gateway.until(lambda: gateway.worker and gateway.worker.assignment.epoch == 4)
        gateway.call.cancel()
        assert (await left).gateways_behind == 0  # a gateway that has gone is not waited for


async def test_the_first_step_in_the_new_role_is_timed() -> None:
    async with local_worker("a", "decode") as worker, admin(worker) as to, gateway_probe(worker) as gateway:
        move = await set_role(to, "prefill", 1)
        assert await to.first_step_s(move, within_s=0.05) is None
        await gateway.until(lambda: gateway.prefill_credits)
        await gateway.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        first_s = await to.first_step_s(move, within_s=5)
        assert first_s is not None and first_s > move.call_s
        await set_role(to, "standby", 2)
        assert await to.first_step_s(move, within_s=0) is None  # it is over


async def test_errors_are_typed_and_name_a_remedy() -> None:
    async with local_worker("a", "decode") as worker:
        async with admin(worker, "wrong") as to:
            with pytest.raises(Unauthenticated):
                await to.describe()
        async with admin(worker) as to:
            with pytest.raises(StaleRole, match="a: expected epoch 7, the worker is at 1"):
                await set_role(to, "prefill", 7)
            worker.host.start_draining()
            with pytest.raises(StaleRole, match="draining: it takes no other role"):
                await set_role(to, "prefill", 1)
    with pytest.raises(NoWorkers, match="fulcrum workers"):
        async with make_channel(worker.settings, worker.address) as channel:
            await WorkerAdmin(channel, "a", TOKEN).describe()


# ---------------------------------------------------------------- the engine under the new role


@pytest.mark.parametrize("before", ["mixed", "prefill"])
async def test_a_smaller_budget_takes_effect_once_earlier_prompts_are_computed(
    monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """This holds whatever decodes on and whatever arrives later."""
    budget = 512 if before == "mixed" else 0
    async with (
        local_worker("a", before, budget_tokens=budget, sim_speedup=1.0) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        budgets: list[int] = []
        apply = worker.host.engine.set_prefill_budget
        monkeypatch.setattr(worker.host.engine, "set_prefill_budget", lambda each: [budgets.append(each), apply(each)])
        phase = pb.PHASE_BOTH if before == "mixed" else pb.PHASE_PREFILL
        if before == "mixed":
            await gateway.submit(submit(1, phase, PROMPT, output=4000))
            await gateway.until(lambda: gateway.tokens[1])
        await gateway.submit(submit(2, phase, [5] * 4000, output=4000))
        await eventually(lambda: worker.host.running == 1 + (before == "mixed"))
        await set_role(to, "mixed", 1)
        assert budgets == []  # of 64 tokens: the accepted prompt continues at its initial pace
        await gateway.until(lambda: gateway.decode_credits > 2)
        await gateway.submit(submit(3, pb.PHASE_BOTH, [6] * 4000, output=4000))
        await gateway.until(lambda: gateway.tokens[2])
        await eventually(lambda: budgets == [64])
        assert not gateway.tokens[3]
        if before == "mixed":
            assert not any(event.HasField("finished") for event in gateway.events[1])


async def test_a_prefill_worker_accepts_only_prompts_for_slots_that_running_decodes_leave() -> None:
    async with (
        local_worker("a", "mixed", budget_tokens=256, max_sequences=4, sim_speedup=1.0) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(*(submit(each, pb.PHASE_BOTH, PROMPT, output=4000) for each in (1, 2, 3, 4)))
        await gateway.until(lambda: all(gateway.tokens[each] for each in (1, 2, 3, 4)))
        await set_role(to, "prefill", 1)
        await gateway.until(lambda: gateway.worker and gateway.worker.assignment.epoch == 2)
        assert (worker.host.gateways.credits.prefill.slots, gateway.prefill_credits) == (0, 0)
        await gateway.send(pb.GatewayFrame(aborts=pack_u32([1])))
        await gateway.until(lambda: gateway.prefill_credits == 1)
        await gateway.submit(submit(5, pb.PHASE_PREFILL, PROMPT))
        await gateway.event(5, "prefilled")  # while the other three decode
        await gateway.send(pb.GatewayFrame(aborts=pack_u32([2, 3, 4, 5])))
        await gateway.until(lambda: gateway.prefill_credits == 4)


# ---------------------------------------------------------------- destinations of running sequences


async def go_on(worker: Any, gateway: Any, tokens: list[int], kv: pb.KvSource, **fields: Any) -> list[int]:
    """Return the rest of sequence 1 on another worker."""
    rest = submit(1, pb.PHASE_DECODE, [*PROMPT, *tokens], prompt_tokens=len(PROMPT), output=LONG, **fields)
    rest.kv.CopyFrom(kv)
    await gateway.submit(rest)
    finished = await gateway.event(1, "finished")
    # Blocks that are cached there are not moved: all of them, if the last one is full.
    has = worker.host.engine.capabilities
    assert bool(kv.tokens % has.block_size_tokens) <= finished.kv_bytes_received <= kv.blocks * has.kv_block_bytes
    rest_tokens: list[int] = gateway.tokens[1]
    return rest_tokens


@pytest.mark.parametrize("leaves_for", ["prefill", "standby", "the end"])
async def test_running_sequences_are_offered_and_move_with_their_blocks(leaves_for: str) -> None:
    async with (
        local_worker("a", "mixed", budget_tokens=256, sim_speedup=4.0) as a,
        local_worker("b", "mixed", budget_tokens=256) as b,
        admin(a) as to,
        gateway_probe(a) as first,
        gateway_probe(b) as second,
    ):
        await second.submit(submit(9, pb.PHASE_BOTH, PROMPT, output=LONG))
        await second.event(9, "finished")
        await first.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=LONG))
        await first.until(lambda: len(first.tokens[1]) > 5)
        if leaves_for == "the end":
            a.host.start_draining()
        else:
            assert (await set_role(to, leaves_for, 1)).running == 1
        await first.event(1, "leaving")
        await first.send(pb.GatewayFrame(hand_overs=pack_u32([1, 77])))
        moved = await first.event(1, "moved")
        assert moved.kv.tokens == len(PROMPT) + len(first.tokens[1]) - 1
        assert moved.computed_prompt_tokens == len(PROMPT)
        so_far = list(first.tokens[1])
        assert so_far + await go_on(b, second, so_far, moved.kv) == second.tokens[9]
        await eventually(lambda: is_clean(a) and is_clean(b))
        assert (a.host.hand_over_costs.count, first.tokens[1]) == (1, so_far)


async def test_a_sequence_with_no_other_worker_ends_where_it_is() -> None:
    async with (
        local_worker("a", "mixed", budget_tokens=256) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=LONG))
        await gateway.until(lambda: len(gateway.tokens[1]) > 5)
        await set_role(to, "standby", 1)
        await set_role(to, "prefill", 2)
        assert (await gateway.event(1, "finished")).reason == pb.FINISH_REASON_LENGTH
        assert len(gateway.tokens[1]) == LONG
        offers = [event for event in gateway.events[1] if event.HasField("leaving")]
        assert 1 <= len(offers) <= 2  # once for each role that it leaves


async def test_a_sequence_that_ends_sooner_than_it_could_move_stays() -> None:
    async with (
        local_worker("a", "mixed", budget_tokens=256, sim_speedup=500.0) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=8))  # teaches the worker the length of answers
        await gateway.event(1, "finished")
        await gateway.submit(submit(2, pb.PHASE_BOTH, PROMPT, output=2000))
        await gateway.until(lambda: gateway.tokens[2])
        await set_role(to, "prefill", 1)
        await gateway.event(2, "finished")
        assert not any(event.HasField("leaving") for event in gateway.events[2])


async def test_an_engine_that_moves_no_kv_ends_only_sequences_to_be_computed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    can = vars(LocalEngine)["capabilities"].fget
    monkeypatch.setattr(
        LocalEngine, "capabilities", property(lambda self: replace(can(self), hands_over_running_kv=False))
    )
    async with (
        local_worker("a", "mixed", budget_tokens=256, sim_speedup=4.0) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        for number in (1, 2):
            await gateway.submit(submit(number, pb.PHASE_BOTH, PROMPT, output=2000))
        await gateway.until(lambda: min(len(gateway.tokens[1]), len(gateway.tokens[2])) > 5)
        await set_role(to, "prefill", 1)
        for number in (1, 2):
            await gateway.event(number, "leaving")
        await gateway.send(pb.GatewayFrame(hand_overs=pack_u32([1])))
        assert (await gateway.event(1, "finished")).reason == pb.FINISH_REASON_ABORTED
        so_far = len(gateway.tokens[2])
        await gateway.until(lambda: len(gateway.tokens[2]) > so_far + 5)  # it continues where it is
        assert worker.host.running == 1


async def test_a_prompt_ends_in_the_role_that_accepted_it_and_is_offered_with_its_first_token() -> None:
    async with (
        local_worker("a", "mixed", budget_tokens=16, sim_speedup=1.0) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=LONG))
        await eventually(lambda: worker.host.running == 1)
        await set_role(to, "standby", 1)
        assert not gateway.tokens[1]
        await gateway.event(1, "leaving")
        assert len(gateway.tokens[1]) == 1


async def test_a_handed_over_sequence_that_no_worker_takes_is_freed_by_or_with_its_gateway() -> None:
    async with local_worker("a", "mixed", budget_tokens=256) as worker, admin(worker) as to:
        async with gateway_probe(worker) as gateway:
            await gateway.submit(*(submit(i, pb.PHASE_BOTH, PROMPT, output=LONG) for i in (1, 2)))
            await gateway.until(lambda: gateway.tokens[1] and gateway.tokens[2])
            await set_role(to, "prefill", 1)
            await gateway.send(pb.GatewayFrame(hand_overs=pack_u32([1])))
            await gateway.event(1, "moved")
            await gateway.send(pb.GatewayFrame(aborts=pack_u32([1])))
            await eventually(lambda: not worker.host.integrity().leased_handles)
            await gateway.send(pb.GatewayFrame(hand_overs=pack_u32([2])))
            await gateway.event(2, "moved")
        await eventually(lambda: is_clean(worker))
        learned = worker.host.hand_over_costs.time
        assert [learned.seconds(size) for size in (0, 10**9)] == [HandOverTime().seconds(size) for size in (0, 10**9)]


async def test_a_worker_that_decodes_again_accepts_new_decodes_beside_those_that_stayed() -> None:
    async with (
        local_worker("a", "mixed", budget_tokens=256) as worker,
        admin(worker) as to,
        gateway_probe(worker) as gateway,
    ):
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=LONG))
        await gateway.until(lambda: gateway.tokens[1])
        await set_role(to, "prefill", 1)
        await set_role(to, "mixed", 2)
        await gateway.until(lambda: gateway.worker and gateway.worker.assignment.epoch == 3)
        await gateway.until(lambda: gateway.decode_credits > 0)
        await gateway.submit(submit(2, pb.PHASE_BOTH, PROMPT))
        for sequence in (1, 2):
            assert (await gateway.event(sequence, "finished")).reason == pb.FINISH_REASON_LENGTH
        assert worker.host.worker().assignment.role == common.ROLE_MIXED
