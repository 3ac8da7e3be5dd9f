"""The work of one engine between two readings of its counters."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import exp, inf
from typing import Final

# A longer interval spans failed readings, so the gauges at its ends say little about its middle.
LONGEST_INTERVAL_S: Final = 3.0
SERIAL_SHARE: Final = 0.6  # the share of an interval up to which prefill times of prompts hardly overlap
BUSY_CONCURRENCY: Final = 5.0
"""The number of running requests from which an engine counts as busy throughout.

It is compared with the smaller figure of both ends, plus their mean by inter-token time. Two or three requests leave
gaps: a third of such intervals was idle.
"""
# A step computes at least this many prompt tokens if it can. It limits the steps of prompts without a first token.
CHUNK_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's counters and gauges at one time; counters only grow unless the server restarted."""

    t_s: float
    samples: float
    """Output batches so far; prompt chunks other than the last produce none."""
    prompt_tokens: float
    """Prompt tokens computed here, counted at the first token of their prompt."""
    generated_tokens: float
    first_tokens: float
    token_gaps: float
    """The count of inter-token latencies; `token_gaps_s` is their sum."""
    token_gaps_s: float
    prefills: float
    """The count of ended requests; `prefills_s` is the sum of their times from scheduling to the first token."""
    prefills_s: float
    running: float
    waiting: float
    tokens_at_most: Sequence[tuple[float, float]]
    """Samples by (upper bound of their tokens, count so far), ascending, the last bound infinite."""

    def restarted_since(self, before: "Reading") -> bool:
        """Return whether a counter decreased, so that differences to `before` are meaningless."""
        return (
            self.samples < before.samples
            or self.prompt_tokens < before.prompt_tokens
            or self.generated_tokens < before.generated_tokens
            or self.first_tokens < before.first_tokens
        )


@dataclass(slots=True)
class CountedWork:
    """Counts of work over a span of time. `add` joins two spans."""

    wall_s: float = 0.0
    steps: float = 0.0
    prefill_steps: float = 0.0
    prompt_tokens: float = 0.0
    decode_tokens: float = 0.0
    token_gaps: float = 0.0
    token_gaps_s: float = 0.0

    def add(self, other: "CountedWork") -> None:
        self.wall_s += other.wall_s
        self.steps += other.steps
        self.prefill_steps += other.prefill_steps
        self.prompt_tokens += other.prompt_tokens
        self.decode_tokens += other.decode_tokens
        self.token_gaps += other.token_gaps
        self.token_gaps_s += other.token_gaps_s

    def fade(self, kept: float) -> None:
        """Multiply all counts by `kept`."""
        for each in fields(self):
            setattr(self, each.name, kept * getattr(self, each.name))

    @property
    def decoding(self) -> float:
        """The mean number of decoding sequences in a step."""
        return self.decode_tokens / max(self.steps, 1.0)

    @property
    def chunk_tokens(self) -> float:
        """The mean number of prompt tokens in a prefill step."""
        return self.prompt_tokens / max(self.prefill_steps, 1.0)


@dataclass(frozen=True, slots=True)
class CounterChange:
    """The differences of a server's counters between two scrapes."""

    t_s: float
    """The end of the interval, in Unix seconds."""
    work: CountedWork
    busy_throughout: bool
    lone_prefill_s: float | None
    """Mean time from scheduling to the first token, if requests began and ended here one after the other."""
    from_idle: bool = False
    """True if that was a single request on an idle engine, and it went on to decode."""
    prefills: float = 0.0
    """Requests that ended with their first token in an interval with only prompts; `prefills_s` is the sum of their
    times from scheduling to it.
    """
    prefills_s: float = 0.0


def interval(before: Reading, after: Reading) -> CounterChange:
    """Return the work between two readings of one server process."""
    first_tokens = after.first_tokens - before.first_tokens
    work = CountedWork(
        wall_s=after.t_s - before.t_s,
        steps=after.samples - before.samples,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        decode_tokens=max(after.generated_tokens - before.generated_tokens - first_tokens, 0.0),
        token_gaps=after.token_gaps - before.token_gaps,
        token_gaps_s=after.token_gaps_s - before.token_gaps_s,
    )
    work.prefill_steps = _prefill_steps(before, after, work, first_tokens)
    prefills_s = max(after.prefills_s - before.prefills_s, 0.0)
    # Several prompts count if their times are short enough to have run one after the other.
    serial = first_tokens == 1 or (not work.token_gaps and prefills_s <= SERIAL_SHARE * work.wall_s)
    alone = serial and 1 <= first_tokens == after.prefills - before.prefills
    prompts_alone = not work.token_gaps and 1 <= first_tokens == after.prefills - before.prefills
    return CounterChange(
        after.t_s,
        work,
        _busy_throughout(before, after, work),
        prefills_s / first_tokens if alone and work.prompt_tokens > 0 else None,
        first_tokens == 1 and work.token_gaps > 0 and not before.running and not before.waiting,
        first_tokens if prompts_alone else 0.0,
        prefills_s if prompts_alone else 0.0,
    )


def _busy_throughout(before: Reading, after: Reading, work: CountedWork) -> bool:
    if not work.steps or work.wall_s > LONGEST_INTERVAL_S:
        return False
    if before.waiting and after.waiting:
        return True
    fewest = min(before.running, after.running)
    # Token gaps add up to the time that sequences decoded; divided by the wall time, that is the concurrency.
    return fewest > 0 and fewest + work.token_gaps_s / work.wall_s >= BUSY_CONCURRENCY


def _prefill_steps(before: Reading, after: Reading, work: CountedWork, first_tokens: float) -> float:
    """Estimate how many steps computed prompt tokens.

    A step's sample counts prompt and decode tokens together. Where a prompt lifts it over the bucket of decode-only
    steps, the histogram separates the two. Elsewhere prompts are assumed to arrive at random.
    """
    if not work.prompt_tokens:
        return 0.0
    if not work.steps:
        return 1.0
    prompts = max(first_tokens, 1.0)
    decoding = max(before.running, after.running, work.decoding)
    bound = next((bound for bound, _ in after.tokens_at_most if bound >= 1.1 * decoding), inf)
    if decoding + 0.6 * work.prompt_tokens / prompts > bound:
        found = _samples_above(after, bound) - _samples_above(before, bound)
    else:
        found = work.steps * (1.0 - exp(-prompts / work.steps))
    most = min(work.steps, prompts + work.prompt_tokens / CHUNK_TOKENS)
    return min(max(found, 1.0), max(most, 1.0))


def _samples_above(reading: Reading, bound: float) -> float:
    below = next((count for upper, count in reading.tokens_at_most if upper >= bound), reading.samples)
    return reading.samples - below
