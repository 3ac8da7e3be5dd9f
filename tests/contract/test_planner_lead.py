"""Tests of planners that share a Redis: one leads, and another takes over soon after its end."""

import asyncio
import contextlib
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, Assignment
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO, MODE_OFF, Decision
from libs.runtime.redis import make_redis
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner, end
from libs.runtime.transport import SystemTransport
from libs.testing.wait import ManualClock
from libs.testing.workers.hosts import TOKEN, RecordingBus, local_worker
from services.metrics.status.traffic import PlannerNews, PlannerStatus
from services.planner.executor import OrderExecutor
from services.planner.http.admin import Admin, ModeApi
from services.planner.http.limits_api import LimitsApi, LimitsBody
from services.planner.kept import LEASE_MS, Lead, LeaderLease
from services.planner.role_planner import Order
from services.planner.run import lead_forever, settle
from services.planner.state import Identity, PlannerState, decide_forever
from services.planner.store import RedisPlannerStore

TAKEOVER_S = 2.0


async def settled() -> bool:
    """Settle as after reading a store without saved mode or limits."""
    return True


async def until_led(store: RedisPlannerStore, who: str) -> float:
    """Return the seconds until the lead is acquired."""
    loop = asyncio.get_running_loop()
    requested_s = loop.time()
    async with asyncio.timeout(TAKEOVER_S):
        while await store.lead(who) is not Lead.OURS:
            await asyncio.sleep(0.02)
    return loop.time() - requested_s


async def test_one_planner_leads_until_it_leaves_or_its_lease_expires(redis: Any, cluster: str) -> None:
    first, second = RedisPlannerStore(redis.url, cluster), RedisPlannerStore(redis.url, cluster)
    assert await first.lead("a 1") is Lead.OURS
    assert await second.lead("b 1") is Lead.ANOTHERS
    assert await first.lead("a 1") is Lead.OURS
    await second.follow("b 1")  # which leads nobody, and ends nothing
    assert await second.lead("b 1") is Lead.ANOTHERS
    await first.follow("a 1")
    assert await second.lead("b 1") is Lead.OURS
    assert await first.lead("a 1") is Lead.ANOTHERS
    assert await until_led(first, "a 1") <= TAKEOVER_S  # the second one fell silent
    for store in (first, second):
        await store.close()


async def test_a_stopped_planner_gives_up_the_lead_at_once(redis: Any, cluster: str) -> None:
    first, second = RedisPlannerStore(redis.url, cluster), RedisPlannerStore(redis.url, cluster)
    state = PlannerState(Identity("a", 1, MODE_AUTO), lag_ns=0, window_ns=1, kept_decisions=1)
    lease = LeaderLease(Lead.UNKNOWN)
    leading = asyncio.create_task(lead_forever(first, state, lease, settled))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TAKEOVER_S):
        while lease.at(loop.time()) is not Lead.OURS:
            await asyncio.sleep(0.01)
    leading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leading
    async with asyncio.timeout(TAKEOVER_S):
        while (found := await second.lead("b 1")) is Lead.UNKNOWN:  # Redis was too slow, which proves nothing
            await asyncio.sleep(0.01)
    assert found is Lead.OURS
    for store in (first, second):
        await store.close()


async def test_each_lead_has_a_higher_term_than_all_before_even_if_redis_lost_data(redis: Any, cluster: str) -> None:
    raw = make_redis(redis.url, timeout_ms=1000)
    first, second = RedisPlannerStore(redis.url, cluster), RedisPlannerStore(redis.url, cluster)
    terms = []
    for store, who in ((first, "a 1"), (second, "b 1"), (first, "a 1")):
        await until_led(store, who)
        terms.append(store.term)
        await until_led(store, who)
        assert store.term == terms[-1]  # a renewal is no new lead
        await store.follow(who)
    await raw.set(keys.planner_term(cluster), terms[0] - 1)  # the new primary is a replica that lags
    await asyncio.sleep(0.002)  # terms are milliseconds then
    for lost in (b"nonsense", b"-1", b"1e300", None):
        await until_led(second, "b 1")
        terms.append(second.term)
        await second.follow("b 1")
        await (raw.set(keys.planner_term(cluster), lost) if lost else raw.delete(keys.planner_term(cluster)))
        await asyncio.sleep(0.002)
    await until_led(first, "a 1")
    assert [*terms, first.term] == sorted({*terms, first.term})
    await raw.aclose()
    for store in (first, second):
        await store.close()


async def test_a_worker_obeys_the_later_of_two_planners_that_lead_over_a_split_redis(redis: Any, cluster: str) -> None:
    """Two keys stand for two primaries that do not know of one another."""
    old, new = RedisPlannerStore(redis.url, f"{cluster}-old"), RedisPlannerStore(redis.url, f"{cluster}-new")
    settings, tasks = CommonSettings.model_validate({"token": TOKEN}), TaskOwner()
    outrun: list[str] = []
    former, latter = (
        OrderExecutor(
            SystemTransport(settings), tasks, planner_id=name, token=TOKEN, outrun=partial(outrun.append, name)
        )
        for name in ("former", "latter")
    )

    async def ordered(actor: OrderExecutor, term: int) -> bool:
        """Order a change of the worker's present assignment, and return whether it was made."""
        held, made = worker.host.worker(), asyncio.Event()
        wanted = Assignment(role=ROLE_MIXED, budget_tokens=64 + held.assignment.epoch, epoch=held.assignment.epoch + 1)
        actor.carry_out([Order(held, wanted, "test")], lambda *_: made.set(), lead_term=term)
        await made.wait()
        return worker.host.worker().assignment.epoch == wanted.epoch

    await until_led(old, "a 1")
    await asyncio.sleep(0.002)
    await until_led(new, "b 1")
    async with local_worker("a", "decode") as worker:
        assert await ordered(former, old.term)
        assert await ordered(latter, new.term)
        assert not await ordered(former, old.term)  # although it has seen the worker's epoch
        assert outrun == ["former"]
        assert await ordered(latter, new.term)
        assert await ordered(former, 0)  # a person's order, which no lead outruns
    await tasks.close()
    for store in (old, new):
        await store.close()


async def test_an_outrun_planner_acquires_a_new_term_at_bounded_intervals(redis: Any, cluster: str) -> None:
    store = RedisPlannerStore(redis.url, cluster)
    state = PlannerState(Identity("a", 1, MODE_AUTO), lag_ns=0, window_ns=1, kept_decisions=1)
    lease, loop = LeaderLease(Lead.UNKNOWN), asyncio.get_running_loop()
    leading = asyncio.create_task(lead_forever(store, state, lease, settled))
    async with asyncio.timeout(TAKEOVER_S):
        while lease.at(loop.time()) is not Lead.OURS:
            await asyncio.sleep(0.01)
    first = state.lead_term
    lease.was_outrun()
    async with asyncio.timeout(TAKEOVER_S):
        while state.lead_term == first:
            await asyncio.sleep(0.01)
    assert state.lead_term > first
    assert lease.at(loop.time()) is Lead.OURS
    lease.was_outrun()
    second, until_s = state.lead_term, lease._until_s
    async with asyncio.timeout(TAKEOVER_S):
        while lease._until_s == until_s:  # until it is renewed
            await asyncio.sleep(0.01)
    assert (state.lead_term, lease.outrun) == (second, True)  # not again within OUTRUN_S
    await end(leading)
    await store.close()


async def test_the_leader_is_unknown_without_redis(cluster: str) -> None:
    away = RedisPlannerStore("redis://127.0.0.1:1/0", cluster)
    assert await away.lead("a 1") is Lead.UNKNOWN
    await away.follow("a 1")
    await away.close()


@given(st.lists(st.tuples(st.sampled_from(Lead), st.integers(0, 3 * LEASE_MS)), min_size=1, max_size=12))
def test_the_leader_is_unknown_after_a_missed_renewal(answers: list[tuple[Lead, int]]) -> None:
    lease, now_ms, last = LeaderLease(Lead.UNKNOWN), 0, (Lead.UNKNOWN, 0)
    for found, later_ms in answers:
        now_ms += later_ms
        lease.take(found, now_ms / 1000)
        last = last if found is Lead.UNKNOWN else (found, now_ms)
        lost = last[0] is Lead.OURS and now_ms >= last[1] + LEASE_MS
        assert lease.at(now_ms / 1000) is (Lead.UNKNOWN if lost else last[0])


async def test_a_new_leader_reads_mode_and_limits_before_it_acts(redis: Any, cluster: str) -> None:
    """Settings of the former leader are read by the next one; settings made while Redis was away are stored then."""
    store = RedisPlannerStore(redis.url, cluster)
    assert await store.keep(MODE_OFF)
    assert await store.keep_limits(LimitsBody(pinned=["d"], revision=3).model_dump_json())
    state = PlannerState(Identity("b", 1, MODE_AUTO), lag_ns=0, window_ns=1, kept_decisions=1)
    bus, clock = RecordingBus(), ManualClock()
    modes = ModeApi(Admin(state, store, bus, clock, token="t"))
    limits = LimitsApi(Admin(state, store, bus, clock, token="t"))
    away = RedisPlannerStore("redis://127.0.0.1:1/0", cluster)
    assert not await settle(away, state, ModeApi(Admin(state, away, bus, clock, token="t")), limits)
    assert (state.identity.mode, state.limits.pinned) == (MODE_AUTO, frozenset())
    assert await settle(store, state, modes, limits)
    assert (state.identity.mode, state.limits.pinned) == (MODE_OFF, {"d"})
    for each in (store, away):
        await each.close()


async def test_the_status_names_no_leader_while_the_lead_key_has_another_type(redis: Any, cluster: str) -> None:
    """The status also names a remedy, after which the planner leads and the status says so."""
    raw, store = make_redis(redis.url, timeout_ms=1000), RedisPlannerStore(redis.url, cluster)
    await raw.rpush(keys.planner_lead(cluster), "somebody else's")
    state, clock = PlannerState(Identity("a", 1, MODE_AUTO), lag_ns=0, window_ns=1, kept_decisions=1), ManualClock()
    lease, bus, loop = LeaderLease(Lead.UNKNOWN), RecordingBus(), asyncio.get_running_loop()
    working = [
        asyncio.create_task(lead_forever(store, state, lease, settled)),
        asyncio.create_task(decide_forever(bus, state, clock, period_s=0.02, lease=lease, news=asyncio.Event())),
    ]

    async def reported(acts: bool) -> PlannerStatus:
        news = PlannerNews()
        async with asyncio.timeout(TAKEOVER_S):
            while True:
                clock.advance_ms(1100)
                await asyncio.sleep(0.02)
                for decision in bus.published:
                    assert isinstance(decision, Decision)
                    news.take(decision, clock.now_ns())
                status = news.status(clock.now_ns())
                if status.heard and status.acts == acts and (acts or "delete the key" in status.idle_because):
                    return status

    nobody = await reported(acts=False)
    assert (nobody.leader, nobody.mode) == (None, "auto")
    assert "nobody leads" in nobody.idle_because and keys.planner_lead(cluster) in nobody.idle_because
    assert "delete the key" in (state.not_live(clock.now_ns()) or "")
    await raw.delete(keys.planner_lead(cluster))
    somebody = await reported(acts=True)
    assert (somebody.leader, somebody.idle_because) == ("a", "")
    assert lease.at(loop.time()) is Lead.OURS and lease.fault == ""
    await end(*working)
    await raw.aclose()
    await store.close()
