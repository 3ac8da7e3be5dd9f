"""The running step, published to the worker as a few numbers in memory that both processes map.

vLLM reports a step only after it has ended. Its reports arrive in order with its messages; this memory is only
polled.
"""

import mmap
import struct
from pathlib import Path
from typing import Final

import msgspec

from libs.policy.step_time import StepWork

# Number, start, KV wait not reported yet, and six figures of the work. A version precedes and follows them.
BODY: Final = struct.Struct("<9q")
VERSION: Final = struct.Struct("<q")
READ_TRIES: Final = 3


class Running(msgspec.Struct, frozen=True):
    """The running step as the board shows it."""

    number: int
    """Number of steps that have begun, including this one; 0 if none runs."""
    start_unix_ns: int
    pending_wait_ns: int
    """Start of the first ended KV wait that no report contains yet; 0 if there is none."""
    work: StepWork


NOBODY: Final = Running(0, 0, 0, StepWork())


class Board:
    """A board for one writer and one reader. The reader retries if the writer was in the middle of writing."""

    def __init__(self, path: Path) -> None:
        """Open the board at `path`, and create it filled with zeros if there is none."""
        with path.open("a+b") as file:
            file.truncate(BODY.size + 2 * VERSION.size)
            self._map = mmap.mmap(file.fileno(), BODY.size + 2 * VERSION.size)
        self._version = 0

    def write(self, running: Running) -> None:
        """Publish the step that runs from now on."""
        self._version += 1
        work = running.work
        figures = (
            work.prefill_tokens, work.prefill_sequences, work.prefill_context_tokens, work.prefill_squared_tokens,
            work.decode_sequences, work.decode_kv_tokens,
        )  # fmt: skip
        version = VERSION.pack(self._version)
        self._map[:8] = version
        self._map[8:-8] = BODY.pack(running.number, running.start_unix_ns, running.pending_wait_ns, *figures)
        self._map[-8:] = version

    def read(self) -> Running | None:
        """Return the running step, or None while it is being written."""
        for _ in range(READ_TRIES):
            after, body, before = self._map[-8:], self._map[8:-8], self._map[:8]  # in reverse order of writing
            if before == after:
                number, start_ns, wait_ns, tokens, sequences, context, squared, decodes, kv_tokens = BODY.unpack(body)
                work = StepWork(tokens, sequences, context, decodes, kv_tokens, squared)
                return Running(number, start_ns, wait_ns, work)
        return None

    def close(self) -> None:
        """Unmap the board, which must not be used afterwards. Idempotent."""
        self._map.close()
