"""Fixtures that start every kind of engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from libs.engine.config import EngineConfig
from libs.engine.kv_shared_pool import PREFIX
from libs.engine.local import make_engine
from libs.engine.port import EngineIdentity
from libs.engine.vllm.engine import VllmEngine
from libs.model.info import sim_tokenizer
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EngineBench
from libs.testing.engines.vllm_core import SharedCore
from tests.contract.engine.engine_rig import (
    BLOCK,
    KINDS,
    Make,
)


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    pytest.importorskip("torch")
    from libs.testing.engines.real_model import write_random_llama

    # 32 a head: vLLM's attention takes no smaller ones.
    folder = write_random_llama(tmp_path_factory.mktemp("model") / "llama", hidden_size=128, eos_token_id=257)
    sim_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def sim_make() -> Make:
    """The built-in model on a device fast enough for short tests, and slow enough to be observed while it runs."""
    base = EngineConfig(None, "contract", block_size_tokens=BLOCK, sim_speedup=20.0)
    return lambda **changes: make_engine("sim", replace(base, **changes), SystemClock())


@pytest.fixture
def torch_make(random_llama: Path, pytestconfig: pytest.Config) -> Make:
    """Real attention over real blocks, in float32: bfloat16 rounds so coarsely that neighbours change near ties."""
    device = pytestconfig.getoption("device")
    base = EngineConfig(
        random_llama,
        "contract",
        device=device,
        dtype="float32",
        threads=1,
        block_size_tokens=BLOCK,
        kv_memory_mb=4,
        max_sequences=16,
    )
    return lambda **changes: make_engine("torch", replace(base, **changes), SystemClock())


@pytest.fixture(scope="session")
def on_cpu(pytestconfig: pytest.Config) -> None:
    """Skip tests of the CPU if the suite runs on a GPU."""
    if pytestconfig.getoption("device") != "cpu":
        pytest.skip("only on a CPU")


@pytest.fixture
def torch_shared_make(on_cpu: None, torch_make: Make, tmp_path: Path) -> Make:
    """The same engines, with pools that they read in one another's files."""
    return partial(torch_make, kv_shared_dir=tmp_path)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_cores(random_llama: Path, pytestconfig: pytest.Config) -> AsyncIterator[tuple[SharedCore, ...]]:
    """Two EngineCores for all tests: no test needs more engines, and each would take many seconds to start."""
    cores = tuple(SharedCore(_vllm_config(random_llama, pytestconfig.getoption("device"))) for _ in range(2))
    yield cores
    await asyncio.gather(*(core.end() for core in cores))


@pytest.fixture
def vllm_make(vllm_cores: tuple[SharedCore, ...], random_llama: Path, pytestconfig: pytest.Config) -> Make:
    """vLLM over NIXL, on the CPU or the GPU of --device."""
    free, base = iter(vllm_cores), _vllm_config(random_llama, pytestconfig.getoption("device"))
    return lambda **changes: VllmEngine(replace(base, **changes), SystemClock(), next(free))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_async_cores(on_cpu: None, random_llama: Path) -> AsyncIterator[tuple[SharedCore, ...]]:
    """The same engines with asynchronous scheduling."""
    from libs.engine.vllm import launch
    from libs.testing.engines.async_executor import configured_asynchronously

    cores = tuple(SharedCore(_vllm_config(random_llama)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "configured", configured_asynchronously)
        for core in cores:
            await core.start(_vllm_config(random_llama), EngineIdentity("shared", 1, "127.0.0.1:1"), lambda *_: None)
    yield cores
    await asyncio.gather(*(core.end() for core in cores))


@pytest.fixture
def vllm_async_make(vllm_async_cores: tuple[SharedCore, ...], random_llama: Path) -> Make:
    """vLLM with asynchronous scheduling over NIXL; on a GPU `vllm` has it by itself."""
    free = iter(vllm_async_cores)
    return lambda **changes: VllmEngine(replace(_vllm_config(random_llama), **changes), SystemClock(), next(free))


def _vllm_config(model: Path, device: str = "cpu") -> EngineConfig:
    base = EngineConfig(model, "contract", threads=1, block_size_tokens=32, kv_memory_mb=16, max_sequences=16)
    if device == "cpu":
        return base
    # In float32, and with as little memory as on a CPU: two engines share the GPU.
    arguments = {"kv_cache_memory_bytes": base.kv_memory_mb << 20, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    return replace(base, device=device, dtype="float32", vllm_arguments=arguments)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kinds of engines under test."""
    return str(request.param)


@pytest.fixture
def make(kind: str, request: pytest.FixtureRequest) -> Make:
    """Factory of engines of one kind."""
    return request.getfixturevalue(f"{kind}_make")


@pytest.fixture
async def bench(kind: str, make: Make, tmp_path: Path) -> AsyncIterator[EngineBench]:
    """Yield engines of each kind in turn."""
    bench = EngineBench(make, tmp_path if kind == "torch_shared" else None)
    yield bench
    bench.fetcher.gate.set()
    await bench.close()
    assert not list(tmp_path.glob(f"{PREFIX}*"))
