"""Fuzz tests of values in Redis: readers skip invalid ones and see the valid ones beside them."""

import asyncio
import math
from collections.abc import AsyncIterator
from secrets import token_bytes
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis

from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    WORKER_STATE_READY,
    Assignment,
    Capabilities,
    Compute,
    StepTime,
    Worker,
)
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_ADVISORY, Mode
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Hello, PrefillCurve
from libs.perfmodel.learner import StepKind, combine
from libs.perfmodel.profiles import PROFILES
from libs.policy.step_time import StepWork
from libs.policy.worker.saturation import MOST_TOKENS, knee_of
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.stores.collectors import RegistryCollector
from libs.stores.kvindex import PrefixQuery, RedisKvIndex
from libs.stores.registry import RedisRegistry, Unusable, faults, read_worker
from libs.stores.steps import CURVE_FIELD, RedisStepTimes, StepTimeKey
from libs.testing.messages import messages, spoiled
from libs.testing.servers.stores import RedisServer
from libs.testing.suites.suite import RunningSuite
from libs.testing.wait import ManualClock
from libs.testing.workers.hosts import RecordingBus
from services.gateway.fleet import WorkerLinks
from services.planner.http.admin import Admin, ModeApi
from services.planner.http.api import PlannerCollector
from services.planner.http.api import make_api as make_planner_api
from services.planner.http.limits_api import LimitsApi, LimitsBody, read_limits
from services.planner.kept import MODES, StoredPlannerSettings
from services.planner.state import Identity, PlannerState
from services.planner.store import RedisPlannerStore

LEASE_MS = 600_000
NOW_NS = 1_700_000_000_000_000_000
PLANNER_PATHS = ("/v1/workers", "/v1/decisions", "/v1/mode", "/metrics")
KEY = StepTimeKey("torch", "model", "cpu")
NAMES = [f"w{number}" for number in range(6)]
GOOD = [
    Worker(
        id=f"good-{number}",
        incarnation=7,
        address="127.0.0.1:1",
        engine="sim",
        state=WORKER_STATE_READY,
        assignment=Assignment(model="sim", role=ROLE_MIXED, epoch=1),
    )
    for number in range(2)
]

amounts = st.sampled_from([0.0, 1.0, 5e-324, 1e300, math.inf, -math.inf, math.nan, -1.0])
known_worker = {
    "fulcrum.common.v1.Worker.id": st.sampled_from(NAMES),
    "address": st.sampled_from(["127.0.0.1:1", "[::1]:2", "unix:/x", "http://a:1", "a:0", "a:65536", ":1", "\0:1"]),
    "engine": st.sampled_from(["sim", "torch", "vllm"]),
    "device": st.sampled_from(["cuda:X", "cpu", "sim:llama-8b-h100/xnan", "sim:llama-8b-h100/x1e-300", "sim:a/xinf"]),
    "peak_flops_per_s": amounts,
    "peak_bytes_per_s": amounts,
}
members = st.one_of(
    st.sampled_from(NAMES).map(str.encode), st.binary(max_size=12), st.just(b"\xff\xfe"), st.just(b""), st.just(b"a b")
)
entries = st.tuples(members, st.one_of(st.none(), st.just("string"), spoiled(messages(Worker, known_worker))))
"""A member, and under its lease key: nothing, a key of another type, or a value."""
fits = spoiled(messages(StepTime, {name: amounts for name in StepTime.DESCRIPTOR.fields_by_name if name[-2:] == "ns"}))
curves = spoiled(
    messages(
        PrefillCurve,
        {
            "fulcrum.worker.v1.PrefillCurve.chunk_tokens": st.sampled_from([0, 16, MOST_TOKENS, 2**32 - 1]),
            "tokens": st.sampled_from([0, 32, 64, 2**32 - 1]),
            "plateau_tokens_per_s": amounts,
            "measured_tokens_per_s": amounts,
            "scatter": amounts,
        },
    )
)


@pytest.fixture
async def raw(embedded_redis_server: RedisServer) -> AsyncIterator[Any]:
    client: Redis = Redis.from_url(embedded_redis_server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def registry(embedded_redis_server: RedisServer, cluster: str) -> AsyncIterator[RedisRegistry]:
    found = RedisRegistry(embedded_redis_server.url, cluster)
    yield found
    await found.close()


async def put(raw: Any, cluster: str, found: list[tuple[bytes, Any]]) -> None:
    pipe = raw.pipeline(transaction=False)
    for member, value in found:
        lease = keys.worker(cluster, "").encode() + member
        pipe.unlink(lease)
        pipe.sadd(keys.workers(cluster), member)
        if value == "string":
            pipe.set(lease, b"\xff")
        elif value is not None:
            pipe.hset(lease, mapping={"worker": value, "incarnation": b"\xff"})
    await pipe.execute()


def collected(fuzz: Any, strategy: st.SearchStrategy[Any], share: float) -> list[Any]:
    """Return examples for a test that puts them into a store."""
    drawn: list[Any] = []

    @fuzz.settings(share)
    @given(found=strategy)
    def collect(found: Any) -> None:
        drawn.append(found)

    collect()
    return drawn


def test_accepted_workers_can_be_connected_to_and_planned_with(fuzz: Any) -> None:
    @fuzz.settings(4)
    @given(found=st.lists(messages(Worker, known_worker), max_size=6))
    def holds(found: list[Worker]) -> None:
        workers = []
        for worker in found:
            try:
                workers.append(read_worker(worker.id.encode(), worker.SerializeToString()))
            except Unusable as error:
                assert str(error)
        takes(workers)
        fuzz.counts["workers into gateway and planner"] += len(found)

    holds()


def takes(workers: list[Worker]) -> None:
    """A gateway's links and a planner's decisions are made of them."""
    tasks = Mock(spec=TaskOwner)
    tasks.spawn.side_effect = lambda _name, coroutine: (coroutine.close(), Mock())[1]
    fleet = WorkerLinks(
        hello=Hello(), transport=Mock(), traffic=Mock(), tasks=tasks, clock=SystemClock(), random_bytes=token_bytes
    )
    fleet.update(workers, Mock())
    for link in fleet.links:
        link._worker = link._registered  # as if it had reported so itself
        view = link.view()
        if view is not None:
            assert math.isfinite(view.backlog_ns(NOW_NS) + view.speed.prompt_ns(8_000, 8_000**2))
            assert math.isfinite(view.speed.decode_ns(100, 100_000))
    clock, registry = ManualClock(NOW_NS), CollectorRegistry()
    identity = Identity("planner", NOW_NS, MODE_ADVISORY)
    state = PlannerState(identity, lag_ns=0, window_ns=10**9, kept_decisions=8)
    registry.register(PlannerCollector(state, clock))
    modes = ModeApi(Admin(state, RedisPlannerStore("redis://127.0.0.1:1/0", "fuzz"), RecordingBus(), clock, token=""))
    limits = LimitsApi(Admin(state, None, RecordingBus(), clock, token=""))
    state.take_workers(workers, clock.now_ns())
    state.decide(clock.now_ns())
    client = TestClient(make_planner_api(state, clock, registry, modes, limits))
    for path in PLANNER_PATHS:
        assert client.get(path).status_code == 200


async def test_valid_workers_are_seen_beside_any_entries(
    raw: Any, registry: RedisRegistry, cluster: str, fuzz: Any
) -> None:
    for found in collected(fuzz, st.lists(entries, max_size=20), 2):
        for worker in GOOD:
            await registry.announce(worker, lease_ms=LEASE_MS)
        await put(raw, cluster, found)
        seen = await registry.workers()
        assert [worker for worker in seen if worker.id.startswith("good")] == GOOD
        assert not [fault for worker in seen for fault in faults(worker)]
        takes(seen)
        fuzz.counts["entries in the registry"] += len(found)


async def test_a_watch_survives_any_messages_and_keys_of_another_type(
    raw: Any, registry: RedisRegistry, cluster: str, fuzz: Any
) -> None:
    lists: list[list[str]] = []

    async def follow() -> None:
        async for workers in registry.watch(poll_ms=20):
            lists.append([worker.id for worker in workers])  # noqa: PERF401 - it never ends

    task = asyncio.get_running_loop().create_task(follow())
    for message in collected(fuzz, st.binary(max_size=64), 2):
        await raw.publish(keys.worker_changes(cluster), message)
    for kind in ("set", "hash"):
        key = keys.workers(cluster) if kind == "set" else keys.worker(cluster, GOOD[0].id)
        await raw.unlink(key)
        await raw.set(key, b"nonsense")
        for worker in GOOD:
            await registry.announce(worker, lease_ms=LEASE_MS)
        lists.clear()
        async with asyncio.timeout(10):
            while not lists or lists[-1] != [worker.id for worker in GOOD]:
                assert not task.done(), task
                await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])


async def test_an_invalid_entry_is_logged_and_counted_once_however_often_it_is_read(
    raw: Any, registry: RedisRegistry, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await put(raw, cluster, [(b"\xff", b"\xff"), (b"a", Worker(id="b", address="h:1").SerializeToString())])
    for _ in range(3):
        assert await registry.workers() == []
    assert (registry.stats().skipped, registry.stats().unusable) == (2, 2)
    assert capsys.readouterr().out.count("registry entry is not a worker") == 2
    shown = CollectorRegistry()
    shown.register(RegistryCollector(registry))
    assert b"fulcrum_registry_skipped_entries_total 2.0" in generate_latest(shown)
    await raw.unlink(*(keys.worker(cluster, "").encode() + member for member in (b"\xff", b"a")))
    await registry.workers()
    await registry.workers()
    assert registry.stats().unusable == 0
    assert await raw.scard(keys.workers(cluster)) == 0, "an entry without a lease is removed, whatever it is"


async def test_more_dead_ids_than_connections_are_no_outage(raw: Any, registry: RedisRegistry, cluster: str) -> None:
    await registry.announce(GOOD[0], lease_ms=LEASE_MS)
    await put(raw, cluster, [(b"dead-%d" % number, None) for number in range(500)])
    assert await registry.workers() == GOOD[:1]
    assert await raw.scard(keys.workers(cluster)) == 1


async def test_a_prefix_lookup_is_answered_beside_keys_of_another_type(
    raw: Any, embedded_redis_server: RedisServer, cluster: str
) -> None:
    index = RedisKvIndex(embedded_redis_server.url, cluster, lookup_timeout_s=5)
    blocks = [bytes([number]) * 16 for number in range(3)]
    await index.publish("sim", "good", stored=blocks, removed=())
    await raw.set(keys.kv_blocks(cluster, "sim", "a"), b"\xff")
    await raw.hset(keys.kv_blocks(cluster, "sim", "b"), "a", "b")
    await raw.lpush(keys.kv_blocks(cluster, "sim", "c"), "a")
    found = await index.longest_prefix([PrefixQuery("sim", prompts=[blocks], worker_ids=["a", "b", "c", "good"])])
    assert found == [[{"good": 3}]]
    await index.publish("sim", "a", stored=blocks[:1], removed=())
    await index.renew("sim", "a", lease_ms=LEASE_MS)
    found = await index.longest_prefix([PrefixQuery("sim", prompts=[blocks], worker_ids=["a", "good"])])
    assert found == [[{"a": 1, "good": 3}]], "its worker writes it again"
    await index.close()


async def test_stored_step_times_are_finite_whatever_was_there_before(
    raw: Any, embedded_redis_server: RedisServer, cluster: str, fuzz: Any
) -> None:
    store, key = RedisStepTimes(embedded_redis_server.url, cluster), keys.step_time(cluster, *KEY.parts)
    base = PROFILES["llama-8b-h100"].step_time
    work = StepWork(4_096, 4, 8_192, 256, 10**6, 4 * 1_024**2)
    for fit, curve in collected(fuzz, st.tuples(fits, curves), 4):
        await raw.hset(key, mapping={kind.value: fit for kind in StepKind} | {CURVE_FIELD: curve})
        for found in (combine(base, await store.load(KEY)), getattr(await store.load_curve(KEY), "saturation", None)):
            model = getattr(found, "model", found)
            if model is not None:
                assert math.isfinite(model.step_ns(work)) and model.step_ns(work) >= 0
                assert 1 <= knee_of(model, MOST_TOKENS)[0] <= MOST_TOKENS
        kept = await store.load_curve(KEY)
        if kept is not None:
            assert 1 <= kept.saturation.chunk_tokens <= MOST_TOKENS
            assert math.isfinite(kept.saturation.scatter) and isinstance(kept.saturation.is_whole, bool)
        fuzz.counts["step times"] += 1
    await raw.unlink(key)
    await raw.set(key, b"nonsense")
    assert await store.load(KEY) == {} and await store.load_curve(KEY) is None
    assert not await asyncio.wait_for(_saved(store, raw, key), 5), "a key of another type is replaced"
    await store.close()


async def _saved(store: RedisStepTimes, raw: Any, key: str) -> bool:
    from libs.perfmodel.learner import FittedModel, KindFit

    await store.save(KEY, {StepKind.DECODE: FittedModel(PROFILES["llama-8b-h100"].step_time, decode=KindFit(9))})
    return StepKind.DECODE not in await store.load(KEY)


async def test_any_stored_mode_is_read_as_a_mode_or_none(
    raw: Any, embedded_redis_server: RedisServer, cluster: str, fuzz: Any
) -> None:
    modes = RedisPlannerStore(embedded_redis_server.url, cluster)
    for word in collected(fuzz, st.binary(max_size=32) | st.sampled_from([b"off", b"advisory", b"OFF"]), 2):
        await raw.set(keys.planner_mode(cluster), word)
        kept = await modes.load()
        assert kept is not None and kept.mode in (*MODES.values(), None)
    await raw.unlink(keys.planner_mode(cluster))
    await raw.lpush(keys.planner_mode(cluster), "off")
    assert await modes.load() == StoredPlannerSettings(None, None)
    assert await modes.keep(MODES["off"]) and await modes.load() == StoredPlannerSettings(Mode.Value("MODE_OFF"), None)
    await modes.close()


async def test_any_stored_limits_are_read_as_limits_or_none(
    raw: Any, embedded_redis_server: RedisServer, cluster: str, fuzz: Any
) -> None:
    store = RedisPlannerStore(embedded_redis_server.url, cluster)
    written = LimitsBody(pinned=["d"], quiet_hours=["22:00-06:00"]).model_dump_json().encode()
    for value in collected(
        fuzz, st.binary(max_size=64) | st.integers(0, len(written)).map(lambda end: written[:end]), 2
    ):
        await raw.set(keys.planner_limits(cluster), value)
        kept = await store.load()
        assert kept is not None and read_limits(kept.limits).limits().moves_per_s > 0
    await store.close()


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (Worker(address="h:1"), "id"),
        (Worker(id="w0", address="h"), "host:port"),
        (Worker(id="w0", address="unix:/tmp/x:1"), "host:port"),
        (Worker(id="w0", address="h:1", gpus=2**31), "gpus"),
        (Worker(id="w0", address="h:1", assignment=Assignment(role=99)), "role 99"),  # type: ignore[arg-type]
        (Worker(id="w0", address="h:1", assignment=Assignment(budget_tokens=2**31)), "budget"),
        (Worker(id="w0", address="h:1", capabilities=Capabilities(kv_blocks=2**32 - 1)), "kv_blocks"),
        (Worker(id="w0", address="h:1", capabilities=Capabilities(compute=Compute(peak_flops_per_s=math.nan))), "peak"),
        (Worker(id="w0", address="h:1", capabilities=Capabilities(compute=Compute(peak_bytes_per_s=1e-300))), "peak"),
    ],
)
def test_the_reason_names_the_fault_of_a_worker(worker: Worker, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        read_worker(worker.id.encode(), worker.SerializeToString())


async def test_a_suite_serves_and_restarts_despite_any_entries(live_suite: RunningSuite, fuzz: Any) -> None:
    cluster, client = live_suite.ready["cluster"], Redis.from_url(live_suite.ready["redis"])
    found = collected(fuzz, entries, 4)
    await put(client, cluster, [*found, (b"\xff\xfe", b"\xff"), (b"\xff\xfd", None)])
    await client.publish(keys.worker_changes(cluster), b"\xff")
    async with httpx.AsyncClient(timeout=30) as http:
        await _serves(http, live_suite)
        text = (await http.get(f"{live_suite.ready['planner']}/metrics")).text
        assert "fulcrum_registry_unusable_entries" in text
    await client.aclose()


async def _serves(http: httpx.AsyncClient, suite: RunningSuite) -> None:
    body = {"model": "sim", "prompt": "hello", "max_tokens": 3}
    assert (await http.post(f"{suite.gateway}/v1/completions", json=body)).status_code == 200
