"""Test of a stop signal before the model is loaded."""

import asyncio

import pytest

from libs.engine.kv_port import KvFetcher
from libs.engine.local import LocalEngine
from libs.engine.port import EngineIdentity, Progress
from libs.engine.sim import SimRunner
from libs.model.info import load_model_info
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.testing.workers.hosts import RecordingBus, RecordingKvIndex, RecordingRegistry, RecordingStepTimes
from libs.worker.run import WorkerPorts, run_worker
from libs.worker.settings import WorkerSettings

pytestmark = pytest.mark.system


class EndlessLoad(LocalEngine):
    """An engine whose weights never arrive."""

    def __init__(self, settings: WorkerSettings) -> None:
        config = settings.engine_config("sim")
        super().__init__(SimRunner(config), config, SystemClock())
        self.loading = asyncio.Event()

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        self.loading.set()
        await asyncio.Event().wait()


async def test_a_worker_stopped_while_it_loads_ends_at_once() -> None:
    settings = WorkerSettings.model_validate({"engine": "sim"})
    engine, registry = EndlessLoad(settings), RecordingRegistry()
    model = load_model_info(settings.model_path)
    ports = WorkerPorts(
        engine=engine, registry=registry, kv_index=RecordingKvIndex(), step_times=RecordingStepTimes(),
        bus=RecordingBus(), model=model
    )  # fmt: skip
    tasks, stopping = TaskOwner(), asyncio.Event()
    ready: list[str] = []
    worker = asyncio.create_task(run_worker(settings, ports, SystemClock(), tasks, stopping, ready=ready.append))
    async with asyncio.timeout(5):
        await engine.loading.wait()
        stopping.set()
        await worker
    assert not registry.seen
    assert ready == []
    assert not len(tasks)
