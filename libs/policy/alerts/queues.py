"""How the pools' queues have changed: means over a moment, growth over half a minute. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

SPAN_NS: Final = 30 * 10**9
"""Growth is measured over this span."""
MAX_SAMPLES: Final = 256
MIN_SPAN_NS: Final = SPAN_NS // 2
"""With less history growth is unknown."""
MAX_POOLS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Sample:
    at_ns: int
    depth: int


class QueueLog:
    """Depths by pool; the longest unseen pool goes first."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], deque[_Sample]] = {}

    def add(self, pool: tuple[str, str], at_ns: int, depth: int) -> None:
        """Enter a depth; times do not step back."""
        samples = self._samples.pop(pool, None) or deque(maxlen=MAX_SAMPLES)
        if len(self._samples) >= MAX_POOLS:
            del self._samples[next(iter(self._samples))]
        self._samples[pool] = samples
        samples.append(_Sample(at_ns, depth))
        while samples[0].at_ns < at_ns - SPAN_NS:
            samples.popleft()

    def mean(self, pool: tuple[str, str], span_ns: int) -> float:
        """Over the last `span_ns`; 0 for a stranger."""
        samples = self._samples.get(pool)
        depths = [each.depth for each in samples if each.at_ns > samples[-1].at_ns - span_ns] if samples else []
        return sum(depths) / len(depths) if depths else 0.0

    def growth_per_minute(self, pool: tuple[str, str]) -> float | None:
        """The line of least squares through the last half minute; None while too little is known."""
        samples = self._samples.get(pool)
        if not samples or samples[-1].at_ns - samples[0].at_ns < MIN_SPAN_NS:
            return None
        times = [(sample.at_ns - samples[0].at_ns) / 60e9 for sample in samples]
        middle = sum(times) / len(times)
        spread = sum((time - middle) ** 2 for time in times)
        lean = sum((time - middle) * sample.depth for time, sample in zip(times, samples, strict=True))
        return lean / spread if spread else 0.0
