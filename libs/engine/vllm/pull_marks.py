"""The detection of NIXL reads that left blocks unfilled, by random words written into the blocks beforehand.

NIXL reports a read as done, and vLLM starts its sequence on whatever the blocks contain. If NIXL or vLLM left out a
part, the sequence would run on KV of another prompt. Before each read, a random word is therefore written at both ends
of each block, in a sample of layers. A block that still contains the word after the read was not filled. This runs in
the processes that compute, and is written against the same vLLM as libs/engine/vllm/scheduler.py.
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

# The key in NIXL's configuration for the number of regions, K or V of a layer, that each read checks per group of
# layers; 0 for all.
REGIONS_KEY: Final = "fulcrum_marked_regions"
DEFAULT_REGIONS: Final = 4
WORD_BYTES: Final = 8
# The group of a region whose blocks may belong to any group of layers.
ANY_GROUP: Final = -1
ATTRIBUTE: Final = "_fulcrum_marks"

Blocks = Sequence[Sequence[int]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a KV pool's memory with the blocks of one layer, or of its K or V."""

    words: torch.Tensor  # 1D int64: the storage that contains the region
    offset_words: int
    """The offset of block 0 in the storage."""
    stride_words: int
    block_words: int
    group: int

    def ends(self, blocks: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return the indices in the storage of the first and last word of each block."""
        first = self.offset_words + blocks * self.stride_words
        return np.concatenate([first, first + self.block_words - 1])


@dataclass(frozen=True, slots=True)
class _Marked:
    word: int
    places: list[tuple[torch.Tensor, torch.Tensor]]
    """(words, indices) of each marked storage."""


class PullMarks:
    """The marks of the reads that have not ended yet."""

    def __init__(self, regions: Sequence[Region], most_regions: int) -> None:
        """Create the marks. Each read checks `most_regions` random regions of each group; 0 checks all."""
        self._regions = regions
        self._most = most_regions or len(regions)
        self._reads: dict[str, _Marked] = {}

    @property
    def has_regions(self) -> bool:
        return bool(self._regions)

    def place(self, name: str, groups: Blocks) -> None:
        """Mark the blocks, by group of layers, that a read is about to fill.

        Return once the device has written the marks.
        """
        indices: dict[int, list[np.ndarray[Any, Any]]] = {}
        storages: dict[int, torch.Tensor] = {}
        for group, numbers in enumerate(groups):
            if not numbers:
                continue
            blocks = np.asarray(numbers, dtype=np.int64)
            # Regions are sampled for each group, since a sample of all regions could contain none of a group.
            regions = [region for region in self._regions if region.group in (ANY_GROUP, group)]
            for region in random.sample(regions, min(self._most, len(regions))):
                storage = region.words.data_ptr()
                storages[storage] = region.words
                indices.setdefault(storage, []).append(region.ends(blocks))
        # Neither zero nor all ones, which fresh memory and cleared blocks contain.
        word = secrets.randbits(62) + 1
        places = []
        for storage, found in indices.items():
            words = storages[storage]
            index = torch.from_numpy(np.concatenate(found))
            places.append((words, _beside(words, partial(_fill, words, index, word))))
        self._reads[name] = _Marked(word, places)

    def take(self, name: str) -> tuple[int, int]:
        """Drop a read that has ended. Return the number of its marks that are left, and of all its marks."""
        marked = self._reads.pop(name, None)
        if marked is None:
            return 0, 0
        left = sum(_beside(words, partial(_count, words, index, marked.word)) for words, index in marked.places)
        return left, sum(len(index) for _, index in marked.places)

    def forget_others(self, names: Iterable[str]) -> None:
        """Drop all reads but these."""
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
    # A separate stream. NIXL reads outside of streams and does not wait for a step either.
    if not words.is_cuda:
        return work()
    stream = torch.cuda.Stream(words.device)
    with torch.cuda.stream(stream):
        result = work()
    stream.synchronize()
    return result


def install(worker_class: Any) -> None:
    """Patch NIXL's reading worker to mark blocks before each read, and to fail reads that left blocks unfilled."""
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
    """Run `work`, which places or checks marks. If it fails, log the error and continue without marks."""
    try:
        work()
    except Exception:
        # `work` uses private parts of vLLM. A change of those must not end EngineCore with all its sequences.
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
    """Add the reads that are done but left blocks unfilled to `failed`."""
    marks = _marks(worker)
    for req_id in done - failed:
        left, whole = marks.take(req_id)
        if left:
            failed.add(req_id)
            log.error("a read of KV for %s is reported as done, but left out %d of %d marks", req_id, left, whole)
            worker.xfer_stats.record_failed_transfer()
    marks.forget_others(transfers)


def regions_of(worker: Any) -> list[Region]:
    """Return the regions of NIXL's worker that can be checked; none for layouts in which a read fills blocks partly."""
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
    """Return the blocks that the read has to fill, by group of layers.

    State-space layers have none, as reads fill them partly.
    """
    remote_id = meta.remote.engine_id
    info = worker.transfer_topo.get_engine_info(remote_id)
    theirs = worker.dst_region_group_ids[remote_id]
    if (worker.region_group_ids or theirs) != theirs or info.remote_dcp_size > 1:
        return ()
    if worker.transfer_topo.block_size_ratio(info.remote_block_size) != 1:
        return ()
    local = meta.local_physical_block_ids
    remote = worker._logical_to_kernel_block_ids(meta.remote.block_ids, info.remote_physical_blocks_per_logical)
    # vLLM reads no more blocks of a group than the source has. A handle with too few for its prompt was refused before.
    return [
        list(ours)[: len(their_blocks)] if _fills_whole_blocks(worker._group_spec_types[index]) else ()
        for index, (ours, their_blocks) in enumerate(zip(local, remote, strict=False))
    ]


def _fills_whole_blocks(spec_type: type) -> bool:
    from vllm.v1.kv_cache_interface import AttentionSpec  # noqa: PLC0415 - tests of the marks run without vLLM

    return issubclass(spec_type, AttentionSpec) and spec_type.__name__ != "CircularBufferSpec"
