"""Arrays of windows: the cells of many workers in one window, and rings of windows of one length. Pure."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.roles import ROLE_NAMES

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
        kind = np.uint32 if tier.window_ns < 2**32 else np.int64
        self._times: NDArray[np.uint32 | np.int64] = np.zeros((tier.windows, slots, 4), kind)
        self._roles = np.zeros((tier.windows, slots), np.uint8)
        self._starts = np.full(tier.windows, -1, np.int64)
        self._newest = 0
        self.changed: set[int] = set()
        """Starts of windows that were written since they were last stored elsewhere; bounded by the windows kept."""

    def grow(self, slots: int) -> None:
        held, used = self._starts >= 0, self._times.shape[1]
        # Untouched pages of later windows and workers take no memory yet.
        times = np.zeros((self.tier.windows, slots, 4), self._times.dtype)
        roles = np.zeros((self.tier.windows, slots), np.uint8)
        times[held, :used] = self._times[held]
        roles[held, :used] = self._roles[held]
        self._times, self._roles = times, roles

    def clear(self, slot: int) -> None:
        self._times[:, slot] = 0
        self._roles[:, slot] = NO_ROLE

    def row(self, at_ns: int) -> int | None:
        """Return the row of the window that holds `at_ns`, cleared if new; None if the window is too old."""
        number = at_ns // self.tier.window_ns
        if not self.reaches(at_ns):
            return None
        self._newest = max(number, self._newest)
        row, start_ns = number % self.tier.windows, number * self.tier.window_ns
        if self._starts[row] != start_ns:
            self.changed.discard(int(self._starts[row]))
            self._starts[row] = start_ns
            self._times[row] = 0
            self._roles[row] = NO_ROLE
        return int(row)

    def reaches(self, at_ns: int) -> bool:
        """Report whether the window that holds `at_ns` is recent enough to be kept."""
        return at_ns // self.tier.window_ns > self._newest - self.tier.windows

    def holds(self, start_ns: int) -> bool:
        """Report whether the window that begins at `start_ns` is in the ring."""
        return bool(self._starts[start_ns // self.tier.window_ns % self.tier.windows] == start_ns)

    def get(self, row: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times [slots, 4] int64 of one row."""
        times: NDArray[np.int64] = self._times[row, slots].astype(np.int64)
        return times

    def put(self, row: int, slots: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Replace the times [slots, 4] of one row."""
        self._times[row, slots] = times

    def add(self, row: int, slots: NDArray[np.int64], more: NDArray[np.int64]) -> None:
        """Change a window by `more` [slots, 4], which may be negative as long as the sums are not."""
        self._times[row, slots] = (self.get(row, slots) + more).astype(self._times.dtype)

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

    def read(self, low_ns: int, high_ns: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return (starts, times, roles) of the windows in [low, high), zeros for those that are not kept."""
        starts = self._within(low_ns, high_ns)
        rows = starts // self.tier.window_ns % self.tier.windows
        kept = self._starts[rows] == starts
        # Indexed in one step, so that reading a few workers does not copy the others.
        cells = rows[:, None], slots
        times = np.where(kept[:, None, None], self._times[cells].astype(np.int64), 0)
        roles = np.where(kept[:, None], self._roles[cells], NO_ROLE)
        return starts, times, roles.astype(np.uint8)

    def _within(self, low_ns: int, high_ns: int) -> NDArray[np.int64]:
        length = self.tier.window_ns
        return np.arange(-(-low_ns // length), high_ns // length, dtype=np.int64) * length


COVERED, PREFILL, DECODE, KV_WAIT = range(4)
"""Indices into the last axis of every array of times. Idle time is covered time less the other three."""
PROVISIONAL: Final = 0x80
"""Flag added to a role number if part of the time belongs to a step that still runs."""
ROLE_NUMBERS: Final = {name: NO_ROLE + 1 + index for index, name in enumerate(ROLE_NAMES)}
"""The number that stands for each role in windows."""


@dataclass(frozen=True, slots=True)
class Cells:
    """One window's time and role for each of many workers."""

    worker_ids: Sequence[str]
    times_ns: NDArray[np.int64]
    """[workers, 4] int64: covered, prefill, decode, KV wait, each for a single GPU."""
    roles: NDArray[np.uint8]
    """[workers] uint8: the number of the role, below `PROVISIONAL` and not `NO_ROLE`, plus the flag `PROVISIONAL`."""

    def __len__(self) -> int:
        return len(self.worker_ids)

    def where(self, taken: NDArray[np.bool_]) -> "Cells":
        """Return the cells selected by the mask `taken` [workers]."""
        if taken.all():
            return self
        return Cells(list(compress(self.worker_ids, taken)), self.times_ns[taken], self.roles[taken])

    def among(self, worker_ids: Container[str]) -> "Cells":
        """Return the cells of those workers that are in `worker_ids`."""
        return self.where(np.array([worker_id in worker_ids for worker_id in self.worker_ids], np.bool_))

    def first(self, count: int) -> "Cells":
        return Cells(self.worker_ids[:count], self.times_ns[:count], self.roles[:count])
