"""Phase shares of one observed server over time, from its successive expositions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from libs.observe.vllm import read_vllm
from libs.policy.observe import PhaseEstimator, Reading, interval

MOST_ENGINES: Final = 64
"""The most data-parallel engines behind one exposition."""


@dataclass(slots=True)
class Shares:
    """The estimated use of a stretch of time; `low` and `high` bound prefill's share."""

    t_s: float
    """The end of the stretch, in Unix seconds."""
    busy: float | None
    """Share of the time; None while nothing is known of the server's steps."""
    prefill: float | None
    """Share of busy time; None if idle or unknown."""
    low: float | None
    high: float | None


@dataclass(slots=True)
class _Engine:
    estimator: PhaseEstimator
    last: Reading


class ObservedServer:
    """The sum of a server's engines; each one learns separately, as the load of ranks may differ."""

    def __init__(self, read: Callable[[str, float], dict[str, Reading]] = read_vllm) -> None:
        self._read = read
        self._engines: dict[str, _Engine] = {}
        self._wall_s = 0.0
        self._busy_s = 0.0
        self._prefill_s = 0.0
        self._low_s = 0.0
        self._high_s = 0.0

    def scraped(self, text: str, t_s: float) -> None:
        """Process an exposition read at `t_s`; raise InvalidRequest and keep the state if it is invalid."""
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
