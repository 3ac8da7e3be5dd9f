"""Predictors of Dynamo's planner for the next interval: the last value, or a Kalman filter with a trend. Pure.

Read in ai-dynamo 1.6.1 (wheel): dynamo/planner/core/load/predictors.py, its defaults in
dynamo/planner/config/defaults.py, and dynamo/planner/plugins/builtins/local_planner.py for its inputs.
"""

from math import isfinite
from typing import Final, Literal, Protocol

PredictorName = Literal["constant", "kalman"]

LEVEL_NOISE: Final = 1.0
TREND_NOISE: Final = 0.1
MEASUREMENT_NOISE: Final = 10.0
FIRST_VARIANCE: Final = 1000.0
MIN_POINTS: Final = 5
"""The number of points below which the filter predicts the last value."""


class Predictor(Protocol):
    """A predictor of the next value of a series."""

    def add(self, value: float) -> None:
        """Add the value of the last interval. Leading zeros are skipped."""
        ...

    def next(self) -> float:
        """Return the value predicted for the next interval; 0 before the first value."""
        ...


class Constant:
    """A predictor that repeats the last value."""

    def __init__(self) -> None:
        self._last = 0.0

    def add(self, value: float) -> None:
        self._last = value

    def next(self) -> float:
        return self._last


class Kalman:
    """A filter with a level and a trend: each step the level grows by the trend, and both drift."""

    def __init__(self) -> None:
        self._points = 0
        self._last = 0.0
        self._level = self._trend = 0.0
        self._level_variance = self._trend_variance = FIRST_VARIANCE
        self._covariance = 0.0
        self._predicted = False

    def add(self, value: float) -> None:
        """Correct the filter by an observed value."""
        if not self._points and not value:
            return
        self._points += 1
        self._last = value
        if self._points == 1:
            self._level = value
            return
        if not self._predicted:
            self._advance()
        self._predicted = False
        error = value - self._level
        total = self._level_variance + MEASUREMENT_NOISE
        level_gain, trend_gain = self._level_variance / total, self._covariance / total
        self._level += level_gain * error
        self._trend += trend_gain * error
        self._trend_variance -= trend_gain * self._covariance
        self._covariance *= 1 - level_gain
        self._level_variance *= 1 - level_gain

    def next(self) -> float:
        """Return level plus trend, at least 0."""
        if self._points < MIN_POINTS:
            return self._last
        if not self._predicted:
            self._advance()
            self._predicted = True
        return max(0.0, self._level)

    def _advance(self) -> None:
        self._level += self._trend
        self._level_variance += 2 * self._covariance + self._trend_variance + LEVEL_NOISE
        self._covariance += self._trend_variance
        self._trend_variance += TREND_NOISE


def make_predictor(name: PredictorName) -> Predictor:
    return Kalman() if name == "kalman" else Constant()


class TrafficForecast:
    """A forecast, one step ahead, of the requests of an interval and their mean lengths."""

    def __init__(self, name: PredictorName) -> None:
        self._requests, self._input, self._output = (make_predictor(name) for _ in range(3))
        self._last_input = self._last_output = float("nan")

    def add(self, requests: float, input_tokens: float, output_tokens: float) -> None:
        """Add an interval. An interval without requests repeats the lengths of the previous one; NaN means unknown."""
        self._requests.add(requests)
        if requests:
            self._last_input = input_tokens if isfinite(input_tokens) else self._last_input
            self._last_output = output_tokens if isfinite(output_tokens) else self._last_output
        else:
            input_tokens, output_tokens = self._last_input, self._last_output
        for predictor, value in ((self._input, input_tokens), (self._output, output_tokens)):
            if isfinite(value):
                predictor.add(value)

    def next(self) -> tuple[float, float, float]:
        """Return (requests, input tokens, output tokens) of the next interval."""
        return self._requests.next(), self._input.next(), self._output.next()
