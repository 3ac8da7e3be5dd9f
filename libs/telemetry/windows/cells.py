"""Phase times of many workers in one window of the first tier, as arrays. Pure."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.windows.ring import NO_ROLE

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
