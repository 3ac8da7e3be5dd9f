"""Readers that follow the stream of occupancy as a page does, and time when the end of each step is shown."""

import json
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

import httpx
import numpy as np
from numpy.typing import NDArray

from load.metrics.synthetic_fleet import synthetic_fleet

WARM_UP_S: Final = 4.0
# Windows older than this are no longer revised.
KEPT_MS: Final = 2_000


class Reader:
    """A reader that measures the milliseconds from the end of a step until the message that shows it has been read."""

    def __init__(self, gpus: int) -> None:
        self._ends_ns = {worker.id: worker.step_ends_ns for worker in synthetic_fleet(gpus)}
        self._step_ends_ns: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        """[workers, steps]: the ends of steps in each window, by the worker's place in the stream; 0 for missing steps.
        """
        self._covered: dict[int, NDArray[np.int64]] = {}
        """The covered nanoseconds of each worker, by the start of the window."""
        self.freshness_ms: list[float] = []
        self.sizes: list[int] = []

    def take(self, event: str, data: str, now_ms: float) -> None:
        """Process a message that was read at `now_ms`."""
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
        # Each worker's steps end at the same offsets in each window. A step is shown once the window is covered up to
        # its end.
        known = self._covered.setdefault(start_ms, np.zeros(len(self._step_ends_ns), np.int64))
        at = np.arange(len(known)) if places is None else np.array(places, np.int64)
        ends = self._step_ends_ns[at]
        shown = ends[(known[at, None] < ends) & (ends <= covered[:, None])]
        known[at] = covered
        self.freshness_ms += (now_ms - start_ms - shown / 1e6).tolist()

    def percentiles_ms(self) -> Mapping[str, float]:
        p50, p99 = np.percentile(self.freshness_ms, [50, 99]).tolist() if self.freshness_ms else (np.nan, np.nan)
        return {"fresh_p50_ms": p50, "fresh_p99_ms": p99}


class Ages:
    """The age of the data on a page, measured from the end of the time that each worker's telemetry covers."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._shown_ms: dict[str, float] = {}
        """The end of the covered time of each worker. A worker that has left remains, and its data ages."""

    def take(self, event: str, data: str) -> None:
        value = json.loads(data)
        if event == "members":
            self._ids = [worker["id"] for worker in value["workers"]]
            return
        for start_ms, places, covered, *_ in value["windows"]:
            for place, covered_ns in zip(range(len(covered)) if places is None else places, covered, strict=True):
                if covered_ns:
                    name = self._ids[place]
                    self._shown_ms[name] = max(self._shown_ms.get(name, 0.0), start_ms + covered_ns / 1e6)

    @property
    def workers(self) -> int:
        """The number of workers with data on the page."""
        return len(self._shown_ms)

    def newest_s(self, now_ms: float) -> float:
        """Return the age of the newest data of any worker; NaN before the first data."""
        return (now_ms - max(self._shown_ms.values(), default=math.nan)) / 1e3

    def stalest_s(self, now_ms: float) -> float:
        """Return the age of the newest data of the worker that is furthest behind; NaN before the first data."""
        return (now_ms - min(self._shown_ms.values(), default=math.nan)) / 1e3


async def messages(url: str) -> AsyncGenerator[tuple[str, str, float], None]:
    """Yield (event, data, Unix ms of arrival) of each message of a stream, until the stream ends.

    Raise httpx.HTTPError on failure.
    """
    async with httpx.AsyncClient(timeout=30) as http, http.stream("GET", f"{url}/v1/occupancy/stream") as answer:
        event, rest = "", b""
        async for piece in answer.aiter_raw():
            *lines, rest = (rest + piece).split(b"\n")
            now_ms = time.time_ns() / 1e6
            for line in lines:
                if line.startswith(b"event: "):
                    event = line[7:].decode()
                elif line.startswith(b"data: "):
                    yield event, line[6:].decode(), now_ms


async def follow(url: str, reader: Reader, seconds: float) -> None:
    """Read the stream for `seconds` after an uncounted warm-up."""
    began_s, warm = time.monotonic(), False
    async with aclosing(messages(url)) as coming:
        async for event, data, now_ms in coming:
            reader.take(event, data, now_ms)
            passed_s = time.monotonic() - began_s
            if not warm and passed_s > WARM_UP_S:
                warm = True
                reader.freshness_ms.clear()
                reader.sizes.clear()
            if passed_s > WARM_UP_S + seconds:
                return
