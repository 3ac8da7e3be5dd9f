"""Arrays of windows: the cells of many workers in one window, and rings of windows of one length. Pure."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.pages import untouched_zeros
from libs.telemetry.steps import PhaseTime

NO_ROLE: Final = 0
"""The role of a worker without a written window."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A window length with the number of windows that are kept."""

    window_ns: int
    windows: int


class Ring:
    """The windows of one tier by slot; the owner assigns slots to workers."""

    def __init__(self, tier: Tier, slots: int) -> None:
        self.tier = tier
        # Nanoseconds of up to four seconds fit 32 bits.
        self._kind = np.uint32 if tier.window_ns < 2**32 else np.int64
        self._times: list[NDArray[np.uint32 | np.int64] | None] = [None] * WIDTH
        """[windows, slots] for each time of `Cells.wide`; None until there is any, such as a wait of estimated time."""
        self._roles: NDArray[np.uint8] = untouched_zeros((tier.windows, slots), np.uint8)
        self._starts = np.full(tier.windows, -1, np.int64)
        self._newest = 0
        self.changed: set[int] = set()
        """Starts of windows that were changed since they were last stored elsewhere; bounded by the windows kept."""

    def grow(self, slots: int) -> None:
        held, used = self._starts >= 0, self._roles.shape[1]
        roles: NDArray[np.uint8] = untouched_zeros((self.tier.windows, slots), np.uint8)
        roles[held, :used] = self._roles[held]
        self._roles = roles
        for part, known in self._known():
            times = self._times[part] = untouched_zeros(roles.shape, self._kind)
            times[held, :used] = known[held]

    def clear(self, slot: int) -> None:
        held = self._starts >= 0  # a write to the other rows would take memory for their pages
        self._roles[held, slot] = NO_ROLE
        for _, times in self._known():
            times[held, slot] = 0

    def row(self, at_ns: int) -> int | None:
        """Return the row of the window that contains `at_ns`, cleared if new; None if the window is too old."""
        number = at_ns // self.tier.window_ns
        if not self.reaches(at_ns):
            return None
        self._newest = max(number, self._newest)
        row, start_ns = number % self.tier.windows, number * self.tier.window_ns
        if self._starts[row] != start_ns:
            self.changed.discard(int(self._starts[row]))
            self._starts[row] = start_ns
            self._roles[row] = NO_ROLE
            for _, times in self._known():
                times[row] = 0
        return int(row)

    def reaches(self, at_ns: int) -> bool:
        """Return whether the window that contains `at_ns` is recent enough to be kept."""
        return at_ns // self.tier.window_ns > self._newest - self.tier.windows

    def holds(self, start_ns: int) -> bool:
        """Return whether the window that begins at `start_ns` is in the ring."""
        return bool(self._starts[start_ns // self.tier.window_ns % self.tier.windows] == start_ns)

    def get(self, row: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times [slots, 5] int64 of one row, as in `Cells.wide`."""
        found = np.zeros((len(slots), WIDTH), np.int64)
        for part, times in self._known():
            found[:, part] = times[row, slots]
        return found

    def put(self, row: int, slots: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Replace the times [slots, 5] of one row."""
        for part in range(WIDTH):
            known = self._times[part]
            if known is None and times[:, part].any():
                known = self._times[part] = untouched_zeros(self._roles.shape, self._kind)
            if known is not None:
                known[row, slots] = times[:, part]

    def add(self, row: int, slots: NDArray[np.int64], more: NDArray[np.int64]) -> None:
        """Add `more` [slots, 5] to a window. Entries may be negative as long as the sums are not."""
        self.put(row, slots, self.get(row, slots) + more)

    def set_roles(
        self, row: int, slots: NDArray[np.int64], roles: NDArray[np.uint8], *, over: NDArray[np.bool_] | None = None
    ) -> None:
        """Set workers' roles in a window; with `over`, known roles are replaced only where it is true."""
        if over is not None:
            known = self._roles[row, slots]
            roles = np.where(over | (known == NO_ROLE), roles, known)
        self._roles[row, slots] = roles

    def present(self, low_ns: int, high_ns: int, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask [slots] of those with anything written in the windows of [low, high)."""
        starts = self._within(low_ns, high_ns)
        rows = starts // self.tier.window_ns % self.tier.windows
        rows = rows[self._starts[rows] == starts]
        found: NDArray[np.bool_] = (self._roles[rows[:, None], slots] != NO_ROLE).any(axis=0)
        return found

    def read(
        self, low_ns: int, high_ns: int, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64] | None]:
        """Return (starts, times, roles, encode) of the windows in [low, high), zeros for those that are not kept."""
        starts = self._within(low_ns, high_ns)
        rows = starts // self.tier.window_ns % self.tier.windows
        kept = self._starts[rows] == starts
        # Indexed in one step, so that reading a few workers does not copy the others.
        cells = rows[:, None], slots
        encodes = self._times[ENCODE] is not None
        times = np.zeros((len(starts), len(slots), WIDTH if encodes else ENCODE), np.int64)
        for part, known in self._known():
            times[:, :, part] = np.where(kept[:, None], known[cells], 0)
        roles = np.where(kept[:, None], self._roles[cells], NO_ROLE)
        return starts, times[:, :, :ENCODE], roles.astype(np.uint8), times[:, :, ENCODE] if encodes else None

    def _known(self) -> Iterator[tuple[int, NDArray[np.uint32 | np.int64]]]:
        """Return the index of each time that any window has, with its array."""
        return ((part, times) for part, times in enumerate(self._times) if times is not None)

    def _within(self, low_ns: int, high_ns: int) -> NDArray[np.int64]:
        length = self.tier.window_ns
        return np.arange(-(-low_ns // length), high_ns // length, dtype=np.int64) * length


COVERED, PREFILL, DECODE, KV_WAIT = range(4)
"""Indices into the last axis of every array of times. Idle time is covered time minus the other three."""
ENCODE: Final = 4
"""The index of the time of encoding images, a part of prefill, in arrays of `WIDTH` times."""
WIDTH: Final = 5
PROVISIONAL: Final = 0x80
"""The flag added to a role number if part of the time belongs to a step that still runs."""
ROLE_NUMBERS: Final = {name: NO_ROLE + 1 + index for index, name in enumerate(ROLE_NAMES)}
"""The number of each role in windows."""


@dataclass(frozen=True, slots=True)
class Cells:
    """One window's time and role for each of many workers."""

    worker_ids: Sequence[str]
    times_ns: NDArray[np.int64]
    """[workers, 4] int64: covered, prefill, decode, KV wait, each for a single GPU."""
    roles: NDArray[np.uint8]
    """[workers] uint8: the number of the role, below `PROVISIONAL` and not `NO_ROLE`, plus the flag `PROVISIONAL`."""
    encode_ns: NDArray[np.int64] | None = None
    """[workers] int64: the part of prefill in steps that encoded images; None if there is none."""

    def __len__(self) -> int:
        return len(self.worker_ids)

    def wide(self) -> NDArray[np.int64]:
        """Return [workers, 5] int64: the times, followed by that of encoding."""
        return _wide(self.times_ns, self.encode_ns)

    def where(self, taken: NDArray[np.bool_]) -> "Cells":
        """Return the cells selected by the mask `taken` [workers]."""
        if taken.all():
            return self
        encode_ns = None if self.encode_ns is None else self.encode_ns[taken]
        return Cells(list(compress(self.worker_ids, taken)), self.times_ns[taken], self.roles[taken], encode_ns)

    def among(self, worker_ids: Container[str]) -> "Cells":
        return self.where(np.array([worker_id in worker_ids for worker_id in self.worker_ids], np.bool_))

    def first(self, count: int) -> "Cells":
        encode_ns = None if self.encode_ns is None else self.encode_ns[:count]
        return Cells(self.worker_ids[:count], self.times_ns[:count], self.roles[:count], encode_ns)


def _wide(times_ns: NDArray[Any], encode_ns: NDArray[Any] | None) -> NDArray[np.int64]:
    wide = np.zeros((len(times_ns), WIDTH), np.int64)
    wide[:, :ENCODE] = times_ns
    if encode_ns is not None:
        wide[:, ENCODE] = encode_ns
    return wide


MAX_WORKERS: Final = 4096
"""The maximum number of workers that one process tracks; the one that has been silent longest is dropped."""
FIRST_SLOTS: Final = 16
SECOND_NS: Final = 1_000_000_000
TIERS: Final = (
    Tier(SECOND_NS // 10, 1200),
    Tier(SECOND_NS, 3600),
    Tier(10 * SECOND_NS, 2160),
    Tier(60 * SECOND_NS, 2880),
)
"""Windows for two minutes, an hour, six hours and two days.

A window takes 17 bytes a worker (33 from 10 s on), in total 250 MB for 1,000 workers once every window is filled. A
time that no worker has takes nothing: without KV waits it is 13 bytes (25), in total 190 MB. Encoding takes a quarter.
"""


@dataclass(frozen=True, slots=True)
class Written:
    """One worker's time in one window of the first tier."""

    worker_id: str
    time: PhaseTime
    role: int
    """The number of the role, below `PROVISIONAL` and not `NO_ROLE`."""


@dataclass(frozen=True, slots=True)
class Series:
    """Consecutive windows of one tier as arrays."""

    window_ns: int
    starts_ns: NDArray[np.int64]
    """[windows] int64: the beginning of each in Unix ns."""
    worker_ids: Sequence[str]
    times_ns: NDArray[np.int64]
    """[windows, workers, 4] int64, as in `Cells.times_ns`."""
    roles: NDArray[np.uint8]
    """[windows, workers] uint8: the role at the window's end, `NO_ROLE` where nothing was written."""
    provisional: NDArray[np.bool_]
    """[windows, workers] bool, True if part of the time belongs to a running step. Set in the first tier only."""
    encode_ns: NDArray[np.int64] | None = None
    """[windows, workers] int64, as in `Cells.encode_ns`; None if no worker has encoded."""


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """One window of a coarse tier in its stored form, with the workers present in it."""

    window_ns: int
    start_ns: int
    worker_ids: Sequence[str]
    times_ns: NDArray[np.int64]
    """[workers, 4] int64: the times of each worker, as in `Cells.times_ns`."""
    roles: NDArray[np.uint8]
    """[workers] uint8: role numbers without the flag `PROVISIONAL`."""
    encode_ns: NDArray[np.int64] | None = None
    """[workers] int64, as in `Cells.encode_ns`."""


class RollUps:
    """The windows of all workers in all tiers."""

    def __init__(self, tiers: Sequence[Tier] = TIERS) -> None:
        self._rings = [Ring(tier, FIRST_SLOTS) for tier in tiers]
        self._slots: dict[str, int] = {}
        """The slot of each worker in every ring."""
        self._size = FIRST_SLOTS
        self._newest_ns = np.zeros(MAX_WORKERS, np.int64)
        """The newest written window of each slot, since some workers' windows are written later than others'."""
        self._finest_from_ns = 0
        """The time before which only the coarser tiers have data."""

    @property
    def tiers(self) -> list[Tier]:
        """The tiers in order, the finest first."""
        return [ring.tier for ring in self._rings]

    def tier_for(self, low_ns: int, least_ns: int = 0) -> Tier:
        """Return the finest tier back to `low_ns` with windows of at least `least_ns`, or else the coarsest."""
        coarse = int(low_ns < self._finest_from_ns)
        rings = self._rings[coarse:]
        fitting = (ring.tier for ring in rings if ring.reaches(low_ns) and ring.tier.window_ns >= least_ns)
        return next(fitting, self._rings[-1].tier)

    def write(self, start_ns: int, written: Sequence[Written], *, fuller: bool = False) -> Cells:
        """Call `enter` for times given worker by worker."""
        return self.enter(start_ns, cells(written), fuller=fuller)

    def enter(self, start_ns: int, written: Cells, *, fuller: bool = False) -> Cells:
        """Replace workers' data in the first tier's window at `start_ns`; return the cells that were accepted.

        A window that is no longer kept is ignored. With `fuller`, cells that cover less than is known already are
        left out.
        """
        finest = self._rings[0]
        row = finest.row(start_ns)
        if row is None or not written:
            return written.first(0)
        slots = self._slots_of(written.worker_ids)
        known = finest.get(row, slots)
        if fuller:
            fits = written.times_ns[:, COVERED] >= known[:, COVERED]
            written, slots, known = written.where(fits), slots[fits], known[fits]
            if not written:
                return written
        times = written.wide()
        change = times - known
        finest.put(row, slots, times)
        finest.set_roles(row, slots, written.roles)
        roles = written.roles % np.uint8(PROVISIONAL)
        newest = start_ns >= self._newest_ns[slots]
        self._newest_ns[slots[newest]] = start_ns
        self._add_coarser(start_ns, slots, change, roles, over=newest)
        return written

    def fill(self, start_ns: int, finest: Sequence[Cells]) -> bool:
        """Replace the second tier's window at `start_ns` by its windows of the first tier.

        Only workers for which the new windows cover no less are replaced. The window may lie further back than the
        first tier reaches. Return False for a window that is no longer kept.
        """
        if not self._rings[1].reaches(start_ns):
            return False
        ids = sorted({worker_id for cells in finest for worker_id in cells.worker_ids})
        if not ids:
            return True
        slots, row = self._slots_of(ids), self._rings[1].row(start_ns)
        assert row is not None  # `reaches` was checked above
        times, roles = _side_by_side(ids, finest)
        whole, known = times.sum(axis=0), self._rings[1].get(row, slots)
        fits = whole[:, COVERED] >= known[:, COVERED]
        slots, times, roles, change = slots[fits], times[:, fits], roles[:, fits], (whole - known)[fits]
        for number, (time, role) in enumerate(zip(times, roles, strict=True)):
            at_ns = start_ns + number * self._rings[0].tier.window_ns
            row = self._rings[0].row(at_ns)
            if row is not None:
                self._rings[0].put(row, slots, time)
                known = role != NO_ROLE
                self._rings[0].set_roles(row, slots[known], role[known])
        latest = (roles[::-1] != NO_ROLE).argmax(axis=0)
        last = roles[::-1][latest, np.arange(len(slots))] % np.uint8(PROVISIONAL)
        never = np.zeros(len(slots), np.bool_)
        self._newest_ns[slots] = np.maximum(self._newest_ns[slots], start_ns)
        self._add_coarser(start_ns, slots, change, last, over=never)
        return True

    def _add_coarser(
        self,
        start_ns: int,
        slots: NDArray[np.int64],
        change: NDArray[np.int64],
        roles: NDArray[np.uint8],
        *,
        over: NDArray[np.bool_],
    ) -> None:
        """Change the coarser windows around `start_ns`; `roles` replace known ones where `over` is true."""
        for ring in self._rings[1:]:
            row = ring.row(start_ns)
            if row is not None:
                ring.add(row, slots, change)
                ring.set_roles(row, slots, roles, over=over)
                ring.changed.add(start_ns - start_ns % ring.tier.window_ns)

    def phases(self, worker_id: str, low_ns: int, high_ns: int) -> PhaseTime:
        """Return the phases of a worker's time in [low, high), from the finest windows that reach back to `low_ns`.

        Both ends are moved back to the start of a window.
        """
        if worker_id not in self._slots:
            return PhaseTime()
        length = self.tier_for(low_ns).window_ns
        series = self.read(length, low_ns - low_ns % length, high_ns - high_ns % length, [worker_id])
        covered, prefill, decode, kv_wait = series.times_ns.sum(axis=(0, 1)).tolist()
        return PhaseTime(covered, prefill, decode, kv_wait, bool(series.provisional.any()))

    def take_changed(self, before_ns: int) -> list[StoredWindow]:
        """Return the time before `before_ns` of all coarse windows that changed since the last call.

        The process that resumes at `before_ns` writes later time again. A window that reaches beyond it is returned
        again next time.
        """
        taken = []
        for ring in self._rings[1:]:
            length = ring.tier.window_ns
            starts = sorted(start_ns for start_ns in ring.changed if start_ns < before_ns)
            taken += [self._kept(ring, start_ns, before_ns) for start_ns in starts]
            ring.changed.difference_update(start_ns for start_ns in starts if start_ns + length <= before_ns)
        return taken

    def give_back(self, windows: Sequence[StoredWindow]) -> None:
        """Mark windows that could not be stored as changed again."""
        for ring in self._rings[1:]:
            starts = {kept.start_ns for kept in windows if kept.window_ns == ring.tier.window_ns}
            ring.changed |= {start_ns for start_ns in starts if ring.holds(start_ns)}

    def restore(self, kept: StoredWindow) -> None:
        """Replace a window of a coarse tier by a stored one; windows that are too old are ignored."""
        ring = next((ring for ring in self._rings[1:] if ring.tier.window_ns == kept.window_ns), None)
        row = None if ring is None else ring.row(kept.start_ns)
        if ring is None or row is None or not kept.worker_ids:
            return
        slots = self._slots_of(kept.worker_ids)
        ring.put(row, slots, _wide(kept.times_ns, kept.encode_ns))
        ring.set_roles(row, slots, kept.roles)

    def resume(self, written_to_ns: int) -> None:
        """Record that the coarse tiers were restored up to `written_to_ns`."""
        self._finest_from_ns = written_to_ns

    def _kept(self, ring: Ring, start_ns: int, before_ns: int) -> StoredWindow:
        ids = self.worker_ids()
        slots = np.array([self._slots[worker_id] for worker_id in ids], np.int64)
        end_ns = start_ns + ring.tier.window_ns
        _, times, roles, encode = ring.read(start_ns, end_ns, slots)
        _, later, _, beyond = self._rings[0].read(max(before_ns, start_ns), max(end_ns, before_ns), slots)
        there = np.flatnonzero(roles[0] != NO_ROLE)
        if encode is not None and beyond is not None:
            encode = encode - beyond.sum(axis=0)
        return StoredWindow(
            ring.tier.window_ns,
            start_ns,
            [ids[place] for place in there],
            (times[0] - later.sum(axis=0))[there],
            roles[0][there],
            None if encode is None else encode[0][there],
        )

    def worker_ids(self) -> list[str]:
        """Return the ids of workers with a written window, in order."""
        return sorted(self._slots)

    def knows(self, worker_id: str) -> bool:
        """Return whether any window of the worker was written."""
        return worker_id in self._slots

    def present(self, window_ns: int, low_ns: int, high_ns: int) -> list[str]:
        """Return in order the workers with anything written in a tier's windows that lie in [low, high)."""
        ids, ring = self.worker_ids(), self._ring(window_ns)
        slots = np.array([self._slots[worker_id] for worker_id in ids], np.int64)
        return list(compress(ids, ring.present(low_ns, high_ns, slots)))

    def read(self, window_ns: int, low_ns: int, high_ns: int, worker_ids: Sequence[str] | None = None) -> Series:
        """Return a tier's windows in [low, high) of some of `worker_ids()` or all.

        Raise ValueError for a length that is not a tier's.
        """
        ring = self._ring(window_ns)
        low_ns = max(low_ns, high_ns - ring.tier.windows * window_ns)
        ids = self.worker_ids() if worker_ids is None else worker_ids
        slots = np.array([self._slots[worker_id] for worker_id in ids], np.int64)
        starts, times, roles, encode = ring.read(low_ns, high_ns, slots)
        own_roles, running = (roles % PROVISIONAL).astype(np.uint8), roles >= PROVISIONAL
        return Series(window_ns, starts, ids, times, own_roles, running, encode)

    def _ring(self, window_ns: int) -> Ring:
        ring = next((ring for ring in self._rings if ring.tier.window_ns == window_ns), None)
        if ring is None:
            raise ValueError(f"windows are {', '.join(str(tier.window_ns) for tier in self.tiers)} ns long")
        return ring

    def _slots_of(self, worker_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the slots [workers], assigning new ones where needed."""
        slots = list(map(self._slots.get, worker_ids))
        return np.array(list(map(self._slot, worker_ids)) if None in slots else slots, np.int64)

    def _slot(self, worker_id: str) -> int:
        if worker_id not in self._slots:
            self._slots[worker_id] = self._new_slot()
        return self._slots[worker_id]

    def _new_slot(self) -> int:
        used = len(self._slots)
        if used >= MAX_WORKERS:
            slot = self._slots.pop(min(self._slots, key=lambda each: self._newest_ns[self._slots[each]]))
            for ring in self._rings:
                ring.clear(slot)
            self._newest_ns[slot] = 0
            return slot
        if used == self._size:
            self._size = min(2 * self._size, MAX_WORKERS)
            for ring in self._rings:
                ring.grow(self._size)
        return used


def _side_by_side(worker_ids: Sequence[str], finest: Sequence[Cells]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return (times [windows, workers, 5], roles [windows, workers]), zeros where a window lacks a worker."""
    places = {worker_id: place for place, worker_id in enumerate(worker_ids)}
    times = np.zeros((len(finest), len(worker_ids), WIDTH), np.int64)
    roles = np.full((len(finest), len(worker_ids)), NO_ROLE, np.uint8)
    for number, cells in enumerate(finest):
        at = [places[worker_id] for worker_id in cells.worker_ids]
        times[number, at], roles[number, at] = cells.wide(), cells.roles
    return times, roles


def cells(written: Sequence[Written]) -> Cells:
    """Convert times of single workers to arrays."""
    times = [
        (time.covered_ns, time.prefill_ns, time.decode_ns, time.kv_wait_ns) for time in (each.time for each in written)
    ]
    roles = [each.role + PROVISIONAL * each.time.provisional for each in written]
    worker_ids = [each.worker_id for each in written]
    return Cells(worker_ids, np.array(times, np.int64).reshape(-1, 4), np.array(roles, np.uint8))
