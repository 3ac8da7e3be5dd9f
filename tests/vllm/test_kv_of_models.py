"""Tests of differences between models' KV: groups of layers with different blocks, and number types."""

from types import SimpleNamespace

import pytest

from libs.contracts.hashing import block_hashes
from libs.engine.vllm.step_reports import Rehash

pytestmark = pytest.mark.vllm

BLOCK = 4
ROOT = b"root of a tenant"
TOKENS = list(range(12))


def test_blocks_of_sliding_windows_are_not_reported_and_not_moved() -> None:
    import torch
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    from libs.engine.vllm.kv_groups import Rehasher, whole_context_group

    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    sliding = KVCacheGroupSpec(["a"], SlidingWindowSpec(**shape, sliding_window=8))
    whole = KVCacheGroupSpec(["b"], FullAttentionSpec(**shape))
    assert [whole_context_group(groups) for groups in ([sliding, whole], [whole], [sliding])] == [1, 0, 0]

    def stored(name: bytes, parent: bytes | None, first: int, group: int) -> BlockStored:
        keys = [(ROOT.hex(),)] if parent is None else [None]
        tokens = TOKENS[first : first + BLOCK]
        return BlockStored([name], parent, tokens, BLOCK, None, None, None, extra_keys=keys, group_idx=group)

    rehash = Rehash(BLOCK)
    rehasher = Rehasher(rehash, 1)
    rehasher.publish(SimpleNamespace(events=[stored(b"x", None, 0, 0), stored(b"x", None, 0, 1)]))
    rehasher.publish(SimpleNamespace(events=[BlockRemoved([b"x"], None, group_idx=0), stored(b"y", b"x", 4, 1)]))
    assert rehash.take() == (block_hashes(ROOT, TOKENS, BLOCK)[:2], [])
    rehasher.publish(SimpleNamespace(events=[BlockRemoved([b"x"], None, group_idx=1)]))
    assert rehash.take() == ([], block_hashes(ROOT, TOKENS, BLOCK)[:1])


def test_only_the_uncached_part_of_a_prompt_counts_as_transferred() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from libs.engine.vllm.scheduler import external_tokens

    request = Request("one", list(range(100)), SamplingParams(max_tokens=1), None)
    assert external_tokens(request) == 0
    request.num_computed_tokens = 100
    request.prefill_stats.set(num_prompt_tokens=100, num_local_cached_tokens=64, num_external_cached_tokens=36)
    assert external_tokens(request) == 36
