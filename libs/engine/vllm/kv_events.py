"""vLLM's KV events, taken where vLLM would send them to subscribers. Imports vLLM: for the EngineCore process."""

from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from libs.engine.vllm.rehash import Rehash


class Rehasher:
    """vLLM's publisher of KV events."""

    def __init__(self, rehash: Rehash) -> None:
        self._rehash = rehash

    def publish(self, batch: Any) -> None:
        """Of one step."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                salt = str((event.extra_keys or [None])[0] and event.extra_keys[0][-1])
                self._rehash.stored(event.block_hashes, event.parent_block_hash, salt, event.token_ids)
            elif isinstance(event, BlockRemoved):
                self._rehash.removed(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._rehash.cleared()

    def get_publisher_config(self) -> None:
        """Nobody can subscribe."""

    def shutdown(self) -> None:
        """Nothing is open."""
