"""Contract tests of the store of step times in Redis, on disk, in both, in memory, and of the fake of tests."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from libs.perfmodel.learner import FittedModel, KindFit, StepKind
from libs.perfmodel.profiles import PROFILES
from libs.policy.worker.saturation import Point, PrefillCurve, Saturation
from libs.stores import steps
from libs.stores.steps import FileStepTimes, LayeredStepTimes, RedisStepTimes, StepTimeKey, StepTimeStore
from libs.testing.contract.databases import Database, MemoryDatabase, RedisDatabase
from libs.testing.servers.stores import RedisServer
from libs.testing.workers.hosts import RecordingStepTimes

PATIENT_S = 20
KEY = StepTimeKey("torch", "org/model: a/b", "cuda:NVIDIA H200")
FIRST = FittedModel(PROFILES["llama-8b-h100"].step_time, prefill=KindFit(20, 0.25, 0.5))
SECOND = FittedModel(PROFILES["smollm2-135m-cpu"].step_time, decode=KindFit(40, 0.125, 0.25))
CURVE = PrefillCurve(Saturation(96, 540.5, (Point(32, 400.0, 410.5), Point(96, 530.0, 525.0)), SECOND.model), 17)
OTHER_CURVE = PrefillCurve(Saturation(704, 9e4, (Point(704, 8.8e4, 8.9e4),), FIRST.model), 18)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the bound on Redis: a busy machine may delay it by half a second, and would then lose what is saved."""
    monkeypatch.setattr(steps, "SOCKET_TIMEOUT_MS", PATIENT_S * 1000)
    monkeypatch.setattr(steps, "CALL_TIMEOUT_S", PATIENT_S)


@pytest.fixture(params=["redis", "files", "layered", "memory", "recording"])
async def store(
    request: pytest.FixtureRequest, redis: RedisServer, cluster: str, tmp_path: Path
) -> AsyncIterator[StepTimeStore]:
    files, shared = FileStepTimes(tmp_path / "not" / "yet"), RedisStepTimes(redis.url, cluster)
    stores: dict[str, StepTimeStore] = {
        "redis": shared,
        "files": files,
        "layered": LayeredStepTimes((files, shared)),
        "memory": MemoryDatabase().step_times(cluster),
        "recording": RecordingStepTimes(),
    }
    yield stores[request.param]
    for each in stores.values():
        await each.close()


async def test_a_key_that_was_never_saved_has_no_data(store: StepTimeStore) -> None:
    assert await store.load(KEY) == {}


async def test_each_kind_of_step_is_stored_separately_and_the_last_save_wins(store: StepTimeStore) -> None:
    await store.save(KEY, {StepKind.PREFILL: FIRST, StepKind.DECODE: FIRST})
    await store.save(KEY, {StepKind.DECODE: SECOND})
    await store.save(KEY, {})
    assert await store.load(KEY) == {StepKind.PREFILL: FIRST, StepKind.DECODE: SECOND}


async def test_the_last_prefill_measurement_is_stored_beside_the_fits(store: StepTimeStore) -> None:
    assert await store.load_curve(KEY) is None
    await store.save(KEY, {StepKind.PREFILL: FIRST})
    await store.save_curve(KEY, OTHER_CURVE)
    await store.save_curve(KEY, CURVE)
    assert await store.load_curve(KEY) == CURVE
    assert await store.load(KEY) == {StepKind.PREFILL: FIRST}
    assert await store.load_curve(StepTimeKey(KEY.engine, KEY.model, "cpu")) is None


async def test_keys_have_separate_data(store: StepTimeStore) -> None:
    await store.save(KEY, {StepKind.MIXED: FIRST})
    for other in (
        StepTimeKey("vllm", KEY.model, KEY.device),
        StepTimeKey(KEY.engine, "org/model", KEY.device),
        StepTimeKey(KEY.engine, KEY.model, ""),
        replace(KEY, variant="tp4, vllm 0.32.0"),
    ):
        assert await store.load(other) == {}


async def test_only_one_worker_at_a_time_may_measure_for_a_key(store: StepTimeStore) -> None:
    other = replace(KEY, variant="8 threads")
    assert await store.claim(KEY, lease_s=60)
    assert not await store.claim(KEY, lease_s=60)
    assert await store.claim(other, lease_s=60)
    await store.release(KEY)
    await store.release(KEY)
    assert await store.claim(KEY, lease_s=60)
    assert not await store.claim(other, lease_s=60)


async def test_a_claimed_key_can_be_claimed_by_another_store_after_release_or_expiry(
    tmp_path: Path, redis: RedisServer, cluster: str
) -> None:
    memory = MemoryDatabase()

    def stores() -> tuple[StepTimeStore, ...]:
        both = FileStepTimes(tmp_path / "both"), RedisStepTimes(redis.url, f"{cluster}-both")
        shared = RedisStepTimes(redis.url, cluster), memory.step_times(cluster)
        return FileStepTimes(tmp_path), *shared, LayeredStepTimes(both)

    one, two = stores(), stores()
    for first, second in zip(one, two, strict=True):
        assert await first.claim(KEY, lease_s=60)
        assert not await second.claim(KEY, lease_s=60)
        await second.release(KEY)
        assert not await second.claim(KEY, lease_s=60), "only its holder releases it"
        await first.release(KEY)
        assert await second.claim(KEY, lease_s=60)
    for each in (*one, *two):
        await each.close()


async def test_a_claim_ends_with_its_holder(tmp_path: Path, redis: RedisServer, cluster: str) -> None:
    gone, files = FileStepTimes(tmp_path), FileStepTimes(tmp_path)
    assert await gone.claim(KEY, lease_s=60)
    await gone.close()
    assert await files.claim(KEY, lease_s=60)
    await files.close()
    databases: tuple[Database, ...] = (RedisDatabase(redis), MemoryDatabase())
    for database in databases:
        dead, shared = database.step_times(cluster), database.step_times(cluster)
        assert await dead.claim(KEY, lease_s=0.05)
        await dead.close()
        async with asyncio.timeout(10):
            while not await shared.claim(KEY, lease_s=60):
                await asyncio.sleep(0.01)
        await shared.close()


async def test_stores_that_are_away_or_unwritable_hold_nothing_and_raise_nothing(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    killed = MemoryDatabase()
    killed.server.kill()
    away: list[StepTimeStore] = [
        RedisStepTimes(f"unix://{tmp_path}/none.sock", "c"),
        FileStepTimes(in_the_way),
        killed.step_times("c"),
    ]
    for store in away:
        await store.save(KEY, {StepKind.PREFILL: FIRST})
        await store.save_curve(KEY, CURVE)
        assert await store.load(KEY) == {}
        assert await store.load_curve(KEY) is None
        assert await store.claim(KEY, lease_s=1), "a worker without others to wait for measures"
        await store.release(KEY)
        await store.close()


async def test_a_broken_file_is_treated_as_missing(tmp_path: Path) -> None:
    store = FileStepTimes(tmp_path)
    await store.save(KEY, {StepKind.PREFILL: FIRST, StepKind.DECODE: SECOND})
    (broken,) = tmp_path.rglob("prefill.json")
    broken.write_text("{")
    assert await store.load(KEY) == {StepKind.DECODE: SECOND}
    for nonsense in ("{", "{}", '{"chunk_tokens": 64}'):
        broken.with_name("prefill-curve.json").write_text(nonsense)
        assert await store.load_curve(KEY) is None


async def test_data_that_one_store_has_lost_comes_from_the_next(
    tmp_path: Path, redis: RedisServer, cluster: str
) -> None:
    shared = RedisStepTimes(redis.url, cluster)
    both = LayeredStepTimes((FileStepTimes(tmp_path), shared))
    await shared.save(KEY, {StepKind.PREFILL: SECOND, StepKind.DECODE: SECOND})
    await FileStepTimes(tmp_path).save(KEY, {StepKind.PREFILL: FIRST})
    assert await both.load(KEY) == {StepKind.PREFILL: FIRST, StepKind.DECODE: SECOND}
    await both.close()


@pytest.mark.parametrize("turned", [False, True])
async def test_the_latest_curve_of_several_stores_wins(
    tmp_path: Path, redis: RedisServer, cluster: str, *, turned: bool
) -> None:
    files, shared = FileStepTimes(tmp_path), RedisStepTimes(redis.url, cluster)
    older, newer = (shared, files) if turned else (files, shared)
    await older.save_curve(KEY, CURVE)
    await newer.save_curve(KEY, OTHER_CURVE)
    both = LayeredStepTimes((files, shared))
    assert await both.load_curve(KEY) == OTHER_CURVE
    await both.close()
