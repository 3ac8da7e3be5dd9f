from dataclasses import dataclass

from libs.engine.port import Capabilities
from libs.engine.vllm.connectors import ConnectorSession
from libs.engine.vllm.scheduling.dummy_steps import DummySteps
from libs.engine.vllm.scheduling.running_step import Board


@dataclass(frozen=True, slots=True)
class StartedCore:
    """The properties of an EngineCore that serves, and what it shares with the worker."""

    capabilities: Capabilities
    device: str
    handing: ConnectorSession
    """The connector by which it hands sequences over."""
    board: Board
    """The board that shows its running step."""
    dummies: DummySteps
    """The ring with the dummy steps that it has run."""
