"""Tests of vLLM's sleep with a fake EngineCore on a fake GPU; no CUDA is involved."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import DeviceMemory
from libs.engine.vllm.arguments import EXTENSION, can_sleep, sleep_arguments
from libs.engine.vllm.connectors import connector_of
from libs.engine.vllm.core import VllmCore

GB = 1_000_000_000
ALL = frozenset({"weights", "kv_cache"})
MB = 1024 * 1024


@dataclass
class MadeUpClient:
    """vLLM's client of an EngineCore with two ranks, as its source says they behave."""

    asleep: set[str] = field(default_factory=set)
    weights: str = "on the device"
    paused: bool = False
    dead: bool = False
    stuck: bool = False
    free_gb: tuple[int, int] = (78, 77)
    outputs_queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def sleep_async(self, level: int, mode: str) -> None:
        assert mode == "abort"
        self.paused, self.asleep = True, set(ALL)
        self.weights = {1: "in host memory", 2: "dropped"}[level]

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        if self.dead:
            raise RuntimeError("EngineCore encountered an issue.\nSee stack trace")
        woken = set(tags) if tags is not None else set(self.asleep)
        assert woken <= self.asleep
        if "weights" in woken:
            self.weights = "on the device" if self.weights == "in host memory" else "undefined"
        if "kv_cache" in woken:  # from here on sequences run
            assert self.weights == "on the device", self.weights
        self.asleep -= woken if not self.stuck else set()
        self.paused = bool(self.asleep)
        return not self.asleep

    async def collective_rpc_async(self, method: str) -> list[Any]:
        if method == "reload_weights":
            assert self.weights == "undefined", "there has to be room for them first"
            self.weights = "on the device"
            return [None, None]
        assert method == "fulcrum_device_memory"
        if self.dead:
            raise RuntimeError("dead")
        return [(80 * GB, free * GB) for free in self.free_gb]


@pytest.fixture
def client() -> MadeUpClient:
    return MadeUpClient()


@pytest.fixture
def core(client: MadeUpClient) -> VllmCore:
    core = VllmCore()
    core._client = client  # type: ignore[assignment]
    return core


@pytest.mark.parametrize(("keep_weights", "weights"), [(True, "in host memory"), (False, "dropped")])
async def test_weights_are_back_on_the_device_before_anything_runs(
    core: VllmCore, client: MadeUpClient, keep_weights: bool, weights: str
) -> None:
    for _ in range(2):
        await core.sleep(keep_weights=keep_weights)
        assert (client.weights, client.paused) == (weights, True)
        await core.wake()
        assert (client.weights, client.paused, client.asleep) == ("on the device", False, set())


async def test_messages_from_before_the_sleep_are_not_read_after_it(core: VllmCore, client: MadeUpClient) -> None:
    await core.sleep(keep_weights=True)
    client.outputs_queue.put_nowait("of before")
    await core.wake()
    client.outputs_queue.put_nowait("of now")
    assert client.outputs_queue.get_nowait() == "of now"


async def test_an_engine_that_died_asleep_or_wakes_in_part_is_an_error_in_one_line(
    core: VllmCore, client: MadeUpClient
) -> None:
    await core.sleep(keep_weights=True)
    client.stuck = True
    with pytest.raises(StartupError, match="a part of it still sleeps"):
        await core.wake()
    client.dead = True
    with pytest.raises(StartupError, match="the vllm engine did not wake: EngineCore encountered an issue") as caught:
        await core.wake()
    assert "\n" not in caught.value.message
    assert await core.device_memory() is None


async def test_free_memory_is_that_of_the_rank_with_least_left(core: VllmCore) -> None:
    assert await core.device_memory() == DeviceMemory(80 * GB, 77 * GB)


def config(connector: str = "OffloadingConnector", **changes: Any) -> EngineConfig:
    settings = {"spec_name": "CPUOffloadingSpec"} if connector == "OffloadingConnector" else {}
    return EngineConfig(
        None, "m", vllm_connector=connector, vllm_connector_config=settings, vllm_sleeps=True, **changes
    )  # fmt: skip


def test_an_engine_can_sleep_unless_its_kv_is_pinned_or_its_processes_cannot_be_called() -> None:
    def can(requested: EngineConfig, *, available: bool = True) -> bool:
        return can_sleep(requested, connector_of(requested), available=available)

    assert can(config())
    assert not can(config(), available=False)
    for given in ({"worker_extension_cls": "mine.Own"}, {"kv_cache_memory_bytes": GB}, {"enable_sleep_mode": False}):
        assert not can(config(vllm_arguments=given)), given
    pytest.importorskip("nixl", reason="a connector is known by its package")
    assert not can(config("NixlConnector"))


def test_a_serving_engine_leaves_sleeping_ones_their_part_of_memory() -> None:
    found = sleep_arguments(config(vllm_asleep_mb=8_000), 80_000 * MB)
    assert (found["enable_sleep_mode"], found["worker_extension_cls"]) == (True, EXTENSION)
    assert found["gpu_memory_utilization"] == pytest.approx(0.92 - 0.1)
    half = sleep_arguments(config(vllm_asleep_mb=8_000, gpu_share=0.5), 80_000 * MB)
    assert half["gpu_memory_utilization"] == pytest.approx(0.46 - 0.1)
    given = sleep_arguments(config(vllm_asleep_mb=8_000, vllm_arguments={"gpu_memory_utilization": 0.9}), 80_000 * MB)
    assert given["gpu_memory_utilization"] == pytest.approx(0.9 - 0.1)
    with pytest.raises(StartupError, match="FULCRUM_WORKER_ASLEEP_GPU_MEMORY_MB leaves nothing"):
        sleep_arguments(config(vllm_asleep_mb=8_000), 8_000 * MB)
