"""Faults of simulated devices by worker: slow GPUs and slow links, from a file that may change while they run.

    {"decode-1": {"slow": 2.5}, "decode-2": {"link_gbps": 0.5}}

They serve demonstrations, and tests of the diagnosis.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

# Interval between reads of the file.
LOOK_S: Final = 0.1


class SimFaults:
    """The current faults of one worker. None without a file, or while it is not a JSON object."""

    def __init__(self, file: Path | None, worker_id: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._worker_id = worker_id
        self._clock_s = clock_s
        self._looked_s = float("-inf")
        self._own: dict[str, Any] = {}

    def slow(self) -> float:
        """Return the factor by which steps take longer."""
        return self._number("slow", 1.0)

    def link_gbps(self, usual: float) -> float:
        """Return the speed of the link by which KV comes in."""
        return self._number("link_gbps", usual)

    def _number(self, name: str, usual: float) -> float:
        if self._file is None:
            return usual
        self._look()
        value = self._own.get(name)
        return float(value) if isinstance(value, int | float) and value > 0 else usual

    def _look(self) -> None:
        now_s = self._clock_s()
        if self._file is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            reported = json.loads(self._file.read_text())
            own = reported.get(self._worker_id) if isinstance(reported, dict) else None
            self._own = own if isinstance(own, dict) else {}
        except (OSError, ValueError):
            self._own = {}
