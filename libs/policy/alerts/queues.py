"""The history of the pools' queues: means over a moment and growth over half a minute."""

from collections import deque
from dataclasses import dataclass
from typing import Final

SPAN_NS: Final = 30 * 10**9
MAX_SAMPLES: Final = 256
MIN_SPAN_NS: Final = SPAN_NS // 2
"""The shortest history from which growth is computed."""
MAX_POOLS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Sample:
    at_ns: int
    depth: int


class QueueLog:
    """Queue depths by pool; the pool unseen for longest is dropped first."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], deque[_Sample]] = {}

    def add(self, pool: tuple[str, str], at_ns: int, depth: int) -> None:
        """Add a depth; the times of a pool must not decrease."""
        samples = self._samples.pop(pool, None) or deque(maxlen=MAX_SAMPLES)
        if len(self._samples) >= MAX_POOLS:
            del self._samples[next(iter(self._samples))]
        self._samples[pool] = samples
        samples.append(_Sample(at_ns, depth))
        while samples[0].at_ns < at_ns - SPAN_NS:
            samples.popleft()

    def mean(self, pool: tuple[str, str], span_ns: int) -> float:
        """Return the mean depth over the last `span_ns`; 0 for an unknown pool."""
        samples = self._samples.get(pool)
        depths = [each.depth for each in samples if each.at_ns > samples[-1].at_ns - span_ns] if samples else []
        return sum(depths) / len(depths) if depths else 0.0

    def growth_per_minute(self, pool: tuple[str, str]) -> float | None:
        """Return the slope of the least-squares line through the last half minute; None with too little history."""
        samples = self._samples.get(pool)
        if not samples or samples[-1].at_ns - samples[0].at_ns < MIN_SPAN_NS:
            return None
        times = [(sample.at_ns - samples[0].at_ns) / 60e9 for sample in samples]
        middle = sum(times) / len(times)
        spread = sum((time - middle) ** 2 for time in times)
        lean = sum((time - middle) * sample.depth for time, sample in zip(times, samples, strict=True))
        return lean / spread if spread else 0.0
