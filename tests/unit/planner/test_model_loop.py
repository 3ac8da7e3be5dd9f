"""Tests of the loops around the model keeper, over a catalogue and a registry in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, PoolWorker, Worker
from libs.runtime.clock import SystemClock
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import SystemTransport
from libs.stores.catalogue import ModelEntry, ModelUse
from libs.testing.memory.models import MemoryCatalogue
from libs.testing.memory.registry import MemoryRegistry
from libs.testing.memory.store import MemoryStore
from services.planner.models.keeper import Knobs, ModelKeeper
from services.planner.models.run import ModelLoop

SEED = [ModelEntry("a", "builtin:sim", 1, tpot_ms=25.0), ModelEntry("b", "builtin:sim", 2)]


class Rig:
    """A loop that leads, and acts if requested."""

    def __init__(self, *, acts: bool = False) -> None:
        self.server = MemoryStore()
        self.store = MemoryCatalogue(self.server, "test")
        self.registry = MemoryRegistry(self.server, "test")
        self.tasks = TaskOwner()
        self.keeper = ModelKeeper(Knobs())
        self.targets: dict[str, float] = {}
        self.loop = ModelLoop(
            self.keeper,
            self.store,
            SystemTransport(CommonSettings()),
            self.tasks,
            SystemClock(),
            planner_id="p",
            token="secret",
            leads=lambda: True,
            term=lambda: 1,
            outrun=lambda: None,
            acts=lambda: acts,
            targets=self.targets.update,
        )

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    rig.loop.start(rig.registry, list(SEED))
    try:
        yield rig
    finally:
        await rig.tasks.close()
    assert rig.tasks.error is None


async def test_models_of_the_settings_are_put_into_the_catalogue_with_their_targets() -> None:
    async with running(Rig()) as rig:
        await rig.until(lambda: rig.keeper.found.entries.keys() == {"a", "b"})
        assert rig.targets == {"a": 25.0}
        await rig.until(lambda: rig.keeper.outlooks(0))


async def test_a_catalogue_that_was_emptied_with_its_redis_is_written_again_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(Rig()) as rig:
        await rig.until(lambda: len(rig.keeper.found.entries) == 2)
        rig.server.kill()
        rig.server.start()
        seen, ring = [], rig.server.news.ring

        def note() -> None:
            seen.append(set(rig.server.models.read("test").entries))
            ring()

        monkeypatch.setattr(rig.server.news, "ring", note)
        await rig.until(lambda: {"a", "b"} in seen)
        assert {"a"} not in seen and {"b"} not in seen, "no reader may take one of the models for removed"


async def test_a_removed_last_model_stays_removed_if_the_loop_reads_before_the_keeper_forgets_it() -> None:
    async with running(Rig()) as rig:
        await rig.until(lambda: len(rig.keeper.found.entries) == 2)
        for name in ("a", "b"):
            await rig.store.remove(name)
        await rig.until(lambda: not rig.keeper.found.entries)
        assert (await rig.store.read()).entries == {}


async def test_a_removed_last_model_stays_removed() -> None:
    async with running(Rig()) as rig:
        await rig.until(lambda: len(rig.keeper.found.entries) == 2)
        for name in ("a", "b"):
            await rig.store.remove(name)
            rig.keeper.forget(name)
        await rig.store.use("g", {}, lease_ms=1_000)
        await asyncio.sleep(0)
        assert (await rig.store.read()).entries == {}
        assert rig.keeper.found.entries == {}


async def test_an_unreachable_worker_is_called_again_and_nothing_fails() -> None:
    async with running(Rig(acts=True)) as rig:
        await rig.until(lambda: len(rig.keeper.found.entries) == 2)
        worker = Worker(id="w", incarnation=1, state=WORKER_STATE_READY, address="127.0.0.1:1")
        worker.assignment.model, worker.assignment.epoch = "other", 1
        worker.pool.CopyFrom(PoolWorker(address="127.0.0.1:1", since_unix_ns=1))
        await rig.registry.announce(worker, lease_ms=60_000)
        await rig.store.use("g", {"a": ModelUse(1, 1, 1, 1, 1)}, lease_ms=60_000)
        await rig.until(lambda: rig.keeper.switches["gone"] >= 2)
