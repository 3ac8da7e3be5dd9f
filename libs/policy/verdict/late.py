"""The cause that holds when answers miss their targets although no phase is short of workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from libs.policy.verdict.causes import Cause, CauseCode, figure
from libs.policy.verdict.state import Grade, ModelState, Threshold

LATE: Final = Threshold(0.05, 0.03)
"""The share of requests over a target: above the first the 95th percentile is over it."""
LEAST_LATE: Final = 3
"""Late requests below which a share is chance."""
# Behind all causes that explain why requests are late.
RANK: Final = 5


@dataclass(frozen=True, slots=True)
class Punctuality:
    """The requests of the last seconds that have a target, and those that miss it."""

    requests: int
    late: int

    @property
    def grade(self) -> Grade:
        share = self.late / self.requests if self.requests else 0.0
        # One late request of thirty would otherwise keep the cause alive for as long as it waits.
        chance = Grade.HOLD if share > LATE.fire else Grade.CLEAR
        return LATE.grade(share) if self.late >= LEAST_LATE else chance


def late_causes(state: ModelState, first: Punctuality, tokens: Punctuality) -> Iterator[Cause]:
    """Yield the cause if it holds or is between its thresholds.

    `first` counts requests by their TTFT, with those that wait for a first token now; `tokens` counts answers by
    their TPOT.
    """
    grade = max(first.grade, tokens.grade)
    if grade is Grade.CLEAR:
        return
    prefill, decode = figure(state.pressures.prefill), figure(state.pressures.decode)
    although = f"although prefill pressure is {prefill} and decode pressure {decode}"
    where = "`fulcrum request --slowest` shows where their time goes."
    if first.grade is grade:
        # Workers compute prompts that can still meet their target before those that cannot (ADR 49).
        sentence = (
            f"Late: {first.late:,} of {first.requests:,} requests are over their TTFT target of"
            f" {state.ttft_ns / 1e9:g} s, {although}. Late prompts wait behind those that can still be in time: {where}"
        )
    else:
        # KV on its way to a decode worker counts too: the client waits for it between two tokens.
        sentence = (
            f"Late: {tokens.late:,} of {tokens.requests:,} answers are over their TPOT target of"
            f" {state.work.tpot_ns / 1e6:g} ms, {although}: {where}"
        )
    yield Cause(CauseCode.LATE, state.model, sentence, grade=grade, rank=RANK)
