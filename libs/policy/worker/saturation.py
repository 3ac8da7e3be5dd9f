"""The smallest prefill batch that saturates a device: the knee of throughput over tokens in a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork, chunks_work

KNEE: Final = 0.97
"""The share of the plateau at which a batch counts as saturating."""
# Blocks and matrix tiles are multiples of this, so chunk sizes are too.
CHUNK_MULTIPLE: Final = 16
ROUNDS: Final = 3
"""The number of times that each size is measured."""
MOST_TOKENS: Final = 8192
"""The maximum number of prompt tokens of a measured step."""
FIRST_TOKENS: Final = 32
GROWTH: Final = 1.5
CAUTION: Final = 1.5
"""The factor by which a trial may exceed its expected duration."""
# A larger median scatter between repeated trials means that other processes used the cores.
STEADY: Final = 0.15
# Fewer sizes do not determine a curve.
MIN_SIZES: Final = 6
TRIAL_PROMPT_TOKENS: Final = 512
FIRST_GUESS: Final = (0.01, 100.0)
"""Bounds on the factor between a device's measured and assumed speed."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Point:
    """The median measurement and the fitted throughput at one size."""

    tokens: int
    measured_tokens_per_s: float
    fitted_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """The result of the trials on one device."""

    chunk_tokens: int
    """The smallest size within 3 % of the plateau."""
    plateau_tokens_per_s: float
    curve: tuple[Point, ...]
    model: StepTimeModel
    scatter: float = 0.0
    """The relative excess of the slowest over the fastest trial of a size; the median over the sizes."""

    @property
    def is_steady(self) -> bool:
        """Return whether equal steps took about equally long, so that the device alone was measured."""
        return self.scatter <= STEADY

    @property
    def is_whole(self) -> bool:
        """Return whether the measured sizes reach past the knee, or up to the bound.

        Throughput grows with size until the device is saturated. A range that ends before that always has its knee near
        its end.
        """
        largest = self.curve[-1].tokens
        return largest >= min(self.chunk_tokens * GROWTH, MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """A measurement in the form in which it is stored."""

    saturation: Saturation
    unix_ns: int


def sizes(most_tokens: int) -> list[int]:
    """Return the sizes to measure, each larger by half than the one before, up to `most_tokens`."""
    found, size = [], float(FIRST_TOKENS)
    while size < most_tokens / GROWTH:
        found.append(round(size / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
        size *= GROWTH
    return [*found, most_tokens]


def plan_trials(prior: StepTimeModel, most_tokens: int, limit_ns: int, most_ns: int = 0) -> Iterator[int]:
    """Yield sizes in the order of measurement: each size once a round, with the direction alternating.

    The largest sizes are left out until all rounds are expected to fit in `limit_ns`. The smallest MIN_SIZES may
    take `most_ns` if that is more. Nothing is yielded if even those do not fit.
    """
    wanted = sizes(most_tokens)
    expected_ns = [CAUTION * prior.prefill_ns(trial_work(size)) for size in wanted]
    while len(wanted) > MIN_SIZES and ROUNDS * sum(expected_ns[: len(wanted)]) > limit_ns:
        wanted.pop()
    if ROUNDS * sum(expected_ns[: len(wanted)]) > CAUTION * max(limit_ns, most_ns):
        return
    for turn in range(ROUNDS):
        yield from wanted if turn % 2 else reversed(wanted)


def calibrated(prior: StepTimeModel, trial: MeasuredStep) -> StepTimeModel:
    """Scale a device's prior to match the duration of one measured step."""
    expected_ns = prior.prefill_ns(trial_work(trial.tokens))
    if expected_ns <= 0:
        return prior
    least, most = FIRST_GUESS
    return prior.scaled(min(max(trial.duration_ns / expected_ns, least), most))


def knee_of(model: StepTimeModel, most_tokens: int) -> tuple[int, float]:
    """Return (smallest size within 3 % of the plateau, plateau in tokens/s) for sizes up to `most_tokens`."""
    rates = {size: prefill_tokens_per_s(model, size) for size in range(CHUNK_MULTIPLE, most_tokens + 1, CHUNK_MULTIPLE)}
    if not rates:
        return most_tokens, prefill_tokens_per_s(model, most_tokens)
    plateau = max(rates.values())
    return next(size for size, rate in rates.items() if rate >= KNEE * plateau), plateau


def trial_prompts(tokens: int) -> list[int]:
    """Return the prompt lengths of a trial, each short enough that batch size dominates over attention."""
    whole, rest = divmod(tokens, TRIAL_PROMPT_TOKENS)
    return [TRIAL_PROMPT_TOKENS] * whole + ([rest] if rest else [])


def trial_work(tokens: int) -> StepWork:
    whole, rest = divmod(tokens, TRIAL_PROMPT_TOKENS)
    return StepWork(
        prefill_tokens=tokens,
        prefill_sequences=whole + bool(rest),
        prefill_context_tokens=tokens,
        prefill_squared_tokens=whole * TRIAL_PROMPT_TOKENS**2 + rest**2,
    )


def prompt_ns(model: StepTimeModel, tokens: int, chunk_tokens: int) -> float:
    """Return the time to compute a prompt alone, in chunks."""
    spans = ((start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens))
    return sum(model.prefill_ns(chunks_work([span])) for span in spans)


def ttft_under_load_ns(model: StepTimeModel, tokens: int, chunk_tokens: int) -> float:
    """Return the expected TTFT on a busy worker: half a full step of waiting, then the prompt in chunks."""
    return model.prefill_ns(StepWork(chunk_tokens, 1, chunk_tokens)) / 2 + prompt_ns(model, tokens, chunk_tokens)


def prefill_tokens_per_s(model: StepTimeModel, tokens: int) -> float:
    """Return the throughput of steps of `tokens` prompt tokens, in tokens per second."""
    return tokens / max(model.prefill_ns(trial_work(tokens)), 1.0) * 1e9
