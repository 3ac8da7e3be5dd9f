"""GPU time of one worker by use, in picoseconds that add up exactly."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from libs.lab.cluster.cost import Coast
from libs.lab.cluster.time import PS_PER_NS
from libs.policy.step_time import StepTimeModel, StepWork, split_step_ns
from libs.policy.worker.handing_over import Staying

# Each step weighs 0.8 of the next one in the mean, so earlier ones would not change a bit of it.
WEIGHED_STEPS: Final = 256


class Rest(Enum):
    """Categories of time in which a worker computes nothing."""

    IDLE = "idle"
    STARVED = "starved"
    """A prompt is being computed elsewhere; this time is part of idle."""
    KV_WAIT = "kv_wait"
    """Blocks that are ready at their source are on their way."""


@dataclass(slots=True)
class PhaseTotals:
    """Times by category. The first four add up to the total, and starved is a part of idle."""

    prefill_ps: int = 0
    decode_ps: int = 0
    kv_wait_ps: int = 0
    idle_ps: int = 0
    starved_ps: int = 0

    @property
    def total_ps(self) -> int:
        return self.prefill_ps + self.decode_ps + self.kv_wait_ps + self.idle_ps

    def step(self, model: StepTimeModel, work: StepWork, duration_ps: int) -> None:
        """Add the time of a step, split by phase."""
        prefill_ps, decode_ps = split_step_ns(model, work, duration_ps)
        self.prefill_ps += prefill_ps
        self.decode_ps += decode_ps

    def rested(self, what: Rest, duration_ps: int) -> None:
        """Add time in which no step ran."""
        if what is Rest.KV_WAIT:
            self.kv_wait_ps += duration_ps
            return
        self.idle_ps += duration_ps
        if what is Rest.STARVED:
            self.starved_ps += duration_ps


class RecentDecodes:
    """The latest decode steps, whose mean is the same for single steps and coasts."""

    def __init__(self) -> None:
        self._runs: deque[tuple[Coast, int]] = deque(maxlen=WEIGHED_STEPS)
        self._mean_s: float | None = 0.0

    def stepped(self, coast: Coast, steps: int) -> None:
        """Add `steps` further steps of a coast."""
        self._runs.append((coast, steps))
        self._mean_s = None

    def mean_s(self) -> float:
        """Return the running mean that a live worker would have; 0 before the first step."""
        if self._mean_s is None:
            staying = Staying()
            for duration_ns in self._durations_ns():
                staying = staying.stepped(duration_ns / 1e9)
            self._mean_s = staying.tpot_s
        return self._mean_s

    def _durations_ns(self) -> list[int]:
        """Return the durations of the latest steps, the earliest first."""
        found: list[int] = []
        for coast, steps in reversed(self._runs):
            first = max(steps - (WEIGHED_STEPS - len(found)), 0)
            ends_ns = [coast.end_ps(step) // PS_PER_NS for step in range(first, steps + 1)]
            found += [ends_ns[place] - ends_ns[place - 1] for place in range(len(ends_ns) - 1, 0, -1)]
            if len(found) == WEIGHED_STEPS:
                break
        return found[::-1]
