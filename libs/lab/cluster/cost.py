"""What steps and transfers take, in whole picoseconds, so that a sum of many steps is exact in one formula."""

from dataclasses import dataclass
from math import isqrt
from typing import Final

from libs.policy.step_time import MATRIX_ROWS, StepTimeModel, StepWork

_PS: Final = 1_000
"""In a nanosecond."""


@dataclass(frozen=True, slots=True)
class Coast:
    """Decode steps in a row over the same sequences, each of which reads one token more than the one before."""

    start_ps: int
    first_ps: int
    """The first step."""
    growth_ps: int
    """By how much each step is longer than the one before."""

    def end_ps(self, steps: int) -> int:
        """When that many steps have passed."""
        return self.start_ps + steps * self.first_ps + self.growth_ps * (steps * (steps - 1) // 2)

    def steps_by(self, time_ps: int) -> int:
        """Steps that have ended by then.

        The largest k with g·k² + (2f − g)·k ≤ 2·t, all of them integers.
        """
        passed = time_ps - self.start_ps
        if passed <= 0:
            return 0
        growth, linear = self.growth_ps, 2 * self.first_ps - self.growth_ps
        if not growth:
            return passed // self.first_ps if self.first_ps else 0
        steps = (isqrt(linear * linear + 8 * growth * passed) - linear) // (2 * growth)
        while self.end_ps(steps + 1) <= time_ps:
            steps += 1
        while self.end_ps(steps) > time_ps:
            steps -= 1
        return steps


class StepCost:
    """A step-time model whose decode steps are integers."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self._fixed_ps = round(model.decode_fixed_ns * _PS)
        self._matrix_ps = round(model.decode_matrix_ns * _PS)
        self._sequence_ps = round(model.decode_sequence_ns * _PS)
        self._kv_token_ps = round(model.decode_kv_token_ns * _PS)

    def step_ps(self, work: StepWork) -> int:
        """One step, at least a picosecond."""
        if work.prefill_tokens:
            return max(round(self.model.step_ns(work) * _PS), 1)
        return self.decode_ps(work.decode_sequences, work.decode_kv_tokens)

    def decode_ps(self, sequences: int, kv_tokens: int) -> int:
        """A step that only decodes, at least a picosecond."""
        fixed_ps = self._fixed_ps + (self._matrix_ps if sequences >= MATRIX_ROWS else 0)
        return max(fixed_ps + sequences * self._sequence_ps + kv_tokens * self._kv_token_ps, 1)

    def coast(self, start_ps: int, sequences: int, kv_tokens: int) -> Coast:
        """Steps over the same sequences from now on."""
        return Coast(start_ps, self.decode_ps(sequences, kv_tokens), sequences * self._kv_token_ps)
