"""The cause that holds when requests miss their TTFT although no phase is short of workers."""

from collections.abc import Iterator
from typing import Final

from libs.policy.verdict.causes import Cause, CauseCode, figure
from libs.policy.verdict.state import Grade, ModelState, Threshold

LATE: Final = Threshold(0.05, 0.03)
"""Share of requests over their TTFT: above the first the 95th percentile is over its target."""
LEAST_LATE: Final = 3
"""Late requests below which a share is chance."""
# Behind all causes that explain why requests are late.
RANK: Final = 5


def late_causes(state: ModelState, requests: int, late: int) -> Iterator[Cause]:
    """Yield the cause if it holds or is between its thresholds.

    `requests` were answered in the last seconds or wait for a first token now, and `late` of them are over their
    TTFT.
    """
    share = late / requests if requests else 0.0
    # One late request of thirty would otherwise keep the cause alive for as long as it waits.
    chance = Grade.HOLD if share > LATE.fire else Grade.CLEAR
    grade = LATE.grade(share) if late >= LEAST_LATE else chance
    if grade is Grade.CLEAR:
        return
    # Workers compute prompts that can still meet their target before those that cannot (ADR 49).
    sentence = (
        f"Late: {late:,} of {requests:,} requests are over their TTFT of {state.ttft_ns / 1e9:g} s, although prompts"
        f" press {figure(state.pressures.prefill)} and decodes {figure(state.pressures.decode)}. Prompts that are late"
        " wait behind those that can still be in time: `fulcrum request --slowest` shows where their time goes."
    )
    yield Cause(CauseCode.LATE, state.model, sentence, grade=grade, rank=RANK)
