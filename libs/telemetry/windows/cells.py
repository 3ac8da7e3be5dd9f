"""What workers did in one window of the first tier, side by side. Pure."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.windows.ring import NO_ROLE

COVERED, PREFILL, DECODE, KV_WAIT = range(4)
"""Places in the last axis of every array of times; idle is what the other three leave of covered."""
PROVISIONAL: Final = 0x80
"""Beside the role: part of the time is a step that still runs."""
ROLE_NUMBERS: Final = {name: NO_ROLE + 1 + index for index, name in enumerate(ROLE_NAMES)}
"""How roles are named in windows."""


@dataclass(frozen=True, slots=True)
class Cells:
    """One cell for each worker."""

    worker_ids: Sequence[str]
    times_ns: NDArray[np.int64]
    """[workers, 4] int64: covered, prefill, decode, KV wait, of one GPU."""
    roles: NDArray[np.uint8]
    """[workers] uint8: a number below `PROVISIONAL` that names the role it had, not `NO_ROLE`, with `PROVISIONAL`."""

    def __len__(self) -> int:
        return len(self.worker_ids)

    def where(self, taken: NDArray[np.bool_]) -> "Cells":
        """Those of `taken` [workers]."""
        if taken.all():
            return self
        return Cells(list(compress(self.worker_ids, taken)), self.times_ns[taken], self.roles[taken])

    def among(self, worker_ids: Container[str]) -> "Cells":
        """Those of the workers that are in there."""
        return self.where(np.array([worker_id in worker_ids for worker_id in self.worker_ids], np.bool_))

    def first(self, count: int) -> "Cells":
        """The first `count` workers' cells."""
        return Cells(self.worker_ids[:count], self.times_ns[:count], self.roles[:count])
