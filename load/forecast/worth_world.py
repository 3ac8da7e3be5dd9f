"""Minutes of known demand, in workers' time, and what workers would do of it."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.capacity.plan import PHASES, Phase, Whole
from libs.policy.forecast.history import Floats

START_MIN: Final = 5
MOST_WORKERS: Final = 2000
"""Of a pool."""

Wanted = dict[Phase, Whole]
"""Workers that are ordered or there, [minutes]."""


@dataclass(frozen=True, slots=True)
class World:
    """Minutes of demand, in workers' time."""

    work: dict[Phase, Floats]
    requests: Floats
    """A second."""
    tokens: dict[Phase, Floats]
    """A second."""
    seconds_each: dict[Phase, float]
    """Of a worker, for a token."""
    most: dict[Phase, Floats]
    """[workers - 1] The most work that a pool takes, by its table."""
    ahead: dict[Phase, Floats]
    """[minutes, levels] Work that is forecast for the time at which a worker ordered now is there; nan: not known."""
    start_min: int = START_MIN
    """That workers take to start."""
    moves: bool = False
    """Whether workers change roles within a minute while others start."""

    def needed(self, phase: Phase, work: Floats) -> Whole:
        """Workers that take so much; at least one."""
        counts = np.searchsorted(self.most[phase], work - 1e-9) + 1
        return np.asarray(np.minimum(counts, MOST_WORKERS), np.int64)

    def in_time(self, active: Wanted) -> Floats:
        """[minutes] Share of requests that these workers serve in time."""
        shares = [
            np.minimum(self.most[phase][active[phase] - 1] / np.maximum(self.work[phase], 1e-9), 1.0)
            for phase in PHASES
        ]
        return np.asarray(np.minimum(*shares))

    def in_time_with_moves(self, active: Wanted, *, seeing: bool = False) -> Floats:
        """[minutes] As `in_time`, where workers change roles between minutes: all are shared out by the work of the
        minute before, or, `seeing`, of the minute itself."""
        total = active["prefill"] + active["decode"]
        by = self.work if seeing else {p: np.concatenate([w[:1], w[:-1]]) for p, w in self.work.items()}
        least, prefill = np.full(len(total), -1.0), np.ones(len(total), np.int64)
        for count in range(1, int(total.max())):
            others = np.maximum(total - count, 1)
            room = np.minimum(
                self.most["prefill"][count - 1] / np.maximum(by["prefill"], 1e-9),
                self.most["decode"][others - 1] / np.maximum(by["decode"], 1e-9),
            )
            better = (room > least) & (count < total)
            least, prefill = np.where(better, room, least), np.where(better, count, prefill)
        return self.in_time({"prefill": prefill, "decode": np.maximum(total - prefill, 1)})
