"""Dummy steps of vLLM, which bypass its scheduler: recorded where vLLM runs them, read by the worker.

The ranks of a data-parallel group run their steps in lockstep. A rank without work runs the model on made-up tokens
(`execute_dummy_batch`) while another rank computes. Nothing is scheduled then, so no message of vLLM mentions it.
The steps are therefore written to a ring in memory that EngineCore and the worker both map. Their times are taken
around vLLM's call.
"""

import functools
import mmap
import time
from pathlib import Path
from typing import Any, Final

# Number of steps in the ring. For steps that the worker does not read in time only their count is known.
RING: Final = 4_096
NUMBER_BYTES: Final = 8
Span = tuple[int, int]
"""Start and end of a step in Unix nanoseconds."""
NOWHEN: Final[Span] = (0, 0)


class DummySteps:
    """A ring for one writer and one reader. The count of steps is its first number, and is written last."""

    def __init__(self, path: Path) -> None:
        """Open the ring at `path`, and create it filled with zeros if there is none."""
        size = (1 + 2 * RING) * NUMBER_BYTES
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("q")  # each is written and read as a whole
        self._read = 0

    def ended(self, start_ns: int, end_ns: int) -> None:
        count = self._numbers[0]
        at = _place(count)
        self._numbers[at], self._numbers[at + 1] = start_ns, end_ns
        self._numbers[0] = count + 1

    def take(self) -> tuple[Span, ...]:
        """Return the steps that have ended since the last call, with `NOWHEN` for each that was overwritten before."""
        first, count = self._read, self._numbers[0]
        found = [self._span(number) for number in range(max(first, count - RING), count)]
        oldest = self._numbers[0] - RING + 1  # the oldest that the writer has not begun to overwrite
        known = found[max(oldest - (count - len(found)), 0) :]
        self._read = count
        return (*[NOWHEN] * (count - first - len(known)), *known)

    def close(self) -> None:
        """Unmap the ring, which must not be used afterwards. Idempotent."""
        self._numbers.release()
        self._map.close()

    def _span(self, number: int) -> Span:
        at = _place(number)
        return self._numbers[at], self._numbers[at + 1]


def _place(number: int) -> int:
    return 1 + 2 * (number % RING)


def count_in(engine_core: Any, steps: DummySteps) -> None:
    """Patch vLLM's EngineCore class to record each dummy step that it runs in this process. Call it once."""
    run = engine_core.execute_dummy_batch

    @functools.wraps(run)
    def counted(self: Any) -> None:
        start_ns = time.time_ns()
        run(self)
        steps.ended(start_ns, time.time_ns())

    engine_core.execute_dummy_batch = counted
