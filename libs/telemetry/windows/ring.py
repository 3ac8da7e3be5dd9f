"""The windows of one length: a ring of arrays, the oldest overwritten by the newest. Pure."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NO_ROLE: Final = 0
"""The role of a worker without a written window."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Windows of one length, and how many of them are kept."""

    window_ns: int
    windows: int


class Ring:
    """One tier, by slot: who has which slot is known to its owner."""

    def __init__(self, tier: Tier, slots: int) -> None:
        self.tier = tier
        # Nanoseconds of up to four seconds fit 32 bits.
        kind = np.uint32 if tier.window_ns < 2**32 else np.int64
        self._times: NDArray[np.uint32 | np.int64] = np.zeros((tier.windows, slots, 4), kind)
        self._roles = np.zeros((tier.windows, slots), np.uint8)
        self._starts = np.full(tier.windows, -1, np.int64)
        self._newest = 0
        self.changed: set[int] = set()
        """Starts of windows that were written since they were last kept elsewhere; no more than there are windows."""

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
        """Whether windows are kept from so long ago on."""
        return at_ns // self.tier.window_ns > self._newest - self.tier.windows

    def holds(self, start_ns: int) -> bool:
        """Whether the window that begins there is still kept."""
        return bool(self._starts[start_ns // self.tier.window_ns % self.tier.windows] == start_ns)

    def get(self, row: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """[slots, 4] int64."""
        times: NDArray[np.int64] = self._times[row, slots].astype(np.int64)
        return times

    def put(self, row: int, slots: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Times [slots, 4] in place of what a window held."""
        self._times[row, slots] = times

    def add(self, row: int, slots: NDArray[np.int64], more: NDArray[np.int64]) -> None:
        """Change a window by `more` [slots, 4], which may be negative as long as the sums are not."""
        self._times[row, slots] = (self.get(row, slots) + more).astype(self._times.dtype)

    def set_roles(
        self, row: int, slots: NDArray[np.int64], roles: NDArray[np.uint8], *, over: NDArray[np.bool_] | None = None
    ) -> None:
        """Roles of workers in a window; where it is not `over`, those that are known already stay."""
        if over is not None:
            known = self._roles[row, slots]
            roles = np.where(over | (known == NO_ROLE), roles, known)
        self._roles[row, slots] = roles

    def present(self, low_ns: int, high_ns: int, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[slots]: of which something was written in any of the windows in [low, high)."""
        starts = self._within(low_ns, high_ns)
        rows = starts // self.tier.window_ns % self.tier.windows
        rows = rows[self._starts[rows] == starts]
        found: NDArray[np.bool_] = (self._roles[rows[:, None], slots] != NO_ROLE).any(axis=0)
        return found

    def read(self, low_ns: int, high_ns: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """(starts, times, roles) of the windows in [low, high), zeros for those that are not kept."""
        starts = self._within(low_ns, high_ns)
        rows = starts // self.tier.window_ns % self.tier.windows
        kept = self._starts[rows] == starts
        # In one go: what is asked of a few workers is to cost nothing for the others.
        cells = rows[:, None], slots
        times = np.where(kept[:, None, None], self._times[cells].astype(np.int64), 0)
        roles = np.where(kept[:, None], self._roles[cells], NO_ROLE)
        return starts, times, roles.astype(np.uint8)

    def _within(self, low_ns: int, high_ns: int) -> NDArray[np.int64]:
        length = self.tier.window_ns
        return np.arange(-(-low_ns // length), high_ns // length, dtype=np.int64) * length
