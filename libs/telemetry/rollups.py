"""GPU time by phase in aligned windows of several lengths: bounded, exact, and revisable. Pure.

Written are windows of the first tier only. Coarser ones are their sums, kept by adding differences: a late batch that
changes 100 ms changes the second and the ten seconds around it by exactly as much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.telemetry.timeline import PhaseTime

COVERED, PREFILL, DECODE, KV_WAIT = range(4)
"""Places in the last axis of every array of times; idle is what the other three leave of covered."""
MAX_WORKERS: Final = 4096
FIRST_SLOTS: Final = 16
NO_ROLE: Final = 0
PROVISIONAL: Final = 0x80
"""Beside the role in the first tier: part of the time is a step that still runs."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Windows of one length, and how many of them are kept."""

    window_ns: int
    windows: int


SECOND_NS: Final = 1_000_000_000
TIERS: Final = (Tier(SECOND_NS // 10, 1200), Tier(SECOND_NS, 3600), Tier(10 * SECOND_NS, 2160))
"""Two minutes, an hour, six hours: 17 bytes a window and worker (33 in the last), 150 MB for 1,000 workers."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one worker did in one window of the first tier."""

    worker_id: str
    time: PhaseTime
    role: int
    """A number below `PROVISIONAL` that names the role it had, not `NO_ROLE`."""


@dataclass(frozen=True, slots=True)
class Series:
    """Consecutive windows of one tier."""

    window_ns: int
    starts_ns: NDArray[np.int64]
    """[windows] int64."""
    worker_ids: Sequence[str]
    times_ns: NDArray[np.int64]
    """[windows, workers, 4] int64."""
    roles: NDArray[np.uint8]
    """[windows, workers] uint8: the role at the window's end, `NO_ROLE` where nothing was written."""
    provisional: NDArray[np.bool_]
    """[windows, workers]: part of the time is a step that still runs. Told in the first tier only."""


class _Ring:
    """One tier's windows, the oldest overwritten by the newest."""

    def __init__(self, tier: Tier, slots: int) -> None:
        self.tier = tier
        # Nanoseconds of up to four seconds fit 32 bits.
        kind = np.uint32 if tier.window_ns < 2**32 else np.int64
        self._times: NDArray[np.uint32 | np.int64] = np.zeros((tier.windows, slots, 4), kind)
        self._roles = np.zeros((tier.windows, slots), np.uint8)
        self._starts = np.full(tier.windows, -1, np.int64)
        self._newest = 0

    def grow(self, slots: int) -> None:
        """Room for more workers."""
        held, used = self._starts >= 0, self._times.shape[1]
        # Memory of windows and workers that are still to come is not touched, so it costs nothing yet.
        times = np.zeros((self.tier.windows, slots, 4), self._times.dtype)
        roles = np.zeros((self.tier.windows, slots), np.uint8)
        times[held, :used] = self._times[held]
        roles[held, :used] = self._roles[held]
        self._times, self._roles = times, roles

    def clear(self, slot: int) -> None:
        """Forget a worker."""
        self._times[:, slot] = 0
        self._roles[:, slot] = NO_ROLE

    def row(self, at_ns: int) -> int | None:
        """Where the window that holds `at_ns` is kept, emptied if new; None for one too old to be kept."""
        number = at_ns // self.tier.window_ns
        if number <= self._newest - self.tier.windows:
            return None
        self._newest = max(number, self._newest)
        row, start_ns = number % self.tier.windows, number * self.tier.window_ns
        if self._starts[row] != start_ns:
            self._starts[row] = start_ns
            self._times[row] = 0
            self._roles[row] = NO_ROLE
        return int(row)

    def get(self, row: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """[slots, 4] int64."""
        times: NDArray[np.int64] = self._times[row, slots].astype(np.int64)
        return times

    def add(self, row: int, slots: NDArray[np.int64], more: NDArray[np.int64]) -> None:
        """Change a window by `more` [slots, 4], which may be negative as long as the sums are not."""
        self._times[row, slots] = (self.get(row, slots) + more).astype(self._times.dtype)

    def set_roles(self, row: int, slots: NDArray[np.int64], roles: NDArray[np.uint8], *, over: bool) -> None:
        """Roles of workers in a window; those that are known already stay unless `over`."""
        if not over:
            known = self._roles[row, slots]
            roles = np.where(known == NO_ROLE, roles, known)
        self._roles[row, slots] = roles

    def read(self, low_ns: int, high_ns: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """(starts, times, roles) of the windows in [low, high), zeros for those that are not kept."""
        length = self.tier.window_ns
        starts = np.arange(-(-low_ns // length), high_ns // length, dtype=np.int64) * length
        rows = starts // length % self.tier.windows
        kept = self._starts[rows] == starts
        times = np.where(kept[:, None, None], self._times[rows][:, slots].astype(np.int64), 0)
        roles = np.where(kept[:, None], self._roles[rows][:, slots], NO_ROLE)
        return starts, times, roles.astype(np.uint8)


class RollUps:
    """The windows of all workers."""

    def __init__(self, tiers: Sequence[Tier] = TIERS) -> None:
        self._rings = [_Ring(tier, FIRST_SLOTS) for tier in tiers]
        self._slots: dict[str, int] = {}
        """By worker id, the longest unwritten first."""
        self._size = FIRST_SLOTS
        self._newest_ns = 0

    @property
    def tiers(self) -> list[Tier]:
        """The finest first."""
        return [ring.tier for ring in self._rings]

    def write(self, start_ns: int, written: Sequence[Written]) -> None:
        """What workers did in the first tier's window at `start_ns`, in place of what was known of it before.

        Does nothing for a window that is no longer kept.
        """
        finest = self._rings[0]
        row = finest.row(start_ns)
        if row is None or not written:
            return
        slots = np.array([self._slot(each.worker_id) for each in written], np.int64)
        roles = np.array([each.role for each in written], np.uint8)
        flags = np.array([PROVISIONAL * each.time.provisional for each in written], np.uint8)
        times = np.array([_parts(each.time) for each in written], np.int64)
        change = times - finest.get(row, slots)
        finest.add(row, slots, change)
        finest.set_roles(row, slots, roles | flags, over=True)
        newest = start_ns >= self._newest_ns
        self._newest_ns = max(start_ns, self._newest_ns)
        for ring in self._rings[1:]:
            row = ring.row(start_ns)
            if row is not None:
                ring.add(row, slots, change)
                ring.set_roles(row, slots, roles, over=newest)

    def worker_ids(self) -> list[str]:
        """Workers of which something was written, in order."""
        return sorted(self._slots)

    def read(self, window_ns: int, low_ns: int, high_ns: int, worker_ids: Sequence[str] | None = None) -> Series:
        """Windows of a tier that lie in [low, high), of some of `worker_ids()` or all.

        Raises ValueError for a length that is not a tier's.
        """
        ring = next((ring for ring in self._rings if ring.tier.window_ns == window_ns), None)
        if ring is None:
            raise ValueError(f"windows are {', '.join(str(tier.window_ns) for tier in self.tiers)} ns long")
        low_ns = max(low_ns, high_ns - ring.tier.windows * window_ns)
        ids = self.worker_ids() if worker_ids is None else worker_ids
        slots = np.array([self._slots[worker_id] for worker_id in ids], np.int64)
        starts, times, roles = ring.read(low_ns, high_ns, slots)
        return Series(window_ns, starts, ids, times, (roles % PROVISIONAL).astype(np.uint8), roles >= PROVISIONAL)

    def _slot(self, worker_id: str) -> int:
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            slot = self._new_slot()
        self._slots[worker_id] = slot
        return slot

    def _new_slot(self) -> int:
        used = len(self._slots)
        if used >= MAX_WORKERS:
            slot = self._slots.pop(next(iter(self._slots)))
            for ring in self._rings:
                ring.clear(slot)
            return slot
        if used == self._size:
            self._size = min(2 * self._size, MAX_WORKERS)
            for ring in self._rings:
                ring.grow(self._size)
        return used


def by_phase(times_ns: NDArray[np.int64], gpus: Mapping[str, int], worker_ids: Sequence[str]) -> NDArray[np.int64]:
    """[windows, 4] GPU-ns: the workers' times [windows, workers, 4], each weighed by its GPUs."""
    weights = np.array([gpus.get(worker_id, 1) for worker_id in worker_ids], np.int64)
    spent: NDArray[np.int64] = np.einsum("nwp,w->np", times_ns, weights)
    return spent


def _parts(time: PhaseTime) -> tuple[int, int, int, int]:
    return time.covered_ns, time.prefill_ns, time.decode_ns, time.kv_wait_ns
