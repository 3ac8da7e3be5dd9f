"""What starting EngineCore brings."""

from dataclasses import dataclass

from libs.engine.port import Capabilities
from libs.engine.vllm.connectors import Handing
from libs.engine.vllm.scheduling.dummy_steps import DummySteps
from libs.engine.vllm.scheduling.running_step import Board


@dataclass(frozen=True, slots=True)
class StartedCore:
    """What is known once EngineCore serves."""

    capabilities: Capabilities
    device: str
    handing: Handing
    """How it hands sequences over."""
    board: Board
    """Which step it runs."""
    dummies: DummySteps
    """Which dummy steps it has run."""
