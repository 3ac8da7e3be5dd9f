"""The work that a step may add beside running sequences without breaking their time per output token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork

MAX_STEP_NS: Final = 400_000_000
# While a sequence with a TPOT target decodes, prompts make no step longer than MAX_STEP_NS or this multiple of the
# tightest target, however far ahead all sequences are. A sequence that joins has to wait for the step. Only prompts
# that have waited for MAX_HOLD_NS may exceed it.
MAX_STEP_TPOTS: Final = 3
# While sequences are in transit to this worker, prompts make no step longer than this multiple of their tightest
# target. A joining sequence has its first token out, and its second one waits for the step.
MAX_JOINED_TPOTS: Final = 1.5
# The share of TPOT that prompts leave to sequences beside them; without it a late one never catches up.
IN_HAND: Final = 0.05
MAX_HOLD_NS: Final = 2_000_000_000
"""The longest that a transferred sequence is held back before it joins, and a prompt before some of it is computed."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """The due times of a running sequence's tokens: the first at `anchor_ns`, then one every `tpot_ns`."""

    anchor_ns: int
    tpot_ns: int
    tokens: int
    """The number of tokens since the one at the anchor."""

    @property
    def due_ns(self) -> int:
        return self.anchor_ns + self.tpot_ns * (self.tokens + 1)


def prefill_chunk(
    model: StepTimeModel,
    decodes: StepWork,
    lines: Sequence[TokenLine],
    prompts: Sequence[tuple[int, int]],
    *,
    most_tokens: int,
    waited_ns: int,
    now_ns: int,
    coming_tpot_ns: int = 0,
) -> int:
    """Return the most prompt tokens that the next step may compute beside `decodes` without breaking any line.

    Prompts that have waited for `MAX_HOLD_NS` get as much time as the decodes take. If that is too short for one
    token, they get the tokens that take no longer than one.

    `lines` belong to the running sequences that have a target. `prompts` are (first token to compute, one past the
    last) in serving order. `waited_ns` is the time since a token of them was computed. `coming_tpot_ns` is the
    tightest target of sequences whose KV is in transit to this worker; 0 if there is none.
    """
    if (not decodes.decode_sequences and not coming_tpot_ns) or (decodes.decode_sequences and not lines):
        return max(min(most_tokens, sum(end - start for start, end in prompts)), 0)
    if most_tokens <= 0 or not prompts:
        return 0
    decode_ns = model.decode_ns(decodes) if lines else 0.0
    reading_ns = model.reading_ns(decodes.decode_sequences) if lines else 0.0
    limit_ns = step_limit_ns(decode_ns, lines, now_ns=now_ns)
    if coming_tpot_ns:
        limit_ns = min(limit_ns, max(MAX_JOINED_TPOTS * coming_tpot_ns, decode_ns))
    if waited_ns >= MAX_HOLD_NS:
        one_ns = model.mixed_ns(model.chunks_ns(1, 2 * prompts[0][0] + 1), decode_ns, reading_ns)
        limit_ns = max(limit_ns, 2 * decode_ns, one_ns)
    return _Step(model, decode_ns, reading_ns, limit_ns).most_prompt_tokens(prompts, most_tokens)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of at most `limit_ns` that decodes and computes prompts beside the decodes."""

    model: StepTimeModel
    decode_ns: float
    reading_ns: float
    """The weight-reading part of the decodes (see `StepTimeModel`)."""
    limit_ns: float

    def most_prompt_tokens(self, prompts: Sequence[tuple[int, int]], most_tokens: int) -> int:
        """Return how many tokens fit, at most `most_tokens`, when prompts are served in order."""
        tokens = squared = 0
        for start, end in prompts:
            whole = min(end - start, most_tokens - tokens)
            if not self._fits(tokens + whole, squared + whole * (2 * start + whole)):
                return tokens + self._part(tokens, squared, start, whole)
            tokens += whole
            squared += whole * (2 * start + whole)
            if tokens == most_tokens:
                break
        return tokens

    def _fits(self, tokens: int, squared: int) -> bool:
        prefill_ns = self.model.chunks_ns(tokens, squared)
        return self.model.mixed_ns(prefill_ns, self.decode_ns, self.reading_ns) <= self.limit_ns

    def _part(self, tokens: int, squared: int, start: int, whole: int) -> int:
        """Return how many tokens of the prompt from `start` on, fewer than `whole`, fit beside prompts taken whole.

        The remaining time equals b·t + c·t², which is solved for t in the form without cancellation. A search
        corrects the result where rounding puts it on the wrong side of the limit.
        """

        def fits(more: int) -> bool:
            return self._fits(tokens + more, squared + more * (2 * start + more))

        if whole == 1 or not fits(1):
            return 0
        model = self.model
        most_ns = model.most_prefill_ns(self.limit_ns, self.decode_ns, self.reading_ns)
        before_ns = model.prefill_fixed_ns + model.prefill_token_ns * tokens + model.prefill_token_squared_ns * squared
        left_ns = max(max(most_ns, model.prefill_floor_ns) - before_ns, 0.0)
        token_ns = model.prefill_token_ns + 2 * model.prefill_token_squared_ns * start
        divisor = token_ns + sqrt(token_ns * token_ns + 4 * model.prefill_token_squared_ns * left_ns)
        more = max(int(min(2 * left_ns / divisor, whole - 1)), 1) if divisor else 1
        if fits(more) and (more + 1 == whole or not fits(more + 1)):
            return more
        return largest(fits, whole - 1)


def step_limit_ns(decode_ns: float, lines: Sequence[TokenLine], *, now_ns: int) -> float:
    """Return the time limit of the next step, given the time that its decodes take alone.

    A sequence with enough slack bounds the step by it, and keeps `IN_HAND` where it can. One with less, or that is
    late, gives up half of the difference to catch up if decode can keep its target. One whose target decode cannot
    keep sets no bound once it is late, as holding prompts back would not help it.
    """
    tightest_ns = min((line.tpot_ns for line in lines if line.tpot_ns >= decode_ns), default=MAX_STEP_NS)
    limit_ns = float(min(MAX_STEP_NS, MAX_STEP_TPOTS * tightest_ns))
    for line in lines:
        slack_ns = line.due_ns - now_ns
        spare_ns = slack_ns - IN_HAND * line.tpot_ns * (line.tokens + 1)
        if slack_ns >= decode_ns:
            limit_ns = min(limit_ns, slack_ns)
        if spare_ns >= decode_ns:
            limit_ns = min(limit_ns, spare_ns)
        elif line.tpot_ns >= decode_ns:
            limit_ns = min(limit_ns, (line.tpot_ns + decode_ns) / 2)
    return limit_ns


def largest_batch(model: StepTimeModel, tpot_ns: float, kv_tokens_each: int, most: int) -> int:
    """Return how many sequences, at most `most`, can decode together within a TPOT target; 0 if one alone cannot."""
    return largest(
        lambda batch: (
            model.decode_ns(StepWork(decode_sequences=batch, decode_kv_tokens=batch * kv_tokens_each)) <= tpot_ns
        ),
        most,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number in 1..most that fits, or 0 if 1 does not; all numbers below it must fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
