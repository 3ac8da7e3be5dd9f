"""Reads a stream of occupancy as a page does, and times when the end of every step of every worker shows."""

import json
import time
from collections.abc import Mapping
from typing import Final

import httpx
import numpy as np
from numpy.typing import NDArray

from load.synthetic_fleet import synthetic_fleet

WARM_UP_S: Final = 4.0
KEPT_MS: Final = 2_000
"""Windows are revised for no longer."""


class Reader:
    """Milliseconds from the end of a step until the message that shows it had been read."""

    def __init__(self, gpus: int) -> None:
        self._ends_ns = {worker.id: worker.step_ends_ns for worker in synthetic_fleet(gpus)}
        self._step_ends_ns: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        """[workers, steps]: of each, by place in the stream, when steps end in each window; 0 where it has fewer."""
        self._covered: dict[int, NDArray[np.int64]] = {}
        """By the start of a window."""
        self.freshness_ms: list[float] = []
        self.sizes: list[int] = []

    def take(self, event: str, data: str, now_ms: float) -> None:
        """A message that was read at `now_ms`."""
        value = json.loads(data)
        if event == "members":
            self._members([worker["id"] for worker in value["workers"]])
            return
        self.sizes.append(len(data))
        for start_ms, places, covered, *_ in value["windows"]:
            self._window(start_ms, places, np.array(covered, np.int64), now_ms)
        oldest_ms = value["now_unix_ms"] - KEPT_MS
        self._covered = {start_ms: known for start_ms, known in self._covered.items() if start_ms > oldest_ms}

    def _members(self, ids: list[str]) -> None:
        ends_ns = [self._ends_ns[worker_id] for worker_id in ids]
        most = max(map(len, ends_ns), default=0)
        padded = [[0] * (most - len(ends)) + ends for ends in ends_ns]
        self._step_ends_ns = np.array(padded, np.int64).reshape(len(ids), most)
        self._covered.clear()

    def _window(self, start_ms: int, places: list[int] | None, covered: NDArray[np.int64], now_ms: float) -> None:
        """Each worker's steps end at the same places in each window: shown once it is covered up to there."""
        known = self._covered.setdefault(start_ms, np.zeros(len(self._step_ends_ns), np.int64))
        at = np.arange(len(known)) if places is None else np.array(places, np.int64)
        ends = self._step_ends_ns[at]
        shown = ends[(known[at, None] < ends) & (ends <= covered[:, None])]
        known[at] = covered
        self.freshness_ms += (now_ms - start_ms - shown / 1e6).tolist()

    def percentiles_ms(self) -> Mapping[str, float]:
        """p50 and p99."""
        p50, p99 = np.percentile(self.freshness_ms, [50, 99]).tolist() if self.freshness_ms else (np.nan, np.nan)
        return {"fresh_p50_ms": p50, "fresh_p99_ms": p99}


async def follow(url: str, reader: Reader, seconds: float) -> None:
    """Read the stream for so long after a warm-up that does not count."""
    async with httpx.AsyncClient(timeout=30) as http, http.stream("GET", f"{url}/v1/occupancy/stream") as answer:
        began_s, event, warm = time.monotonic(), "", False
        rest = b""
        async for piece in answer.aiter_raw():
            *messages, rest = (rest + piece).split(b"\n")
            now_ms = time.time_ns() / 1e6
            for line in messages:
                if line.startswith(b"event: "):
                    event = line[7:].decode()
                elif line.startswith(b"data: "):
                    reader.take(event, line[6:].decode(), now_ms)
            passed_s = time.monotonic() - began_s
            if not warm and passed_s > WARM_UP_S:
                warm = True
                reader.freshness_ms.clear()
                reader.sizes.clear()
            if passed_s > WARM_UP_S + seconds:
                return
