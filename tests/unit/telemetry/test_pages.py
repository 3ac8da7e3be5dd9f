"""Tests of arrays that take memory page by page."""

from pathlib import Path

import numpy as np
import pytest

from libs.telemetry.pages import untouched_zeros
from libs.telemetry.rollups import COVERED, KV_WAIT, Cells, Ring, RollUps, Tier

SECOND_NS = 1_000_000_000
WORKERS = [f"worker-{number:04}" for number in range(300)]


def resident_bytes(array: np.ndarray) -> int:
    """Return how much of an array this process has in memory, by the kernel's page map."""
    page_bytes = 4096
    first = array.__array_interface__["data"][0] // page_bytes
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (array.nbytes // page_bytes)), np.uint64)
    return page_bytes * int((entries >> np.uint64(63)).sum())


def test_an_array_holds_zeros_and_what_is_written() -> None:
    found = untouched_zeros((3, 5), np.uint32)
    assert (found.shape, found.dtype, found.any()) == ((3, 5), np.uint32, np.False_)
    found[1, 2] = 7
    assert found.sum() == 7
    assert untouched_zeros((0, 4), np.int64).shape == (0, 4)


def test_pages_that_nobody_wrote_take_no_memory() -> None:
    try:
        found = untouched_zeros((16, 1024, 1024), np.uint8)
        found[3] = 1
        resident = resident_bytes(found)
    except OSError:
        pytest.skip("this system has no page map")
    assert found[3].nbytes <= resident < 2 * found[3].nbytes


def test_a_cleared_slot_takes_no_memory_for_windows_that_were_never_written() -> None:
    ring = Ring(Tier(SECOND_NS, 64), 4096)  # a row of roles is a page
    for second in range(2):
        row = ring.row(second * SECOND_NS)
        assert row is not None
        ring.set_roles(row, np.array([7, 8]), np.ones(2, np.uint8))
    try:
        before = resident_bytes(ring._roles)
    except OSError:
        pytest.skip("this system has no page map")
    ring.clear(7)
    assert resident_bytes(ring._roles) == before
    assert ring.present(0, 2 * SECOND_NS, np.array([7, 8])).tolist() == [False, True]


def test_a_time_that_no_worker_has_takes_no_memory_until_one_has_it() -> None:
    """Servers that are estimated never wait for KV; once one worker does, all windows hold what they held."""
    rollups = RollUps()
    times_ns = np.full((len(WORKERS), 4), 1_000, np.int64)
    times_ns[:, KV_WAIT] = 0
    roles = np.ones(len(WORKERS), np.uint8)
    for window in range(5):
        rollups.enter(window * SECOND_NS // 10, Cells(WORKERS, times_ns, roles))
    ring = rollups._rings[0]
    assert ring._times[KV_WAIT] is None
    assert ring._times[COVERED] is not None
    times_ns[7, KV_WAIT] = 500
    rollups.enter(5 * SECOND_NS // 10, Cells(WORKERS, times_ns, roles))
    found = rollups.read(SECOND_NS // 10, 0, SECOND_NS, WORKERS)
    assert found.times_ns[:, 7, KV_WAIT].tolist() == [0] * 5 + [500] + [0] * 4
    assert found.times_ns[:6, :, COVERED].tolist() == [[1_000] * len(WORKERS)] * 6
    assert found.times_ns.sum() == 6 * 3 * 1_000 * len(WORKERS) + 500
