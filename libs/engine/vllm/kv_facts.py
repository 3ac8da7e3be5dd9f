"""What EngineCore alone knows of its KV, as it leaves it for the worker. Pure, without vLLM."""

from dataclasses import dataclass

from libs.perfmodel.kv_shape import KvShape


@dataclass(frozen=True, slots=True)
class KvFacts:
    """Written before EngineCore serves."""

    shape: KvShape
    order: str
    """Of a block's dimensions in memory, by vLLM's name; empty: not known."""
    has_states: bool
    """Whether state-space layers are among the model's."""
