"""GPU time of one worker by what it was spent on, in picoseconds that add up exactly."""

from dataclasses import dataclass
from enum import Enum

from libs.policy.step_time import StepTimeModel, StepWork, split_step_ns


class Rest(Enum):
    """What a worker that computes nothing does."""

    IDLE = "idle"
    STARVED = "starved"
    """It waits for a prompt that is being computed elsewhere: a part of idle."""
    KV_WAIT = "kv_wait"
    """Blocks that are ready at their source are on their way."""


@dataclass(slots=True)
class Spent:
    """Four times that add up to all of it; starved is a part of idle."""

    prefill_ps: int = 0
    decode_ps: int = 0
    kv_wait_ps: int = 0
    idle_ps: int = 0
    starved_ps: int = 0

    @property
    def total_ps(self) -> int:
        """All of it."""
        return self.prefill_ps + self.decode_ps + self.kv_wait_ps + self.idle_ps

    def step(self, model: StepTimeModel, work: StepWork, duration_ps: int) -> None:
        """A step has passed."""
        prefill_ps, decode_ps = split_step_ns(model, work, duration_ps)
        self.prefill_ps += prefill_ps
        self.decode_ps += decode_ps

    def rested(self, what: Rest, duration_ps: int) -> None:
        """Time without a step has passed."""
        if what is Rest.KV_WAIT:
            self.kv_wait_ps += duration_ps
            return
        self.idle_ps += duration_ps
        if what is Rest.STARVED:
            self.starved_ps += duration_ps
