"""What a cluster is wrong about: telemetry that is old, step times that are off, slow workers, false prefix hints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from libs.lab.cluster.host.shape import WorkerShape
from libs.policy.step_time import StepTimeModel

MIXER: Final = 2_654_435_761
"""Knuth's multiplicative hash: spreads numbers of requests evenly, and alike in every run."""
HASHES: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Wrong:
    """Nothing is, unless said."""

    telemetry_ms: float = 0.0
    """By which what the planner sees is older than it is anyway."""
    step_times: float = 0.0
    """Share by which workers take their steps to be longer (even ones) or shorter (odd ones) than they are."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Times as long as they say and believe steps of these workers take."""
    hints: float = 0.0
    """Share of requests of which the index says that some worker has the whole prompt, and it has not."""

    def shape(self, index: int, shape: WorkerShape) -> WorkerShape:
        """A worker as it takes itself to be."""
        if not self.step_times:
            return shape
        off = 1 + self.step_times if index % 2 == 0 else 1 - self.step_times
        return replace(shape, step_time=shape.step_time.scaled(off))

    def steps(self, index: int, model: StepTimeModel) -> StepTimeModel:
        """What its steps take."""
        return model.scaled(self.slow[index]) if index in self.slow else model

    def hint(self, number: int, workers: Sequence[str]) -> str:
        """Who is falsely said to have the prompt of a request; empty: nobody."""
        drawn = number * MIXER % HASHES / HASHES
        return workers[int(drawn / self.hints * len(workers))] if drawn < self.hints else ""
