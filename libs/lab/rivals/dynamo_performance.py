"""The engine model of Dynamo's planner: step times by regression, and TTFT, ITL and capacity derived from them. Pure.

Read in ai-dynamo 1.6.1 (wheel), dynamo/planner/core/perf_model: base.py (samples in buckets, a fit with a negative
slope is rejected), prefill.py, decode.py, ais_adapter.py (the next request is added to the queued ones) and
engine_query.py (chunks of a prompt, the search for capacity); defaults in dynamo/planner/config/defaults.py.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, isqrt
from typing import Final

import numpy as np

MAX_SAMPLES: Final = 64
"""The number of samples kept, and the window of the averages over requests."""
MIN_SAMPLES: Final = 5
BUCKETS: Final = 16
MAX_BATCH_CANDIDATES: Final = 128
LEAST_STEP_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine's steps and its KV cache."""

    chunk_tokens: int
    max_sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One engine step from telemetry. A step of zero duration is a heartbeat."""

    wall_s: float = 0.0
    prefill_sequences: int = 0
    prefill_tokens: int = 0
    decode_sequences: int = 0
    decode_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of an engine at the time of the decision: its last step and its load."""

    last: Pass
    queued_prefill_tokens: int = 0
    decode_sequences: int = 0
    """The number of running and queued sequences."""
    decode_kv_tokens: int = 0
    """KV tokens of the running and queued sequences."""


@dataclass(slots=True)
class WindowMean:
    """The mean of the latest values, beginning with the first one above 0."""

    _values: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def add(self, value: float) -> None:
        if value > 0 or self._values:
            self._values.append(value)

    @property
    def value(self) -> float:
        # 0 before the first value.
        return sum(self._values) / len(self._values) if self._values else 0.0


Sample = tuple[tuple[float, ...], float]
"""The features of a step, and its duration in seconds."""


class StepRegression:
    """A least-squares fit over steps, whose samples are kept spread over the range of their features.

    `clamped` are the features whose negative slope counts as 0. Any other negative slope invalidates the fit.
    """

    def __init__(self, features: int, clamped: frozenset[int] = frozenset()) -> None:
        self._per_axis = BUCKETS if features == 1 else isqrt(BUCKETS)
        self._clamped = clamped
        self._low = [float("inf")] * features
        self._high = [float("-inf")] * features
        self._buckets: dict[tuple[int, ...], deque[Sample]] = {}
        self._count = 0
        self._fitted: tuple[float, ...] | None = None
        self._stale = True

    @property
    def ready(self) -> bool:
        """Return whether there are enough samples to fit."""
        return self._count >= MIN_SAMPLES

    def add(self, features: tuple[float, ...], wall_s: float) -> None:
        """Add a step. If there are too many, the fullest bucket drops its oldest."""
        low = [min(pair) for pair in zip(self._low, features, strict=True)]
        high = [max(pair) for pair in zip(self._high, features, strict=True)]
        if (low, high) != (self._low, self._high):
            self._low, self._high = low, high
            samples = [sample for bucket in self._buckets.values() for sample in bucket]
            self._buckets.clear()
            for sample in samples:
                self._put(sample)
        self._put((features, wall_s))
        self._count += 1
        if self._count > MAX_SAMPLES:
            fullest = max(self._buckets, key=lambda key: len(self._buckets[key]))
            self._buckets[fullest].popleft()
            self._count -= 1
            if not self._buckets[fullest]:
                del self._buckets[fullest]
        self._stale = True

    def predict_s(self, *features: float) -> float | None:
        """Return the predicted seconds of a step, or None without a valid fit."""
        if self._stale:
            self._fitted, self._stale = self._fit(), False
        if self._fitted is None:
            return None
        intercept, *slopes = self._fitted
        return max(LEAST_STEP_S, intercept + sum(a * x for a, x in zip(slopes, features, strict=True)))

    def _put(self, sample: Sample) -> None:
        key = tuple(
            min(int((x - low) / (high - low) * self._per_axis), self._per_axis - 1) if high > low else 0
            for x, low, high in zip(sample[0], self._low, self._high, strict=True)
        )
        self._buckets.setdefault(key, deque()).append(sample)

    def _fit(self) -> tuple[float, ...] | None:
        if not self.ready:
            return None
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        x = np.array([features for features, _ in samples])
        y = np.array([wall_s for _, wall_s in samples])
        centre, mean = x.mean(axis=0), y.mean()
        slopes = np.linalg.lstsq(x - centre, y - mean, rcond=None)[0]
        intercept = float(mean - centre @ slopes)
        if any(slope < 0 and index not in self._clamped for index, slope in enumerate(slopes)):
            return None
        return intercept, *(0.0 if slope < -1e-6 else float(slope) for slope in slopes)


class PrefillModel:
    """A model of prefill steps by their prompt tokens, which predicts TTFT and an engine's capacity."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._steps = StepRegression(1)
        self._prompt_tokens = WindowMean()

    def observe(self, last: Pass) -> None:
        """Add a step. As in the shipped code, steps without prompts pull the mean prompt down."""
        self._prompt_tokens.add(last.prefill_tokens / last.prefill_sequences if last.prefill_sequences else 0.0)
        if last.wall_s:
            self._steps.add((float(last.prefill_tokens),), last.wall_s)

    @property
    def ready(self) -> bool:
        """Return whether there are enough steps to predict."""
        return self._steps.ready

    def ttft_s(self, engine: EngineState, queue_scale: float = 1.0) -> float | None:
        """Return the TTFT of a next request of mean length, behind a queue `queue_scale` times as long."""
        return self._prompts_s(ceil(engine.queued_prefill_tokens * queue_scale + self._prompt_tokens.value))

    def capacity_rps(self, input_tokens: float, ttft_s: float) -> float | None:
        """Return the highest rate at which a batch of such prompts meets TTFT, or the highest of all if none does."""
        tokens = ceil(input_tokens)
        most = 1
        if tokens <= self._limits.chunk_tokens:
            most = min(self._limits.max_sequences, self._limits.chunk_tokens // max(1, tokens))
        rates = [
            (batch / wall_s, wall_s <= ttft_s)
            for batch in batch_sizes(most)
            if (wall_s := self._prompts_s(tokens * batch)) is not None
        ]
        return best_rate(rates)

    def _prompts_s(self, tokens: int) -> float | None:
        chunks, tail = divmod(tokens, self._limits.chunk_tokens)
        whole_s = self._steps.predict_s(float(self._limits.chunk_tokens))
        tail_s = self._steps.predict_s(float(tail))
        if whole_s is None or tail_s is None:
            return None
        return chunks * whole_s + (tail_s if tail else 0.0)


class DecodeModel:
    """A model of decode steps by their sequences and KV, which predicts ITL and an engine's capacity."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._steps = StepRegression(2, clamped=frozenset({0}))
        self._sequence_tokens = WindowMean()

    def observe(self, last: Pass) -> None:
        if last.decode_sequences:
            self._sequence_tokens.add(last.decode_kv_tokens / last.decode_sequences)
        if last.wall_s:
            self._steps.add((float(last.decode_sequences), float(last.decode_kv_tokens)), last.wall_s)

    @property
    def ready(self) -> bool:
        """Return whether there are enough steps to predict."""
        return self._steps.ready

    def itl_s(self, engine: EngineState, scale: float = 1.0) -> float | None:
        """Return the ITL with a next request of mean length beside `scale` times the present load."""
        next_tokens = self._sequence_tokens.value
        sequences = ceil(engine.decode_sequences * scale + (1 if next_tokens else 0))
        return self._steps.predict_s(float(sequences), float(ceil(engine.decode_kv_tokens * scale + next_tokens)))

    def capacity_rps(self, input_tokens: float, output_tokens: float, itl_s: float) -> float | None:
        """Return the highest rate at which a batch stays within ITL, or the highest of all if none does."""
        output = max(1, ceil(output_tokens))
        context = ceil(input_tokens) + output // 2
        most = min(self._limits.max_sequences, self._limits.kv_tokens // context)
        rates = [
            (batch / (output * wall_s), wall_s <= itl_s)
            for batch in batch_sizes(most)
            if (wall_s := self._steps.predict_s(float(batch), float(batch * context))) is not None
        ]
        return best_rate(rates)


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes to try: all up to 128, beyond that 128 sizes spread evenly."""
    if most <= MAX_BATCH_CANDIDATES:
        return list(range(1, most + 1))
    return [1 + index * (most - 1) // (MAX_BATCH_CANDIDATES - 1) for index in range(MAX_BATCH_CANDIDATES)]


def best_rate(rates: Sequence[tuple[float, bool]]) -> float | None:
    """Return the highest rate that keeps the target, or the highest of all if none does; None without rates."""
    return max(([rate for rate, keeps in rates if keeps] or [rate for rate, _ in rates]), default=None)
