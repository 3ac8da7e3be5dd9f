"""Construction of engines by name. Heavy packages are imported only at start, so a sim worker needs no torch."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from secrets import token_bytes
from types import MappingProxyType
from typing import Final

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.kv.blocks import RandomBytes
from libs.engine.local import LocalEngine
from libs.engine.port import Engine
from libs.engine.runner import Runner
from libs.engine.sim import SimGpu, SimRunner
from libs.engine.torch.runner import TorchRunner
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.runtime.clock import Clock

# Runners under the engine core; vllm has a core of its own.
RUNNERS: Final[Mapping[str, Callable[[EngineConfig], Runner]]] = MappingProxyType(
    {"torch": TorchRunner, "sim": SimRunner}
)


# Modules that an engine imports at start, if that takes seconds.
HEAVY: Final[Mapping[str, str]] = MappingProxyType(
    {"torch": "libs.engine.torch.step", "vllm": "libs.engine.vllm.launch"}
)


def import_heavy(name: str) -> None:
    """Import the modules that the engine needs at start, so that no model's load includes that time.

    A missing package is left to `start`, which says what to install.
    """
    if name in HEAVY:
        with suppress(ImportError):
            import_module(HEAVY[name])


def make_engine(
    name: str,
    config: EngineConfig,
    clock: Clock,
    *,
    random_bytes: RandomBytes = token_bytes,
    sim_gpu: SimGpu | None = None,
) -> Engine:
    """Return an engine that is not started yet. Raise StartupError for an unknown name.

    Missing packages are reported by `start`. `random_bytes` makes the KV handles of all engines but vllm, which
    makes its own. Sim engines that are given the same `sim_gpu` share it.
    """
    if name == "vllm":
        return VllmEngine(config, clock, VllmCore())
    if name == "sim" and sim_gpu is not None:
        return LocalEngine(SimRunner(config, sim_gpu), config, clock, random_bytes=random_bytes)
    make_runner = RUNNERS.get(name)
    if make_runner is None:
        raise StartupError(f"engine {name!r} is not one of {', '.join(RUNNERS)}, vllm")
    return LocalEngine(make_runner(config), config, clock, random_bytes=random_bytes)
