"""Detect NIXL reads that left blocks unfilled, by random words written into the blocks beforehand.

NIXL reports a read as done, and vLLM starts its sequence on whatever the blocks contain. If NIXL or vLLM left out a
part, that is KV of another prompt. So a random word is written at both ends of each block, in the layers that are
checked, before the read begins. A block that still has its word at the end was not filled. Runs in the processes that
compute, against the same vLLM as libs/engine/vllm/scheduler.py.
"""

import logging
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch

from libs.engine.vllm.connectors import UNCHECKED

log = logging.getLogger("vllm.fulcrum")

# The number of regions, K or V of a layer, that are checked in each read of each group of layers; 0 for all. In
# NIXL's configuration.
REGIONS_KEY: Final = "fulcrum_marked_regions"
DEFAULT_REGIONS: Final = 4
WORD_BYTES: Final = 8
# A region whose blocks may belong to any group of layers.
ANY_GROUP: Final = -1
ATTRIBUTE: Final = "_fulcrum_marks"

Blocks = Sequence[Sequence[int]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks of one layer, or of its K or V, in the memory of a KV pool."""

    words: torch.Tensor  # 1D int64, the storage that contains the region
    offset_words: int
    """The start of block 0 in the storage."""
    stride_words: int
    block_words: int
    group: int

    def ends(self, blocks: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return the first and last word of each block, by their index in the storage."""
        first = self.offset_words + blocks * self.stride_words
        return np.concatenate([first, first + self.block_words - 1])


@dataclass(frozen=True, slots=True)
class _Marked:
    word: int
    places: list[tuple[torch.Tensor, torch.Tensor]]
    """(words, indices) of each storage."""


class PullMarks:
    """The marks of reads that have not ended yet."""

    def __init__(self, regions: Sequence[Region], most_regions: int) -> None:
        """`most_regions` of each group are checked in a read, drawn anew for each read; 0 for all."""
        self._regions = regions
        self._most = most_regions or len(regions)
        self._reads: dict[str, _Marked] = {}

    @property
    def has_regions(self) -> bool:
        """False if nothing can be marked."""
        return bool(self._regions)

    def place(self, name: str, groups: Blocks) -> None:
        """Mark the blocks, by group of layers, that a read is about to fill. Return once the device has done so."""
        indices: dict[int, list[np.ndarray[Any, Any]]] = {}
        storages: dict[int, torch.Tensor] = {}
        for group, numbers in enumerate(groups):
            if not numbers:
                continue
            blocks = np.asarray(numbers, dtype=np.int64)
            # Drawn for each group by itself: a sample of all regions may have none of a group.
            regions = [region for region in self._regions if region.group in (ANY_GROUP, group)]
            for region in random.sample(regions, min(self._most, len(regions))):
                storage = region.words.data_ptr()
                storages[storage] = region.words
                indices.setdefault(storage, []).append(region.ends(blocks))
        # Not zero and not all ones, which fresh memory and cleared blocks hold.
        word = secrets.randbits(62) + 1
        places = []
        for storage, found in indices.items():
            words = storages[storage]
            index = torch.from_numpy(np.concatenate(found))
            places.append((words, _beside(words, partial(_fill, words, index, word))))
        self._reads[name] = _Marked(word, places)

    def take(self, name: str) -> tuple[int, int]:
        """Forget a read that has ended. Return how many of its marks are left, and how many there were."""
        marked = self._reads.pop(name, None)
        if marked is None:
            return 0, 0
        left = sum(_beside(words, partial(_count, words, index, marked.word)) for words, index in marked.places)
        return left, sum(len(index) for _, index in marked.places)

    def forget_others(self, names: Iterable[str]) -> None:
        """Forget all reads but these."""
        if self._reads:
            kept = set(names)
            self._reads = {name: each for name, each in self._reads.items() if name in kept}


def _fill(words: torch.Tensor, index: torch.Tensor, word: int) -> torch.Tensor:
    index = index.to(words.device)
    words.index_fill_(0, index, word)
    return index


def _count(words: torch.Tensor, index: torch.Tensor, word: int) -> int:
    return int((words[index] == word).sum())


def _beside(words: torch.Tensor, work: Callable[[], T]) -> T:
    # Another stream than the one that computes: NIXL reads outside of streams, and waits for no step either.
    if not words.is_cuda:
        return work()
    stream = torch.cuda.Stream(words.device)
    with torch.cuda.stream(stream):
        result = work()
    stream.synchronize()
    return result


def install(worker_class: Any) -> None:
    """Make NIXL's reading worker mark blocks before each read, and fail reads that are found to have left some out."""
    if hasattr(worker_class, ATTRIBUTE):  # vLLM loads plug-ins more than once
        return
    setattr(worker_class, ATTRIBUTE, None)
    read, pop = worker_class._read_blocks_for_req, worker_class._pop_done_transfers

    def read_marked(self: Any, req_id: str, meta: Any) -> None:
        _unless_unknown(self, lambda: _place(self, req_id, meta))
        read(self, req_id, meta)

    def pop_checked(self: Any, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = pop(self, transfers)
        _unless_unknown(self, lambda: _check(self, transfers, done, failed))
        return done, failed

    worker_class._read_blocks_for_req = read_marked
    worker_class._pop_done_transfers = pop_checked


def _unless_unknown(worker: Any, work: Callable[[], None]) -> None:
    """Place or check marks. If that fails, log it and go on without marks."""
    try:
        work()
    except Exception:
        # It uses private parts of vLLM. One that is not as expected must not end EngineCore, with all its sequences.
        log.exception(UNCHECKED)
        setattr(worker, ATTRIBUTE, PullMarks([], 0))


def _marks(worker: Any) -> PullMarks:
    marks: PullMarks | None = getattr(worker, ATTRIBUTE)
    if marks is None:
        config = worker.vllm_config.kv_transfer_config
        marks = PullMarks(regions_of(worker), int(config.get_from_extra_config(REGIONS_KEY, DEFAULT_REGIONS)))
        setattr(worker, ATTRIBUTE, marks)
    return marks


def _place(worker: Any, req_id: str, meta: Any) -> None:
    marks = _marks(worker)
    if marks.has_regions and meta.remote.engine_id in worker._remote_agents:
        marks.place(req_id, _to_fill(worker, meta))


def _check(worker: Any, transfers: dict[str, list[int]], done: set[str], failed: set[str]) -> None:
    """Add the reads that are done and left out blocks to `failed`."""
    marks = _marks(worker)
    for req_id in done - failed:
        left, whole = marks.take(req_id)
        if left:
            failed.add(req_id)
            log.error("a read of KV for %s is reported as done, but left out %d of %d marks", req_id, left, whole)
            worker.xfer_stats.record_failed_transfer()
    marks.forget_others(transfers)


def regions_of(worker: Any) -> list[Region]:
    """Return the regions of NIXL's worker that can be checked; none for layouts that reads fill in parts."""
    if worker.use_host_buffer or worker._mixed_mem_types or worker._transfer_layer_group_ids or worker.dcp_size > 1:
        return []
    bases = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    mapped = worker._uses_region_group_mapping and not worker._has_mamba
    storages: dict[int, torch.Tensor] = {}
    regions = []
    for index, base in enumerate(bases):
        cache = worker.device_kv_caches[worker.region_names[index]]
        storage = (cache if isinstance(cache, torch.Tensor) else cache[0]).untyped_storage()
        start = storage.data_ptr()
        stride, size = worker.block_stride_per_layer[index], worker.block_len_per_layer[index]
        if not start <= base < start + storage.nbytes() or (base - start) % WORD_BYTES or stride % WORD_BYTES:
            continue
        if size % WORD_BYTES:
            continue
        if start not in storages:
            storages[start] = torch.empty(0, dtype=torch.int64, device=storage.device).set_(
                storage, 0, (storage.nbytes() // WORD_BYTES,), (1,)
            )
        regions.append(
            Region(
                storages[start],
                (base - start) // WORD_BYTES,
                stride // WORD_BYTES,
                size // WORD_BYTES,
                worker.region_group_ids[index] if mapped else ANY_GROUP,
            )
        )
    return regions


def _to_fill(worker: Any, meta: Any) -> Blocks:
    """Return the blocks by group of layers that the read has to fill; states, which are read in parts, have none."""
    remote_id = meta.remote.engine_id
    info = worker.transfer_topo.get_engine_info(remote_id)
    theirs = worker.dst_region_group_ids[remote_id]
    if (worker.region_group_ids or theirs) != theirs or info.remote_dcp_size > 1:
        return ()
    if worker.transfer_topo.block_size_ratio(info.remote_block_size) != 1:
        return ()
    local = meta.local_physical_block_ids
    remote = worker._logical_to_kernel_block_ids(meta.remote.block_ids, info.remote_physical_blocks_per_logical)
    # vLLM reads no more blocks of a group than the source has. Handles with too few for the prompt are refused before.
    return [
        list(ours)[: len(their_blocks)] if _fills_whole_blocks(worker._group_spec_types[index]) else ()
        for index, (ours, their_blocks) in enumerate(zip(local, remote, strict=False))
    ]


def _fills_whole_blocks(spec_type: type) -> bool:
    from vllm.v1.kv_cache_interface import AttentionSpec  # noqa: PLC0415 - tests of the marks run without vLLM

    return issubclass(spec_type, AttentionSpec) and spec_type.__name__ != "CircularBufferSpec"
