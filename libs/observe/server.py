"""Shares of one observed server, second by second, from its successive expositions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from libs.observe.vllm import read_vllm
from libs.policy.observe.estimator import PhaseEstimator
from libs.policy.observe.intervals import Reading, interval

MOST_ENGINES: Final = 64
"""Data-parallel engines behind one exposition."""


@dataclass(slots=True)
class Shares:
    """What a stretch of time was used for. Shares are estimates; `low` and `high` bound prefill's."""

    t_s: float
    """Its end, in Unix seconds."""
    busy: float | None
    """Share of the time; None while nothing is known of the server's steps."""
    prefill: float | None
    """Share of busy time; None where it was idle or unknown."""
    low: float | None
    high: float | None


@dataclass(slots=True)
class _Engine:
    estimator: PhaseEstimator
    last: Reading


class ObservedServer:
    """A server's engines, whose shares add up. Each learns by itself: ranks may differ in what they are asked."""

    def __init__(self, read: Callable[[str, float], dict[str, Reading]] = read_vllm) -> None:
        self._read = read
        self._engines: dict[str, _Engine] = {}
        self._wall_s = 0.0
        self._busy_s = 0.0
        self._prefill_s = 0.0
        self._low_s = 0.0
        self._high_s = 0.0

    def scraped(self, text: str, t_s: float) -> None:
        """Take an exposition that was read at a time. Raises InvalidRequest, and keeps what was known."""
        for name, reading in self._read(text, t_s).items():
            engine = self._engines.get(name)
            if engine is None:
                if len(self._engines) < MOST_ENGINES:
                    self._engines[name] = _Engine(PhaseEstimator(), reading)
                continue
            before, engine.last = engine.last, reading
            # A server that restarted begins again at 0; what it did meanwhile is not known.
            if reading.t_s <= before.t_s or reading.restarted_since(before):
                continue
            estimate = engine.estimator.observe(interval(before, reading))
            if estimate is None:
                continue
            self._wall_s += reading.t_s - before.t_s
            self._busy_s += estimate.busy_s
            self._prefill_s += estimate.prefill_s
            self._low_s += estimate.prefill_low_s
            self._high_s += estimate.prefill_high_s

    def shares(self, t_s: float) -> Shares:
        """Return the shares since the last call."""
        if not self._wall_s:
            return Shares(t_s, None, None, None, None)
        busy = Shares(t_s, self._busy_s / self._wall_s, None, None, None)
        if self._busy_s:
            busy.prefill = self._prefill_s / self._busy_s
            busy.low = self._low_s / self._busy_s
            busy.high = self._high_s / self._busy_s
        self._wall_s = self._busy_s = self._prefill_s = self._low_s = self._high_s = 0.0
        return busy
