"""What a step may take on beside running sequences without breaking their time per output token. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork, chunks_work

MAX_STEP_NS: Final = 400_000_000
"""Prompts make no step longer than this while a sequence with a TPOT target decodes, however far ahead of their lines
all are; only ones that have waited for `MAX_HOLD_NS` may."""
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
) -> int:
    """Prompt tokens that the next step may compute beside `decodes`: the most that keep the tightest line.

    Prompts that have waited for `MAX_HOLD_NS` get as long again as the decodes take, or, where that is not enough for
    a token, as many tokens as take no longer than one does.
    lines: of those running sequences that have a target. prompts: (first token to compute, one past the last) of each,
    in the order in which they are served. waited_ns: how long no token of them was computed.
    """
    most_tokens = min(most_tokens, sum(end - start for start, end in prompts))
    if most_tokens <= 0 or not decodes.decode_sequences or not lines:
        return max(most_tokens, 0)

    def step_ns(tokens: int) -> float:
        return model.step_ns(chunks_work(first_chunks(prompts, tokens), decodes))

    decode_ns = model.decode_ns(decodes)
    limit_ns = step_limit_ns(decode_ns, lines, now_ns=now_ns)
    if waited_ns >= MAX_HOLD_NS:
        limit_ns = max(limit_ns, 2 * decode_ns, step_ns(1))
    return largest(lambda tokens: step_ns(tokens) <= limit_ns, most_tokens)


def step_limit_ns(decode_ns: float, lines: Sequence[TokenLine], *, now_ns: int) -> float:
    """How long the next step may be, given what its decodes alone take.

    A sequence that its line leaves time for bounds the step by that. One that is late whatever the step takes, but
    whose target decode can hold, is left half of the difference to catch up. One whose target decode cannot hold bounds
    nothing: holding prompts back would not help it.
    """
    limit_ns = float(MAX_STEP_NS)
    for line in lines:
        slack_ns = line.due_ns - now_ns
        if slack_ns >= decode_ns:
            limit_ns = min(limit_ns, slack_ns)
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


def first_chunks(prompts: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The chunks that `tokens` tokens make when prompts are served in order."""
    chunks = []
    for start, end in prompts:
        if tokens <= 0:
            break
        taken = min(end - start, tokens)
        chunks.append((start, start + taken))
        tokens -= taken
    return chunks
