"""What a step may take on beside running sequences without breaking their time per output token. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork

MAX_STEP_NS: Final = 400_000_000
MAX_STEP_TPOTS: Final = 3
"""While a sequence with a TPOT target decodes, prompts make no step longer than `MAX_STEP_NS` or this multiple of the
tightest target, however far ahead of their lines all sequences are: a sequence that joins waits for the step. Only
prompts that have waited for `MAX_HOLD_NS` may."""
MAX_JOINED_TPOTS: Final = 1.5
"""While sequences are on their way here, prompts make no step longer than this multiple of the tightest target of
those: the one that joins has its first token out, and its second one waits for the step."""
IN_HAND: Final = 0.05
"""Of TPOT, what prompts leave to the sequences beside them: without it one that joined late never catches up."""
MAX_HOLD_NS: Final = 2_000_000_000
"""After being held back for so long, a transferred sequence joins the next step, and so does some of a prompt."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """When a running sequence's tokens are due: its first at `anchor_ns`, each further one `tpot_ns` later."""

    anchor_ns: int
    tpot_ns: int
    tokens: int
    """Tokens since the one at the anchor."""

    @property
    def due_ns(self) -> int:
        """When the next token is due."""
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
    """Prompt tokens that the next step may compute beside `decodes`: the most that keep the tightest line.

    Prompts that have waited for `MAX_HOLD_NS` get as long again as the decodes take, or, where that is not enough for
    a token, as many tokens as take no longer than one does.
    lines: of those running sequences that have a target. prompts: (first token to compute, one past the last) of each,
    in the order in which they are served. waited_ns: how long no token of them was computed. coming_tpot_ns: the
    tightest target of sequences whose KV is on its way here; 0: none.
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
    """A step of at most `limit_ns` that decodes, and computes prompts beside it."""

    model: StepTimeModel
    decode_ns: float
    reading_ns: float
    """The decodes' (see `StepTimeModel`)."""
    limit_ns: float

    def most_prompt_tokens(self, prompts: Sequence[tuple[int, int]], most_tokens: int) -> int:
        """The most tokens, at most `most_tokens`, that prompts give when they are served in order."""
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
        """The most tokens, less than `whole`, of the prompt from `start` on beside prompts that are taken whole.

        What the limit leaves them is b·t + c·t², solved for t in the form in which nothing cancels. Where rounding
        puts that on the wrong side of the limit, the search does not.
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
    """How long the next step may be, given what its decodes alone take.

    A sequence that its line leaves time for bounds the step by that, and keeps `IN_HAND` where it can. One that has not
    so much in hand, or is late whatever the step takes, but whose target decode can hold, is left half of the
    difference to catch up. One whose target decode cannot hold bounds nothing once it is late: holding prompts back
    would not help it.
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
    """The most sequences, at most `most`, that decode together within a TPOT target; 0 when one alone cannot."""
    return largest(
        lambda batch: (
            model.decode_ns(StepWork(decode_sequences=batch, decode_kv_tokens=batch * kv_tokens_each)) <= tpot_ns
        ),
        most,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number in 1..most that fits, where all smaller ones fit too; 0 when 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
