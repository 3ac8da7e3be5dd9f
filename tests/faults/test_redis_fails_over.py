"""Tests of a Redis with sentinels whose primary is killed, or frozen and thawed, under a suite with two planners.

Each primary that comes back is a replica by then.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import groupby, pairwise

import grpc.aio
import httpx
import pytest

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.topics import DECISIONS
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.stores.kvindex import PrefixQuery, RedisKvIndex
from libs.stores.registry import RedisRegistry, RegistryDown
from libs.testing.servers.replicated import ReplicatedRedis, replicated_redis
from libs.testing.servers.stores import RedisUnavailable
from libs.testing.suites.processes import set_role, until_whole, workers
from libs.testing.suites.steady_load import steady_load
from libs.testing.suites.suite import RunningSuite, joining, running_suite
from libs.testing.wait import until
from libs.worker.admin_client import WorkerAdmin
from services.planner.kept import Lead
from services.planner.store import RedisPlannerStore
from tests.programs import skip_or_fail_in_ci

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.redis]

RECOVERY_S = 5.0
"""Bound on the recovery of registry, index and leadership after the sentinels' switch."""
SWITCH_S = 30.0
START_S = 180.0
FROZEN_S = 10.0
WORKERS = 4
PLANNERS = ("planner-1", "planner-2")
POLL_S = 0.05
TOKENS = 16
BLOCK = b"\1" * 16
MOVED = "decode-2"
BUDGET_TOKENS = 64
MAX_MOVES = 20
"""Attempts at a role that a planner may change in between."""


@pytest.fixture(scope="module")
def redis() -> Iterator[ReplicatedRedis]:
    try:
        context = replicated_redis()
        found = context.__enter__()
    except RedisUnavailable as error:
        skip_or_fail_in_ci(error)
    else:
        yield found
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def suite(redis: ReplicatedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """Two prefill and two decode workers, two gateways, and two planners that act."""
    shape = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--gateways", "2", "--redis", redis.url)
    env = {"FULCRUM_PLANNER_MODE": "auto", "FULCRUM_PLANNER_ID": PLANNERS[0]}
    folder = tmp_path_factory.mktemp("suite")
    with running_suite(folder, *shape, env=env, start_s=START_S) as found:
        second = {"FULCRUM_PLANNER_ID": PLANNERS[1], "FULCRUM_PLANNER_PORT": "0"}
        with joining(found, folder, PLANNERS[1], service="planner", **second):
            yield found


class Watch:
    """The decisions of both planners and the epochs of all workers, from now on."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.epochs: dict[tuple[str, int], list[int]] = {}
        self.addresses: dict[str, str] = {}

    def leaders(self) -> list[str]:
        """Return the leaders, turn by turn, in the order of decisions."""
        led = sorted((each.decided_unix_ns, each.planner_id) for each in self.decisions if each.leads)
        return [planner for planner, _ in groupby(planner for _, planner in led)]

    def led_since(self, unix_ns: int) -> bool:
        return any(each.leads and each.decided_unix_ns > unix_ns for each in self.decisions)

    async def follow_decisions(self, bus: KafkaBus) -> None:
        async for record in bus.subscribe([DECISIONS]):
            if isinstance(record.value, Decision):
                self.decisions.append(record.value)

    async def follow_epochs(self, http: httpx.AsyncClient, suite: RunningSuite) -> None:
        self.addresses = {each["id"]: each["address"] for each in await workers(http, suite)}
        while True:
            for name, address in self.addresses.items():
                async with make_channel(CommonSettings(), address) as channel:
                    held = (await WorkerAdmin(channel, name, suite.ready["token"]).describe()).worker
                self.epochs.setdefault((name, held.incarnation), []).append(held.assignment.epoch)
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def watching(http: httpx.AsyncClient, suite: RunningSuite) -> AsyncIterator[Watch]:
    found, bus = Watch(), KafkaBus(suite.ready["kafka"], suite.ready["cluster"], "test")
    await bus.start()
    following = [
        asyncio.create_task(found.follow_decisions(bus)),
        asyncio.create_task(found.follow_epochs(http, suite)),
    ]
    try:
        await until(found.leaders, timeout_s=RECOVERY_S, what="a leader")
        yield found
    finally:
        for task in following:
            task.cancel()
        ended = await asyncio.gather(*following, return_exceptions=True)
        await bus.close()
    assert [type(each) for each in ended] == [asyncio.CancelledError] * len(following)


async def moved(suite: RunningSuite, address: str) -> int:
    """Change the worker's role whatever planners do meanwhile, and return its epoch."""
    async with make_channel(CommonSettings(), address) as channel:
        admin = WorkerAdmin(channel, MOVED, suite.ready["token"])
        for _ in range(MAX_MOVES):
            held = (await admin.describe()).worker.assignment
            with contextlib.suppress(grpc.aio.AioRpcError):
                other = ("decode", 0) if held.budget_tokens == BUDGET_TOKENS else ("mixed", BUDGET_TOKENS)
                return await set_role(suite, address, held.epoch, *other)
    raise AssertionError(f"a planner came first {MAX_MOVES} times")


async def works_again(redis: ReplicatedRedis, suite: RunningSuite, watch: Watch, switched_ns: int) -> dict[str, float]:
    """Wait until registry, index and leadership work, and return the seconds of each. Fail after RECOVERY_S."""
    now_s = asyncio.get_running_loop().time
    start_s, found = now_s(), {}
    registry = RedisRegistry(redis.url, suite.ready["cluster"])
    index = RedisKvIndex(redis.url, suite.ready["cluster"])

    async def registered() -> None:
        """Wait until a role set after the switch is in the registry, with all workers."""
        epoch = await moved(suite, watch.addresses[MOVED])
        while True:
            with contextlib.suppress(RegistryDown):
                listed = {each.id: each.assignment.epoch for each in await registry.workers()}
                if len(listed) == suite.workers and listed[MOVED] >= epoch:
                    return
            await asyncio.sleep(POLL_S)

    async def indexed() -> None:
        """Wait until the index finds a block that was written after the switch."""
        query = PrefixQuery("sim", [[BLOCK]], ["probe"])
        while True:
            await index.publish("sim", "probe", stored=[BLOCK], removed=[])
            if await index.longest_prefix([query]) == [[{"probe": 1}]]:
                return
            await asyncio.sleep(POLL_S)

    async def led() -> None:
        while not watch.led_since(switched_ns):
            await asyncio.sleep(POLL_S)

    async def timed(name: str, wait: Callable[[], Awaitable[None]]) -> None:
        await wait()
        found[name] = now_s() - start_s

    try:
        async with asyncio.timeout(RECOVERY_S), asyncio.TaskGroup() as tasks:
            for name, wait in (("registry", registered), ("index", indexed), ("leader", led)):
                tasks.create_task(timed(name, wait))
    except TimeoutError:
        raise AssertionError(f"after {RECOVERY_S} s only {found} worked") from None
    finally:
        await index.forget("sim", "probe")
        await index.close()
        await registry.close()
    return found


async def test_a_frozen_sentinel_does_not_delay_the_lead(redis: ReplicatedRedis, cluster: str) -> None:
    """This holds for any sentinel: the lease is shorter than a sentinel's timeout."""
    await until(redis.is_whole, timeout_s=SWITCH_S, what="replicas in step")
    for sentinel in redis.sentinels.values():
        sentinel.freeze()
        store = RedisPlannerStore(redis.url, cluster)
        try:
            async with asyncio.timeout(RECOVERY_S):
                while await store.lead("a 1") is not Lead.OURS:
                    await asyncio.sleep(POLL_S)
        finally:
            sentinel.thaw()
            await store.close()


async def switched(redis: ReplicatedRedis, before: int) -> int:
    """Wait until the first sentinel names another primary, and return the time in Unix ns."""
    await until(lambda: redis.primary() != before, timeout_s=SWITCH_S, what="the sentinels' switch")
    return time.time_ns()


def assert_one_led_at_a_time(watch: Watch, fail_overs: int) -> None:
    """Check that turns of the planners do not overlap and that no epoch of a worker went back."""
    assert len(watch.leaders()) <= 1 + fail_overs, watch.leaders()
    for worker, epochs in watch.epochs.items():
        assert all(earlier <= later for earlier, later in pairwise(epochs)), worker
    assert len(watch.epochs) == WORKERS  # none was restarted


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_lost_primary_costs_no_request_and_every_service_recovers_soon(
    redis: ReplicatedRedis, suite: RunningSuite, how: str
) -> None:
    """The former primary returns as a replica: a killed one is restarted, and a thawed one still believes to be the
    primary.
    """
    async with httpx.AsyncClient(timeout=10) as http:
        await until(redis.is_whole, timeout_s=SWITCH_S, what="replicas in step")
        await until_whole(http, suite)
        async with (
            watching(http, suite) as watch,
            steady_load(suite.ready["gateways"], clients=4, tokens=TOKENS) as load,
        ):
            await load.more(16)
            old = redis.primary()
            lost_s = asyncio.get_running_loop().time()
            redis.servers[old].kill() if how == "killed" else redis.servers[old].freeze()
            switched_ns = await switched(redis, old)
            switch_s = asyncio.get_running_loop().time() - lost_s
            took = await works_again(redis, suite, watch, switched_ns)
            await load.more(16)
            if how == "killed":
                redis.servers[old].start()
            else:
                await until(lambda: asyncio.get_running_loop().time() > lost_s + FROZEN_S, timeout_s=2 * FROZEN_S)
                redis.servers[old].thaw()
            await until(redis.is_whole, timeout_s=SWITCH_S, what="the old primary as a replica")
            took_later = await works_again(redis, suite, watch, time.time_ns())
            await load.more(16)
            assert (load.failed, load.broken) == ([], 0)
        await until_whole(http, suite)
    assert_one_led_at_a_time(watch, fail_overs=1)
    print(f"{how}: switch after {switch_s:.1f} s, then {took}, later {took_later}, {load.served} requests")
