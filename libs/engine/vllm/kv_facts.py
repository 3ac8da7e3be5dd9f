"""Properties of vLLM's KV that only EngineCore has, as it writes them for the worker. Pure, without vLLM."""

from dataclasses import dataclass

from libs.perfmodel.kv_shape import KvShape


@dataclass(frozen=True, slots=True)
class KvFacts:
    """The properties of EngineCore's KV, written before it serves."""

    shape: KvShape
    order: str
    """The order of a block's dimensions in memory, by vLLM's name; empty if unknown."""
    has_states: bool
    """Whether the model has state-space layers, whose KV is a state."""
