"""The measured steps that a fit uses, bounded in number and spread over the sizes that occurred."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.step_time import StepWork

# Number of step sizes, by powers of two, that are kept. The least recently seen size is dropped.
MAX_CELLS: Final = 96
STEPS_PER_CELL: Final = 6
# After this many newer steps a step has half its weight.
HALF_LIFE_STEPS: Final = 4096
MAX_STEP_NS: Final = 600 * 1_000_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured steps as columns, each [steps] float64."""

    prefill_tokens: Floats
    squared: Floats
    batch: Floats
    kv_tokens: Floats
    duration_ns: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.duration_ns)

    @property
    def has_prefill(self) -> NDArray[np.bool_]:
        """[steps] bool: the steps that compute prompt tokens."""
        return self.prefill_tokens > 0

    @property
    def has_decode(self) -> NDArray[np.bool_]:
        """[steps] bool: the steps that decode at least one sequence."""
        return self.batch > 0

    @property
    def kinds(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Three masks, [steps] bool each: pure prefill, pure decode, and mixed steps."""
        prefill, decode = self.has_prefill, self.has_decode
        return prefill & ~decode, decode & ~prefill, prefill & decode

    def pick(self, chosen: NDArray[np.bool_]) -> "Rows":
        """Return the rows of the chosen steps only."""
        return Rows(
            self.prefill_tokens[chosen],
            self.squared[chosen],
            self.batch[chosen],
            self.kv_tokens[chosen],
            self.duration_ns[chosen],
            self.weight[chosen],
        )


class StepSamples:
    """The latest few steps of every size. A long run of equal steps does not displace steps of other sizes."""

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, ...], deque[tuple[int, StepWork, int]]] = OrderedDict()
        self._taken = 0

    def add(self, work: StepWork, duration_ns: int) -> bool:
        """Record a finished step. Return False for a step without work or with an impossible duration, which is
        ignored.
        """
        if not 0 < duration_ns <= MAX_STEP_NS or not (work.prefill_tokens or work.decode_sequences):
            return False
        self._taken += 1
        cell = (
            work.prefill_tokens.bit_length(),
            work.prefill_context_tokens.bit_length() // 2,
            work.decode_sequences.bit_length(),
            work.decode_kv_tokens.bit_length() // 2,
        )
        self._cells.setdefault(cell, deque(maxlen=STEPS_PER_CELL)).append((self._taken, work, duration_ns))
        self._cells.move_to_end(cell)
        if len(self._cells) > MAX_CELLS:
            self._cells.popitem(last=False)
        return True

    def rows(self) -> Rows:
        """Return all recorded steps in a fixed order."""
        table = np.array(list(self._entries()), dtype=np.float64).reshape(-1, 6)
        return Rows(*(table[:, index] for index in range(6)))

    def _entries(self) -> Iterator[tuple[float, ...]]:
        for cell in self._cells.values():
            for taken, work, duration_ns in cell:
                weight = 0.5 ** ((self._taken - taken) / HALF_LIFE_STEPS)
                yield (
                    work.prefill_tokens,
                    work.squared,
                    work.decode_sequences,
                    work.decode_kv_tokens,
                    duration_ns,
                    weight,
                )
