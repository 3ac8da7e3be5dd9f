"""Marks in blocks of KV that a read has to fill: which reads are failed, and what stays untouched."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from libs.engine.vllm import pull_marks
from libs.engine.vllm.pull_marks import ANY_GROUP, PullMarks, Region

BLOCKS, WORDS = 8, 4


def pool(*groups: int, spare_words: int = 0) -> list[Region]:
    """Return regions of these groups in one storage, with unused words after each block."""
    stride = WORDS + spare_words
    words = torch.zeros(len(groups) * BLOCKS * stride, dtype=torch.int64)
    return [Region(words, place * BLOCKS * stride, stride, WORDS, group) for place, group in enumerate(groups)]


def fill(region: Region, block: int, words: int = WORDS) -> None:
    start = region.offset_words + block * region.stride_words
    region.words[start : start + words] = 7


def test_a_read_that_filled_every_block_leaves_no_mark() -> None:
    regions = pool(ANY_GROUP, ANY_GROUP)
    marks = PullMarks(regions, 0)
    marks.place("r", [[1, 5]])
    for region in regions:
        fill(region, 1)
        fill(region, 5)
    assert marks.take("r") == (0, 8)
    assert marks.take("r") == (0, 0), "it is forgotten"


@pytest.mark.parametrize(("filled_words", "left"), [(0, 2), (1, 1), (WORDS - 1, 1)])
def test_a_block_that_is_not_filled_to_its_end_is_found(filled_words: int, left: int) -> None:
    (region,) = pool(ANY_GROUP)
    marks = PullMarks([region], 0)
    marks.place("r", [[2, 3]])
    fill(region, 2)
    fill(region, 3, filled_words)
    assert marks.take("r") == (left, 4)


def test_only_blocks_of_the_read_are_written_and_only_in_regions_of_their_group() -> None:
    first, second = pool(0, 1, spare_words=2)
    marks = PullMarks([first, second], 0)
    marks.place("r", [[1], [6]])
    written = set(first.words.nonzero().flatten().tolist())
    stride = WORDS + 2
    start, other = stride, BLOCKS * stride + 6 * stride
    assert written == {start, start + WORDS - 1, other, other + WORDS - 1}


def test_a_sample_of_regions_is_drawn_anew_for_each_read() -> None:
    regions = pool(*[ANY_GROUP] * 4)
    marks, seen = PullMarks(regions, 1), set()
    for number in range(200):  # one of four stays out with a probability of 1e-24
        regions[0].words.zero_()
        marks.place(f"r{number}", [[0]])
        seen.add(int(regions[0].words.nonzero()[0]) // (BLOCKS * WORDS))
        assert marks.take(f"r{number}") == (2, 2)
    assert seen == {0, 1, 2, 3}


def test_reads_that_nobody_waits_for_are_forgotten() -> None:
    marks = PullMarks(pool(ANY_GROUP), 0)
    marks.place("a", [[0]])
    marks.place("b", [[1]])
    marks.forget_others(["b"])
    assert marks.take("a") == (0, 0) and marks.take("b") == (2, 2)


class FullSpec:
    pass


class Worker:
    """The parts of vLLM's reading worker that marks touch. Its read fills the blocks that `filled` names."""

    use_host_buffer = _mixed_mem_types = _has_mamba = _uses_region_group_mapping = False
    _transfer_layer_group_ids = ()
    dcp_size, engine_id, tp_rank = 1, "here", 0
    region_names = ("layer",)
    region_group_ids = (0,)
    block_stride_per_layer = block_len_per_layer = (WORDS * 8,)
    _group_spec_types = (FullSpec,)

    def __init__(self, **settings: int) -> None:
        self.cache = torch.zeros(BLOCKS * WORDS, dtype=torch.int64)
        self.device_kv_caches = {"layer": self.cache}
        self.kv_caches_base_addr = {"here": {0: [self.cache.data_ptr()]}}
        self.dst_region_group_ids = {"there": (0,)}
        self._remote_agents: dict[str, Any] = {}
        info = SimpleNamespace(remote_dcp_size=1, remote_block_size=16, remote_physical_blocks_per_logical=1)
        self.transfer_topo = SimpleNamespace(get_engine_info=lambda _: info, block_size_ratio=lambda _: 1)
        transfer = SimpleNamespace(get_from_extra_config=settings.get)
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.xfer_stats = SimpleNamespace(failed=0)
        self.xfer_stats.record_failed_transfer = lambda: setattr(self.xfer_stats, "failed", self.xfer_stats.failed + 1)
        self.transfers: dict[str, list[int]] = {}
        self.filled: list[int] = []

    def _logical_to_kernel_block_ids(self, blocks: Any, _ratio: int) -> Any:
        return blocks

    def _read_blocks_for_req(self, req_id: str, _meta: Any) -> None:
        if "there" not in self._remote_agents:
            return
        self.transfers[req_id] = []
        for block in self.filled:
            self.cache[block * WORDS : (block + 1) * WORDS] = 7

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done = set(transfers)
        transfers.clear()
        return done, set()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pull_marks, "_fills_whole_blocks", lambda _: True)
    made = type("Reading", (Worker,), {})
    pull_marks.install(made)
    pull_marks.install(made)  # as vLLM loads plug-ins more than once
    found = made()
    found._remote_agents["there"] = object()
    return found


def request(local: list[int], remote: list[int]) -> Any:
    source = SimpleNamespace(engine_id="there", block_ids=[remote])
    return SimpleNamespace(local_physical_block_ids=[local], remote=source)


def test_a_short_read_fails_its_request_and_no_other(worker: Any) -> None:
    worker.filled = [1, 2]
    worker._read_blocks_for_req("short", request([1, 2, 3], [4, 5, 6]))
    worker._read_blocks_for_req("whole", request([1, 2], [4, 5]))
    assert worker._pop_done_transfers(worker.transfers) == ({"short", "whole"}, {"short"})
    assert worker.xfer_stats.failed == 1


def test_blocks_that_the_source_does_not_have_are_not_awaited(worker: Any) -> None:
    worker.filled = [1, 2]
    worker._read_blocks_for_req("r", request([1, 2, 3], [4, 5]))
    assert worker._pop_done_transfers(worker.transfers) == ({"r"}, set())


def test_nothing_is_marked_before_the_source_is_known(worker: Any) -> None:
    worker._remote_agents.clear()
    worker._read_blocks_for_req("r", request([1], [4]))
    assert not worker.cache.any()


@pytest.mark.parametrize("name", ["use_host_buffer", "_mixed_mem_types", "_transfer_layer_group_ids"])
def test_layouts_that_reads_fill_in_parts_are_not_checked(worker: Any, name: str) -> None:
    setattr(worker, name, (0,))
    worker._read_blocks_for_req("r", request([1], [4]))
    assert worker._pop_done_transfers(worker.transfers) == ({"r"}, set())


def test_an_unknown_layout_is_served_unchecked_and_logged(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker.region_names = ()
    worker._read_blocks_for_req("r", request([1], [4]))
    assert worker._pop_done_transfers(worker.transfers) == ({"r"}, set())
    assert "not noticed" in caplog.text


def test_each_group_has_marks_however_few_regions_are_drawn() -> None:
    first, second = pool(0, 0, 0, 0), pool(1)
    marks = PullMarks([*first, *second], 1)
    marks.place("r", [[1], [6]])
    assert first[0].words.count_nonzero() == second[0].words.count_nonzero() == 2


@pytest.mark.parametrize("name", ["transfer_topo", "dst_region_group_ids", "vllm_config"])
def test_a_worker_without_a_part_that_marks_need_reads_on_and_logs_it_once(
    worker: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    delattr(worker, name)
    for req_id in ("r", "s"):
        worker._read_blocks_for_req(req_id, request([1], [4]))
    assert worker._pop_done_transfers(worker.transfers) == ({"r", "s"}, set())
    assert caplog.text.count("not noticed") == 1


def test_a_short_read_is_failed_even_if_vllm_cannot_count_it(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    del worker.xfer_stats
    worker._read_blocks_for_req("r", request([1], [4]))
    assert worker._pop_done_transfers(worker.transfers) == ({"r"}, {"r"})
    assert "not noticed" in caplog.text
