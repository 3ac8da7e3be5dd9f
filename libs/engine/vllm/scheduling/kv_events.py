"""vLLM's KV events, read where vLLM would send them to subscribers. Imports vLLM: for the EngineCore process."""

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.kv_cache_interface import FullAttentionSpec

from libs.engine.vllm.scheduling.block_hashes import Rehash


class Rehasher:
    """A publisher of vLLM's KV events that records one group of layers. Each group stores and evicts blocks of its
    own.
    """

    def __init__(self, rehash: Rehash, group: int) -> None:
        self._rehash = rehash
        self._group = group

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._rehash.cleared()
            elif event.group_idx != self._group:
                continue
            elif isinstance(event, BlockStored):
                salt = str((event.extra_keys or [None])[0] and event.extra_keys[0][-1])
                self._rehash.stored(event.block_hashes, event.parent_block_hash, salt, event.token_ids)
            elif isinstance(event, BlockRemoved):
                self._rehash.removed(event.block_hashes)

    def get_publisher_config(self) -> None:
        # No endpoint to which anybody could subscribe.
        ...

    def shutdown(self) -> None:
        # Nothing is open.
        ...


def whole_context_group(groups: Sequence[Any]) -> int:
    """Return the first group whose layers attend to all tokens, or 0. Sliding windows drop blocks that others can
    reuse.
    """
    return next((index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)), 0)
