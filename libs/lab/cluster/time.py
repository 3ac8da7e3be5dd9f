"""Virtual time in picoseconds: ordered events, the clock and scheduler of the dispatcher, and durations of steps.

Durations of steps and transfers are integers, so that one formula sums many steps exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import isqrt
from typing import Final

from libs.policy.step_time import MATRIX_ROWS, StepTimeModel, StepWork
from libs.runtime.clock import Call

PS_PER_NS: Final = 1_000
# One second, because policies interpret a time of 0 as "not yet".
START_PS: Final = 10**12
_EVENT, _SOON = 0, 1


class VirtualTime:
    """A clock and scheduler in virtual time. Events at one moment run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_ps = START_PS
        self.events = 0
        """The number of events run so far."""
        self._heap: list[tuple[int, int, int, Callable[[], object]]] = []
        self._numbers = count()

    def now_ns(self) -> int:
        return self.now_ps // PS_PER_NS

    def soon(self, call: Call) -> None:
        """Call after all other events of this moment."""
        heappush(self._heap, (self.now_ps, _SOON, next(self._numbers), call))

    def at(self, unix_ns: int, call: Call) -> None:
        """Call at that time, or now if it has passed."""
        self.at_ps(unix_ns * PS_PER_NS, call)

    def at_ps(self, time_ps: int, call: Callable[[], object]) -> None:
        """Call at that time in picoseconds, or now if it has passed."""
        at_ps = time_ps if time_ps > self.now_ps else self.now_ps
        heappush(self._heap, (at_ps, _EVENT, next(self._numbers), call))

    def in_ps(self, delay_ps: int, call: Callable[[], object]) -> None:
        heappush(self._heap, (self.now_ps + delay_ps, _EVENT, next(self._numbers), call))

    def run(self, going_on: Callable[[], bool]) -> None:
        """Run events until none are left or `going_on` returns False."""
        heap = self._heap
        while heap and going_on():
            self.now_ps, _, _, call = heappop(heap)
            self.events += 1
            call()


_PS: Final = 1_000
"""Picoseconds in a nanosecond, for conversions of step times."""


@dataclass(frozen=True, slots=True)
class Coast:
    """Consecutive decode steps over the same sequences, each of which reads one token more than the one before."""

    start_ps: int
    first_ps: int
    growth_ps: int
    """The increase in duration from each step to the next."""

    def end_ps(self, steps: int) -> int:
        """Return the time at which the given number of steps have passed."""
        return self.start_ps + steps * self.first_ps + self.growth_ps * (steps * (steps - 1) // 2)

    def steps_by(self, time_ps: int) -> int:
        """Return the number of steps that have ended by then.

        This is the largest k with g·k² + (2f − g)·k ≤ 2·t in integers.
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


class StepDurations:
    """A step-time model whose decode steps take an integer number of picoseconds."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self._fixed_ps = round(model.decode_fixed_ns * _PS)
        self._matrix_ps = round(model.decode_matrix_ns * _PS)
        self._sequence_ps = round(model.decode_sequence_ns * _PS)
        self._kv_token_ps = round(model.decode_kv_token_ns * _PS)
        self._wide_ps = round(model.decode_wide_ns * _PS) if model.saturating_sequences else 0
        self._exit_ps = round(model.graph_exit_ns * _PS) if model.graph_sequences else 0

    def step_ps(self, work: StepWork) -> int:
        """Return the duration of one step, at least a picosecond."""
        if work.prefill_tokens:
            return max(round(self.model.step_ns(work) * _PS), 1)
        return self.decode_ps(work.decode_sequences, work.decode_kv_tokens)

    def decode_ps(self, sequences: int, kv_tokens: int) -> int:
        """Return the duration of a step that only decodes, at least a picosecond."""
        fixed_ps = self._fixed_ps + (self._matrix_ps if sequences >= MATRIX_ROWS else 0)
        if self._wide_ps and sequences > self.model.saturating_sequences:
            fixed_ps += self._wide_ps * (sequences - self.model.saturating_sequences)
        if self._exit_ps and sequences > self.model.graph_sequences:
            fixed_ps += self._exit_ps
        return max(fixed_ps + sequences * self._sequence_ps + kv_tokens * self._kv_token_ps, 1)

    def coast(self, start_ps: int, sequences: int, kv_tokens: int) -> Coast:
        """Return the decode steps over the same sequences from `start_ps` on."""
        return Coast(start_ps, self.decode_ps(sequences, kv_tokens), sequences * self._kv_token_ps)
