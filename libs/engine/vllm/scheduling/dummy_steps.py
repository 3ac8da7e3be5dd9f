"""Dummy steps of vLLM's, which it runs past its scheduler: counted where it runs them, read by the worker.

The ranks of a data-parallel group run their steps in lockstep. One that has nothing to compute while another has runs
the model on made-up tokens (`execute_dummy_batch`), of which no message of vLLM's tells: nothing is scheduled. So they
stand in memory that EngineCore and the worker both map, the newest in a ring. Time is that around vLLM's call.
"""

import functools
import mmap
import time
from pathlib import Path
from typing import Any, Final

RING: Final = 4_096
"""Steps that are held: of those that the worker does not read in time the number is known, not when they ran."""
NUMBER_BYTES: Final = 8
Span = tuple[int, int]
"""Start and end in Unix ns."""
NOWHEN: Final[Span] = (0, 0)


class DummySteps:
    """One writer, one reader. How many there were stands first, and is written last."""

    def __init__(self, path: Path) -> None:
        """Open the ring at `path`, made and filled with zeros where there is none."""
        size = (1 + 2 * RING) * NUMBER_BYTES
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("q")  # each is written and read as a whole
        self._read = 0

    def ended(self, start_ns: int, end_ns: int) -> None:
        """A step has ended."""
        count = self._numbers[0]
        at = _place(count)
        self._numbers[at], self._numbers[at + 1] = start_ns, end_ns
        self._numbers[0] = count + 1

    def take(self) -> tuple[Span, ...]:
        """Those that have ended since the last call; `NOWHEN` for each that was overwritten before."""
        first, count = self._read, self._numbers[0]
        found = [self._span(number) for number in range(max(first, count - RING), count)]
        oldest = self._numbers[0] - RING + 1  # that the writer has not begun to overwrite by now
        known = found[max(oldest - (count - len(found)), 0) :]
        self._read = count
        return (*[NOWHEN] * (count - first - len(known)), *known)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self._numbers.release()
        self._map.close()

    def _span(self, number: int) -> Span:
        at = _place(number)
        return self._numbers[at], self._numbers[at + 1]


def _place(number: int) -> int:
    return 1 + 2 * (number % RING)


def count_in(engine_core: Any, steps: DummySteps) -> None:
    """Have vLLM's EngineCore, the class, note each dummy step that it runs in this process. To be called once."""
    run = engine_core.execute_dummy_batch

    @functools.wraps(run)
    def counted(self: Any) -> None:
        start_ns = time.time_ns()
        run(self)
        steps.ended(start_ns, time.time_ns())

    engine_core.execute_dummy_batch = counted
