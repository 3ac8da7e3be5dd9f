"""The phase shares of a server observed from outside, summed over its engines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libs.observe.vllm import MOST_ENGINES, VllmParser
from libs.policy.observe import PhaseEstimator, StepCost
from libs.policy.observed_work import Reading, interval


@dataclass(slots=True)
class ObservedShares:
    """The estimated use of a stretch of time; `low` and `high` bound prefill's share."""

    t_s: float
    """The end of the stretch, in Unix seconds."""
    busy: float | None
    """The share of the time; None while nothing is known of the server's steps."""
    prefill: float | None
    """The share of busy time; None if idle or unknown."""
    low: float | None
    high: float | None


@dataclass(slots=True)
class EstimatedTime:
    """Estimated seconds, summed over engines; `wall_s` is 0 if nothing is known."""

    wall_s: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    restarted: bool = False
    """True if a counter decreased, which means that the server restarted."""


@dataclass(slots=True)
class _Engine:
    estimator: PhaseEstimator
    last: Reading


class ObservedServer:
    """The estimators of a server's engines; each learns separately, since the load of ranks may differ."""

    def __init__(self, may_fit: Callable[[bool], bool] = lambda first: True) -> None:
        self._may_fit = may_fit
        self._parser = VllmParser()
        self._engines: dict[str, _Engine] = {}
        self._sum = EstimatedTime()

    @property
    def cost(self) -> StepCost | None:
        """The step cost of the first engine whose cost is known; None while there is none."""
        return next((each.estimator.cost for each in self._engines.values() if each.estimator.cost is not None), None)

    def scraped(self, text: str, t_s: float) -> None:
        """Process an exposition read at `t_s`; raise InvalidRequest and keep the state if it is invalid."""
        self.take(self._parser.parse(text.encode(), t_s).readings)

    def take(self, readings: Mapping[str, Reading]) -> EstimatedTime:
        """Process readings by engine, and return the use of the time since the last ones."""
        found = EstimatedTime()
        for name, reading in readings.items():
            engine = self._engines.get(name)
            if engine is None:
                if len(self._engines) < MOST_ENGINES:
                    self._engines[name] = _Engine(PhaseEstimator(self._may_fit), reading)
                continue
            before, engine.last = engine.last, reading
            # A restarted server begins again at 0; its work in the meantime is unknown.
            if reading.restarted_since(before):
                found.restarted = True
                continue
            if reading.t_s <= before.t_s:
                continue
            estimate = engine.estimator.observe(interval(before, reading))
            if estimate is None:
                continue
            found.wall_s += reading.t_s - before.t_s
            found.busy_s += estimate.busy_s
            found.prefill_s += estimate.prefill_s
            found.low_s += estimate.prefill_low_s
            found.high_s += estimate.prefill_high_s
        self._sum.wall_s += found.wall_s
        self._sum.busy_s += found.busy_s
        self._sum.prefill_s += found.prefill_s
        self._sum.low_s += found.low_s
        self._sum.high_s += found.high_s
        return found

    def shares(self, t_s: float) -> ObservedShares:
        """Return the shares since the last call."""
        found, self._sum = self._sum, EstimatedTime()
        if not found.wall_s:
            return ObservedShares(t_s, None, None, None, None)
        busy = ObservedShares(t_s, found.busy_s / found.wall_s, None, None, None)
        if found.busy_s:
            busy.prefill = found.prefill_s / found.busy_s
            busy.low = found.low_s / found.busy_s
            busy.high = found.high_s / found.busy_s
        return busy
