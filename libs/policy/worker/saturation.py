"""The smallest prefill batch that saturates a device: the knee of tokens a second against tokens in a step. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork, chunks_work

KNEE: Final = 0.97
"""A batch saturates that reaches so much of the plateau."""
CHUNK_MULTIPLE: Final = 16
"""Chunk sizes are multiples of this: blocks and matrix tiles are."""
ROUNDS: Final = 3
"""How often each size is measured."""
MOST_TOKENS: Final = 8192
"""No step of more prompt tokens is ever measured."""
FIRST_TOKENS: Final = 32
GROWTH: Final = 1.5
CAUTION: Final = 1.5
"""How much longer a trial may take than expected."""
STEADY: Final = 0.15
"""Repeated trials that differ by more, in the median of the sizes, were held up: by others that use the cores."""
MIN_SIZES: Final = 6
"""Fewer tell no curve."""
TRIAL_PROMPT_TOKENS: Final = 512
FIRST_GUESS: Final = (0.01, 100.0)
"""A device is taken for at most so much faster or slower than it was believed to be."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step."""

    tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Point:
    """What one size gave: the median of what was measured, and the fitted curve."""

    tokens: int
    measured_tokens_per_s: float
    fitted_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """What trials say."""

    chunk_tokens: int
    """The smallest size within 3 % of the plateau."""
    plateau_tokens_per_s: float
    curve: tuple[Point, ...]
    model: StepTimeModel
    scatter: float = 0.0
    """How much longer the slowest trial of a size took than the fastest; the median of the sizes."""

    @property
    def is_steady(self) -> bool:
        """Whether equal steps took about as long, so that it was the device that was measured."""
        return self.scatter <= STEADY

    @property
    def is_whole(self) -> bool:
        """Whether the plateau lies inside of what was measured: up to the next size beyond the knee, or to the bound.

        Tokens a second grow with every size until the device is saturated, so a range that ends before has a knee near
        its end, wherever that is.
        """
        largest = self.curve[-1].tokens
        return largest >= min(self.chunk_tokens * GROWTH, MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """A measurement as it is kept."""

    saturation: Saturation
    unix_ns: int
    """When it was made."""


def sizes(most_tokens: int) -> list[int]:
    """Sizes to measure, growing by half each, up to `most_tokens`."""
    found, size = [], float(FIRST_TOKENS)
    while size < most_tokens / GROWTH:
        found.append(round(size / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
        size *= GROWTH
    return [*found, most_tokens]


def plan_trials(prior: StepTimeModel, most_tokens: int, limit_ns: int, most_ns: int = 0) -> Iterator[int]:
    """Sizes in the order in which to measure them: each one several times, the rounds taking turns.

    Sizes whose rounds the prior does not expect to fit into `limit_ns` are left out, largest first. The smallest, which
    tell a curve, may take `most_ns` (`limit_ns` where that is more); where they would not fit there are none.
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
    """The prior of a device as much faster or slower as one step of it says."""
    expected_ns = prior.prefill_ns(trial_work(trial.tokens))
    if expected_ns <= 0:
        return prior
    least, most = FIRST_GUESS
    return prior.scaled(min(max(trial.duration_ns / expected_ns, least), most))


def knee_of(model: StepTimeModel, most_tokens: int) -> tuple[int, float]:
    """(smallest size within 3 % of the plateau, the plateau in tokens a second) of sizes up to `most_tokens`."""
    rates = {size: prefill_tokens_per_s(model, size) for size in range(CHUNK_MULTIPLE, most_tokens + 1, CHUNK_MULTIPLE)}
    if not rates:
        return most_tokens, prefill_tokens_per_s(model, most_tokens)
    plateau = max(rates.values())
    return next(size for size, rate in rates.items() if rate >= KNEE * plateau), plateau


def trial_prompts(tokens: int) -> list[int]:
    """Lengths of the prompts of a trial: none is so long that its attention, not the batch, is what is measured."""
    whole, rest = divmod(tokens, TRIAL_PROMPT_TOKENS)
    return [TRIAL_PROMPT_TOKENS] * whole + ([rest] if rest else [])


def trial_work(tokens: int) -> StepWork:
    """What a trial computes."""
    whole, rest = divmod(tokens, TRIAL_PROMPT_TOKENS)
    return StepWork(
        prefill_tokens=tokens,
        prefill_sequences=whole + bool(rest),
        prefill_context_tokens=tokens,
        prefill_squared_tokens=whole * TRIAL_PROMPT_TOKENS**2 + rest**2,
    )


def prompt_ns(model: StepTimeModel, tokens: int, chunk_tokens: int) -> float:
    """A prompt computed alone in chunks."""
    spans = ((start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens))
    return sum(model.prefill_ns(chunks_work([span])) for span in spans)


def ttft_under_load_ns(model: StepTimeModel, tokens: int, chunk_tokens: int) -> float:
    """A prompt that comes to a busy worker: it waits for half a full step on average, then is computed in chunks."""
    return model.prefill_ns(StepWork(chunk_tokens, 1, chunk_tokens)) / 2 + prompt_ns(model, tokens, chunk_tokens)


def prefill_tokens_per_s(model: StepTimeModel, tokens: int) -> float:
    """Tokens a second in steps of `tokens`."""
    return tokens / max(model.prefill_ns(trial_work(tokens)), 1.0) * 1e9
