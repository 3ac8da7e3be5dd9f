"""Engines by name, imported only when asked for: a sim worker needs no torch."""

from typing import Final

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine
from libs.engine.port import Engine
from libs.engine.runner import Runner
from libs.engine.sim.runner import SimRunner
from libs.runtime.clock import Clock

ENGINES: Final = ("torch", "sim")


def make_engine(name: str, config: EngineConfig, clock: Clock) -> Engine:
    """An engine that is not started yet; raises StartupError for an unknown name or a missing package."""
    if name == "sim":
        return LocalEngine(SimRunner(config), config, clock)
    if name == "torch":
        return LocalEngine(_torch_runner(config), config, clock)
    raise StartupError(f"engine {name!r} is not one of {', '.join(ENGINES)}")


def _torch_runner(config: EngineConfig) -> Runner:
    try:
        from libs.engine.torch.runner import TorchRunner  # noqa: PLC0415 - gigabytes that only this engine needs
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("libs."):
            raise
        raise StartupError(
            f"engine torch needs the package {error.name!r}: install fulcrum with its torch extra"
            " (pip install 'fulcrum[torch]')"
        ) from None
    return TorchRunner(config)
