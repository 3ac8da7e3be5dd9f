"""Errors injected into a cluster: stale telemetry, wrong step times, slow workers, and false prefix hints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from libs.lab.cluster.host.shape import WorkerShape
from libs.policy.step_time import StepTimeModel

MIXER: Final = 2_654_435_761
"""Knuth's multiplicative hash, which spreads request numbers evenly and identically in every run."""
HASHES: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Wrong:
    """The errors injected into a cluster; none by default."""

    telemetry_ms: float = 0.0
    """The additional age of the planner's view in milliseconds."""
    step_times: float = 0.0
    """The share by which workers overestimate (even indices) or underestimate (odd ones) their step times."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """The factor by which steps of a worker take longer than it reports and believes."""
    hints: float = 0.0
    """The share of requests for which the index falsely reports a worker that has the whole prompt."""

    def shape(self, index: int, shape: WorkerShape) -> WorkerShape:
        """Return the shape that the worker believes it has."""
        if not self.step_times:
            return shape
        off = 1 + self.step_times if index % 2 == 0 else 1 - self.step_times
        return replace(shape, step_time=shape.step_time.scaled(off))

    def steps(self, index: int, model: StepTimeModel) -> StepTimeModel:
        """Return the true duration of the worker's steps."""
        return model.scaled(self.slow[index]) if index in self.slow else model

    def hint(self, number: int, workers: Sequence[str]) -> str:
        """Return the worker falsely reported to hold the request's prompt, or an empty string."""
        drawn = number * MIXER % HASHES / HASHES
        return workers[int(drawn / self.hints * len(workers))] if drawn < self.hints else ""
